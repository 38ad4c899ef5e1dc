"""One run of a scenario through a cluster under faults, its fault-free reference, and what must hold afterwards."""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import msgspec
import numpy as np

from rankwatch import wire
from rankwatch_detectors.base import Frame
from rankwatch_detectors.catalogue import detectors
from rankwatch_service.log.base import Entry
from rankwatch_service.log.control_log import ControlLog
from rankwatch_service.notify.pipeline import ReceiverRoute
from rankwatch_service.series.query import POINTS_MAX, RANKS_MAX, Reduce, series
from rankwatch_service.stream.loop import Stream
from tests.support.clock import FakeClock
from tests.support.recordings.outcome import Outcome, outcome_of
from tests.support.recordings.recording import RecordedLog
from tests.support.service.webhook_receiver import WebhookReceiver, route_all, subscribe
from tests.support.store.database import new_database
from tests.support.trials.cluster import RECEIVER, Cluster
from tests.support.trials.fleet import sent

START_NS = 1_700_000_000_000_000_000


class NoCharts:
    def add(self, job: str, frame: Frame) -> None:
        pass

    def flush(self, job: str) -> None:
        pass

    def delete(self, job: str) -> None:
        pass

    def close(self, job: str) -> None:
        pass

    def flush_due(self) -> None:
        pass


@cache
def reference(scenario: str) -> Outcome:
    """What the scenario leads to while nothing fails."""
    clock = FakeClock(START_NS)
    with tempfile.TemporaryDirectory() as folder:
        engine = new_database(Path(folder))
        controls = ControlLog(engine, clock)
        subscribe(engine, ReceiverRoute(RECEIVER))
        log = RecordedLog()
        for message in sent(scenario, START_NS):
            clock.now_ns = START_NS + round(message.time_s * 1e9)
            log.record(Entry(message.batch.job, wire.encode(message.batch)), clock.now_ns)
        stream = Stream(engine, log, controls, clock, detectors, lambda _job, _incident: {}, NoCharts())
        stream.start()
        while stream.step():
            pass
        route_all(engine, clock.now_ns)
        outcome = outcome_of(engine)
        engine.dispose()
    return outcome


AWAY_S = (0.3, 2.0)
"""Between a kill and the order to start again."""


def kinds(cluster: Cluster) -> dict[str, list[str]]:
    """What can be killed, by role: of several streams or notifiers one at a time."""
    found: dict[str, list[str]] = {}
    for name in cluster.names:
        found.setdefault(name.partition("-")[0], []).append(name)
    return found


def kills(
    cluster: Cluster,
    seed: int,
    every_s: float,
    until_s: float,
    only: tuple[str, ...] = (),
    first_s: float | None = None,
) -> Iterator[Act]:
    """One kill each `every_s`, of every role or of `only` these in turn, until so many seconds after the beginning.

    Each round has an order of its own. No role is killed again before all others were: an outage of the log stays as
    long as one start of a broker.
    """
    chance = random.Random(seed)
    roles = {role: names for role, names in kinds(cluster).items() if not only or role in only}
    assert roles, only
    at_s = every_s if first_s is None else first_s
    turns: list[str] = []
    while at_s < until_s:
        turns = turns or chance.sample(sorted(roles), len(roles))
        name = chance.choice(roles[turns.pop()])
        away_s = chance.uniform(*AWAY_S)
        yield at_s, f"kill {name}", lambda name=name: cluster.kill(name)
        yield at_s + away_s, f"start {name}", lambda name=name: cluster.restart(name)
        at_s += every_s


def pauses(cluster: Cluster, name: str, at_s: float, seconds: float) -> Iterator[Act]:
    """One process is paused for so long, then continues."""
    yield at_s, f"pause {name}", lambda: cluster.pause(name)
    yield at_s + seconds, f"resume {name}", lambda: cluster.resume(name)


PLAY_S = 900.0
CATCH_UP_S = 60.0
HARMS = ("kill", "pause")
METRIC = "busy_s"
"""Every rank reports it at every step."""

Act = tuple[float, str, Callable[[], None]]
"""When, after the beginning of play; what to call it; what to do."""


@dataclass
class Trial:
    """What came of a run."""

    expected: Outcome
    found: Outcome
    ids: list[str]
    """Of the webhooks that arrived, in their order."""
    bodies: list[bytes]
    caught_up_s: float
    """From the last kill or pause until no record waited, while the play went on."""
    settle_s: float
    """From the end of the play until nothing was left to do."""
    acts: list[str] = field(default_factory=list)

    @property
    def doubled(self) -> int:
        """Webhooks that arrived again."""
        return len(self.ids) - len(set(self.ids))

    def check(self, doubled_max: int = 0) -> None:
        """Equal incidents and commands; each opened and resolved once; every message came, in order, hardly any twice.

        Raises:
            AssertionError: one of it does not hold.
        """
        _same("incidents", self.found.incidents, self.expected.incidents)
        _same("commands", self.found.commands, self.expected.commands)
        _same("transitions", self.found.turns, self.expected.turns)
        _same("webhooks", frozenset(self.ids), self.found.messages)
        assert self.doubled <= doubled_max, Counter(self.ids).most_common(5)
        numbers: dict[str, list[int]] = {}
        for body in dict(zip(self.ids, self.bodies, strict=True)).values():
            data = msgspec.json.decode(body)["data"]
            numbers.setdefault(data["id"], []).append(data["transition"]["number"])
        assert all(one == sorted(one) for one in numbers.values()), numbers


def _same(what: str, found: frozenset, expected: frozenset) -> None:
    missing, more = sorted(expected - found, key=repr), sorted(found - expected, key=repr)
    assert missing == more == [], f"{what}: missing {missing}, made up {more}"


def run(cluster: Cluster, receiver: WebhookReceiver, scenario: str, acts: Iterable[Act] = ()) -> Trial:
    """Play the scenario, do everything at its time, and wait until all is over."""
    expected = reference(scenario)
    fleet = cluster.play(scenario)
    began_s = harmed_s = time.monotonic()
    done = []
    try:
        for at_s, what, act in sorted(acts, key=lambda one: one[0]):
            time.sleep(max(0.0, began_s + at_s - time.monotonic()))
            if what.startswith(HARMS):
                harmed_s = time.monotonic()
            act()
            done.append(f"{time.monotonic() - began_s:.1f} s {what}")
        cluster.catch_up(CATCH_UP_S)
        caught_up_s = time.monotonic() - harmed_s
        said, _ = fleet.communicate(timeout=PLAY_S)
    finally:
        fleet.kill()
        fleet.wait()
    assert fleet.returncode == 0, f"the agents ended with {fleet.returncode}: {said}"
    settle_s = cluster.settle()
    assert not (died := cluster.died()), f"after {done}: {died}"
    bodies = [call.body for call in receiver.calls]
    return Trial(expected, cluster.outcome(), receiver.ids, bodies, caught_up_s, settle_s, done)


def rank_steps(cluster: Cluster, scenario: str) -> tuple[int, int]:
    """Compare the charts with what was sent, value by value, when the roles have ended.

    Returns:
        How many values were sent, and how many of them the charts hold as they were.

    A value that was counted twice, or belongs to another step, is not as it was.
    """
    given: dict[str, dict[tuple[int, int], float]] = {}
    for message in sent(scenario):
        table = message.batch.steps
        if table is None:
            continue
        columns = {
            name: np.frombuffer(table.columns[name].data, f"<{table.columns[name].dtype}").tolist()
            for name in ("step", "rank", METRIC)
        }
        into = given.setdefault(message.batch.job, {})
        for step, rank, value in zip(columns["step"], columns["rank"], columns[METRIC], strict=True):
            assert into.setdefault((step, rank), value) == value
    total = right = 0
    for job, values in given.items():
        total += len(values)
        right += _charted(cluster, job, values)
    return total, right


def _charted(cluster: Cluster, job: str, values: dict[tuple[int, int], float]) -> int:
    ranks = sorted({rank for _, rank in values})
    right = 0
    for first in range(0, len(ranks), RANKS_MAX):
        some = ranks[first : first + RANKS_MAX]
        (segment,) = series(cluster.engine, job, METRIC, ranks=some, reduce=Reduce.NONE, points=POINTS_MAX)
        assert len(set(segment.step.tolist())) == len(segment.step)
        for rank, line in zip(some, segment.lines, strict=True):
            for step, low, high in zip(segment.step.tolist(), line.low, line.high, strict=True):
                sent_value = values.get((step, rank))
                assert sent_value is None or low == high, f"{job}: several values at step {step} of rank {rank}"
                right += sent_value is not None and abs(low - sent_value) <= 1e-3 * abs(sent_value)
    return right
