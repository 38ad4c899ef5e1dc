"""Telemetry that comes an hour late, and jobs that come back with other ranks or share a name."""

import itertools

import msgspec
import pytest
from sqlalchemy import select

from rankwatch import wire
from rankwatch_service.simulate.faults import Hang, NonFinite, Slow
from rankwatch_service.simulate.job import Job, RankPlacement
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import DeadLetter, Incident, IncidentTransition
from tests.support.recordings.outcome import live_through, with_body
from tests.support.recordings.recording import Timed, telemetry

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


def test_what_comes_again_an_hour_late_is_kept_and_opens_nothing_again(live, clean):
    whole = entries()
    end_s = whole[-1].time_s
    late = [Timed(end_s + HOUR_S + index / 10, timed.entry) for index, timed in enumerate(whole)]
    lived = live(whole + late)
    assert lived.outcome.of("gpt") == clean.outcome.of("gpt")
    assert lived.refused == []
    with read(lived.engine) as connection:
        assert set(connection.scalars(select(Incident.state))) == {"resolved"}


def test_steps_of_one_host_that_come_an_hour_late_for_the_first_time_are_for_the_charts_only(live, clean):
    """Its agent had no connection: a silent host is reported, its late straggling is history."""
    whole = entries()
    end_s = whole[-1].time_s
    cut_s = 40.0
    held_back = [
        timed for timed in whole if timed.time_s > cut_s and wire.decode_batch(timed.entry.value).host == "host-1"
    ]
    kept = [timed for timed in whole if timed not in held_back]
    late = [Timed(end_s + HOUR_S + index / 10, timed.entry) for index, timed in enumerate(held_back)]
    lived = live(kept + late)
    found = {(kind, scope) for kind, scope, *_ in lived.outcome.of("gpt")}
    assert ("telemetry_lost", "host:host-1") in found
    without = live([*kept, Timed(end_s + HOUR_S + len(late) / 10, late[-1].entry)])
    # The straggler of before the cut is the same one; nothing that happened meanwhile opens an hour later.
    assert {row for row in lived.outcome.of("gpt") if row[0] != "telemetry_lost"} == {
        row for row in without.outcome.of("gpt") if row[0] != "telemetry_lost"
    }


def launched(job: Job, launch: str, from_s: float = 0.0, host: str = "host") -> list[Timed]:
    """A job's telemetry under a launch of its own, beginning later, and on hosts of other names."""
    entries = []
    for timed in telemetry("gpt", job):
        message = wire.decode_batch(timed.entry.value)
        k = message.attempt.rpartition(".")[2]
        message = msgspec.structs.replace(
            message,
            attempt=f"{launch}.{k}",
            boot=f"boot-{launch}",
            host=message.host.replace("host", host),
            ranks=tuple(
                msgspec.structs.replace(
                    info, host=info.host.replace("host", host), device_uuid=f"{host}-{info.device_uuid}"
                )
                for info in message.ranks
            ),
        )
        entries.append(with_body(timed, wire.encode(message), timed.time_s + from_s))
    return entries


def size(world_size: int, steps: int, seed: int = 1) -> Job:
    return Job(
        world_size=world_size, steps=steps, step_s=0.5, seed=seed, ends=False, placement=RankPlacement(ranks_per_host=4)
    )


@pytest.mark.parametrize(("before", "after"), [(8, 4), (4, 8), (8, 12)])
def test_a_job_that_restarts_with_another_size_has_no_incident_of_the_old_ranks(live, before, after):
    first = launched(size(before, 160).inject(Slow(before - 1, 60, 1.8)), "a")
    second = launched(size(after, 200, seed=2), "b", from_s=first[-1].time_s + 5.0, host="other")
    lived = live(first + second)
    with read(lived.engine) as connection:
        incidents = connection.execute(select(Incident.__table__)).all()
        resolutions = connection.execute(
            select(IncidentTransition.__table__).where(IncidentTransition.what == "resolved")
        ).all()
    (straggler,) = incidents
    assert (straggler.kind, straggler.attempt, straggler.ranks) == ("straggler", "a.0", [before - 1])
    assert straggler.state == "resolved"
    (resolution,) = resolutions
    assert resolution.text, "it says why it is over"


def test_the_straggler_of_a_new_launch_is_an_incident_of_its_own(live):
    first = launched(size(8, 160).inject(Slow(5, 60, 1.8)), "a")
    second = launched(size(8, 200, seed=2).inject(Slow(5, 100, 1.8)), "b", from_s=first[-1].time_s + 5.0, host="other")
    lived = live(first + second)
    found = sorted(row[1:4] for row in lived.outcome.incidents)
    assert found == [("a.0", "straggler", "rank:5"), ("b.0", "straggler", "rank:5")]


def test_of_two_jobs_with_one_name_the_older_is_watched_until_it_is_silent_and_the_newer_is_reported(live):
    older = launched(size(8, 300).inject(Slow(3, 150, 2.0)), "a")
    newer = launched(size(8, 300, seed=2).inject(Slow(6, 150, 2.0)), "b", from_s=90.0, host="other")
    both = sorted(itertools.chain(older, newer), key=lambda timed: timed.time_s)
    lived = live(both)
    assert {row[1:4] for row in lived.outcome.incidents} == {
        ("a.0", "forged_telemetry", "job"),
        ("a.0", "straggler", "rank:3"),
        ("b.0", "telemetry_lost", "job"),  # what it sent beside the other
        ("b.0", "straggler", "rank:6"),
    }
    with read(lived.engine) as connection:
        assert connection.scalars(select(DeadLetter.id)).all() == []
