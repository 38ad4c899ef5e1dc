"""One run of a scenario through a cluster under faults, and the checks that must hold afterwards."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from rankwatch_service.series.query import POINTS_MAX, RANKS_MAX, Reduce, series
from tests.support.recordings.outcome import Outcome
from tests.support.service.webhook_receiver import WebhookReceiver
from tests.support.trials.cluster import Cluster
from tests.support.trials.fleet import sent
from tests.support.trials.reference import reference

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
    owed_to_the_topic: frozenset[str]
    published: list[str]
    """Ids of the events in the incidents topic."""
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
        _same("events in the topic", frozenset(self.published), self.owed_to_the_topic)
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
    found, owed, published = cluster.outcome(), cluster.owed_to_the_topic(), cluster.published()
    return Trial(expected, found, receiver.ids, bodies, owed, published, caught_up_s, settle_s, done)


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
