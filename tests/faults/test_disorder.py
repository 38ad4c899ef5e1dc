"""Telemetry that comes twice, in another order, or an hour late: the incidents are those of the clean stream."""

import random

import pytest
from sqlalchemy import select

from rankwatch import wire
from rankwatch_service.simulate.faults import Hang, NonFinite, Slow
from rankwatch_service.simulate.job import Job
from rankwatch_service.simulate.placement import RankPlacement
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import Incident
from tests.support.recordings.outcome import live_through
from tests.support.recordings.recording import Timed, telemetry
from tests.support.trials.selection import in_ci

REPEATS_WITHIN_S = 30.0
REORDERED_WITHIN_S = 1.0
"""Hosts' messages overtake each other by their retries, within a second; one host's own sender keeps its order."""
HOUR_S = 3_600.0


def job() -> Job:
    faulty = Job(world_size=8, steps=240, step_s=0.5, seed=12, placement=RankPlacement(ranks_per_host=4))
    return faulty.inject(Slow(5, 60, 1.8, until_step=120), NonFinite(2, 150), Hang(6, 180, seconds=15))


def entries() -> list[Timed]:
    return list(telemetry("gpt", job()))


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    lived = live_through(tmp_path_factory.mktemp("clean"), entries())
    assert lived.outcome.kinds("gpt") == {"straggler", "nonfinite", "hang"}
    yield lived
    lived.engine.dispose()


def test_every_message_three_times_leads_to_nothing_else(tmp_path, clean):
    chance = random.Random(1)
    thrice = [(timed.time_s, 0, timed) for timed in entries()]
    for _, _, timed in list(thrice):
        for _ in range(2):
            again_s = timed.time_s + chance.uniform(0, REPEATS_WITHIN_S)
            thrice.append((again_s, 1, Timed(again_s, timed.entry)))
    end_s = entries()[-1].time_s
    ordered = [timed for time_s, _, timed in sorted(thrice, key=lambda one: one[:2]) if time_s <= end_s]
    assert len(ordered) > 2.5 * len(entries())
    lived = live_through(tmp_path, ordered)
    assert lived.outcome == clean.outcome
    assert lived.refused == []
    lived.engine.dispose()


@pytest.mark.parametrize("seed", [0, *in_ci(range(1, 3))])
def test_hosts_that_overtake_each_other_lead_to_nothing_else(tmp_path, clean, seed):
    chance = random.Random(seed)
    delays: dict[str, float] = {}
    sent = []
    for number, timed in enumerate(entries()):
        host = wire.decode_batch(timed.entry.value).host
        # A host's connection is slow for a while, then fast again; its own messages stay in order.
        if number % 20 == 0:
            delays[host] = chance.uniform(0, REORDERED_WITHIN_S)
        sent.append((timed.time_s + delays.get(host, 0.0), host, timed))
    newest: dict[str, float] = {}
    late = []
    for time_s, host, timed in sent:
        newest[host] = max(newest.get(host, 0.0), time_s)
        late.append(Timed(newest[host], timed.entry))
    lived = live_through(tmp_path, sorted(late, key=lambda timed: timed.time_s))
    assert lived.outcome.of("gpt") == clean.outcome.of("gpt")
    lived.engine.dispose()


def test_what_comes_again_an_hour_late_is_kept_and_opens_nothing_again(tmp_path, clean):
    whole = entries()
    end_s = whole[-1].time_s
    late = [Timed(end_s + HOUR_S + index / 10, timed.entry) for index, timed in enumerate(whole)]
    lived = live_through(tmp_path, whole + late)
    assert lived.outcome.of("gpt") == clean.outcome.of("gpt")
    assert lived.refused == []
    with read(lived.engine) as connection:
        assert set(connection.scalars(select(Incident.state))) == {"resolved"}
    lived.engine.dispose()


def test_steps_of_one_host_that_come_an_hour_late_for_the_first_time_are_for_the_charts_only(tmp_path, clean):
    """Its agent had no connection: a silent host is told, its late straggling is history."""
    whole = entries()
    end_s = whole[-1].time_s
    cut_s = 40.0
    held_back = [
        timed for timed in whole if timed.time_s > cut_s and wire.decode_batch(timed.entry.value).host == "host-1"
    ]
    kept = [timed for timed in whole if timed not in held_back]
    late = [Timed(end_s + HOUR_S + index / 10, timed.entry) for index, timed in enumerate(held_back)]
    lived = live_through(tmp_path, kept + late)
    found = {(kind, scope) for kind, scope, *_ in lived.outcome.of("gpt")}
    assert ("telemetry_lost", "host:host-1") in found
    without = live_through(tmp_path / "without", [*kept, Timed(end_s + HOUR_S + len(late) / 10, late[-1].entry)])
    # The straggler of before the cut is the same one; nothing that happened meanwhile opens an hour later.
    assert {row for row in lived.outcome.of("gpt") if row[0] != "telemetry_lost"} == {
        row for row in without.outcome.of("gpt") if row[0] != "telemetry_lost"
    }
    for one in (lived, without):
        one.engine.dispose()
