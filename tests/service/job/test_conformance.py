"""From batches to incidents with all detectors: the same telemetry gives the same incidents, in bundles or one by one,
twice, late, in another order, and with restarts from snapshots in between."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rankwatch import wire
from rankwatch_detectors.catalogue import detectors
from rankwatch_service.simulate.batches import batches
from rankwatch_service.simulate.faults import Hang, NonFinite, Slow
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job, RankPlacement
from rankwatch_service.store.rows import incident_row, transition_row
from tests.support.service.partition import PlayedPartition

JOB = "gpt"
DRAWN = {"max_examples": 3, "phases": (Phase.explicit, Phase.generate), "deadline": None}
Turns = Sequence[Sequence[bytes]]
"""The bodies that arrive before each tick; ticks are a second apart."""


@cache
def turns() -> Turns:
    job = Job(8, 170, 12, step_s=0.5, placement=RankPlacement(ranks_per_host=2)).inject(
        Slow(5, 60, 1.8, until_step=100), NonFinite(2, 120)
    )
    found: list[list[bytes]] = []
    for message in batches(JOB, generate(job.inject(Hang(6, 150, seconds=15.0)))):
        while len(found) <= message.time_s:
            found.append([])
        found[-1].append(wire.encode(message.batch))
    return found


def played(turns: Turns, portions: Sequence[int] = (1,), restarts: Sequence[int] = ()) -> list[dict[str, Any]]:
    """Transitions of incidents, in their order.

    Args:
        turns: the bodies before each tick.
        portions: how many records are taken at a time, repeated as often as needed.
        restarts: numbers of ticks after which a new partition goes on from snapshots.
    """
    world = PlayedPartition(detectors)
    for number, bodies in enumerate(turns, 1):
        world.records(bodies, portions)
        world.tick_at(number)
        if number in restarts:
            world.restart()
    assert not world.effects.failures
    assert not world.effects.refused
    return [transition_row(one) | incident_row(one.incident) for one in world.effects.transitions]


def incidents(transitions: Sequence[dict[str, Any]]) -> set[Any]:
    """Kind, scope, ranks and onset of the incidents that opened."""
    return {(t["kind"], t["scope"], tuple(t["ranks"]), t["onset_step"]) for t in transitions if t["what"] == "opened"}


@cache
def expected() -> list[dict[str, Any]]:
    found = played(turns())
    assert {kind for kind, *_ in incidents(found)} == {"straggler", "nonfinite", "hang"}
    return found


@settings(**DRAWN)
@given(portions=st.lists(st.integers(1, 40), min_size=1, max_size=4), restarts=st.sets(st.integers(1, 100), max_size=4))
def test_neither_portions_nor_restarts_change_the_transitions(portions: list[int], restarts: set[int]) -> None:
    assert played(turns(), portions, sorted(restarts)) == expected()


@settings(**DRAWN)
@given(seed=st.integers(0, 2**32), twice=st.floats(0.0, 0.5))
def test_neither_the_order_of_hosts_nor_repeated_messages_change_an_incident(seed: int, twice: float) -> None:
    random = np.random.default_rng(seed)
    seen: list[bytes] = []
    disordered = []
    for bodies in turns():
        mixed = list(interleaved(bodies, random))
        seen += mixed
        again = [seen[int(i)] for i in random.integers(0, len(seen), int(twice * len(mixed)))] if seen else []
        disordered.append([*mixed, *again])
    assert incidents(played(disordered, [7])) == incidents(expected())


@settings(**DRAWN)
@given(seed=st.integers(0, 2**32), share=st.floats(0.0, 0.3))
def test_a_host_that_is_a_second_late_now_and_then_changes_no_incident(seed: int, share: float) -> None:
    random = np.random.default_rng(seed)
    late: list[bytes] = []
    delayed = []
    for bodies in turns():
        slow_host = f"host-{random.integers(4)}" if random.random() < share else ""
        now, held = late, []
        for body in bodies:
            (held if wire.decode_batch(body).host == slow_host else now).append(body)
        delayed.append(now)
        late = held
    assert incidents(played([*delayed, late], [5])) == incidents(expected())


def interleaved(bodies: Sequence[bytes], random: np.random.Generator) -> Iterator[bytes]:
    """The same messages with the hosts mixed; what one host sent keeps its order."""
    by_host: dict[str, list[bytes]] = {}
    for body in bodies:
        by_host.setdefault(wire.decode_batch(body).host, []).append(body)
    order = random.permutation([name for name, own in by_host.items() for _ in own])
    for name in order.tolist():
        yield by_host[name].pop(0)
