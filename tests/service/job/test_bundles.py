"""A bundle has the same outcome as bundles of one, whatever its batches contain."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankwatch import wire
from rankwatch_detectors.base import Frame, Observation, Tick
from rankwatch_service.job import frames as frames_module
from rankwatch_service.job.assembler import Assembler
from rankwatch_service.job.gaps import BOOTS_MAX, GAP_WAIT_S, HOSTS_MIN, INTERVALS_MAX, Arrival, Gap, GapTracker
from tests.support.service.partition import Listener, PlayedPartition
from tests.support.trials.selection import trials
from tests.support.values.batches import batch, column, progress, ranks, table

HOSTS = 3
HOST_RANKS = 2
WORLD = HOSTS * HOST_RANKS


def reported(observation: Observation) -> Any:
    if isinstance(observation, Frame):
        cells = {
            name: [repr(value) if here else None for value, here in zip(column.tolist(), present.tolist(), strict=True)]
            for column, present, name in (
                *((observation.values[name], observation.present[name], name) for name in observation.values),
                *((observation.exact[name], observation.present[name], name) for name in observation.exact),
            )
        }
        return observation.family, observation.step, str(observation.kind), observation.time_s, cells
    if isinstance(observation, Tick) and observation.presence is not None:
        board = dataclasses.asdict(observation.presence)
        return "tick", observation.now_s, {name: np.asarray(value).tolist() for name, value in board.items()}
    return repr(observation)


def plain(state: Any) -> Any:
    """Arrays as lists, and what may be NaN as text."""
    if isinstance(state, dict):
        return {name: plain(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return [plain(value) for value in state]
    return repr(state.tolist() if isinstance(state, np.ndarray) else state)


class World(PlayedPartition):
    """What one listener hears, and all else that comes of it."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        super().__init__(lambda: [Listener(self.heard, reported)])

    def outcome(self) -> dict[str, Any]:
        # The order of frames may differ: late rows reach the charts sooner or later, and the rows are the same.
        charted = sorted((reported(frame) for _, frame in self.effects.frames), key=repr)
        refused = [(one.position, one.reason, one.detail) for one in self.effects.refused]
        return {
            "heard": self.heard,
            "frames": charted,
            "refused": refused,
            "failures": self.effects.failures,
            "jobs": self.effects.jobs,
            "place": self.partition.offsets,
            "state": {name: plain(self.partition.snapshot(name)) for name in self.partition.jobs},
        }


def played(turns: Sequence[tuple[float, Sequence[bytes]]], portions: Sequence[int]) -> dict[str, Any]:
    world = World()
    for now_s, bodies in turns:
        world.tick_at(now_s)
        world.records(bodies, portions)
    return world.outcome()


class Agents:
    """Generates what agents send: mostly in order and complete, sometimes not."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random = random
        self.seq = [itertools.count() for _ in range(HOSTS)]
        self.step = [0] * HOSTS
        self.attempt = 0
        self.sent: list[bytes] = []

    def introduce(self) -> list[bytes]:
        return [self.body(host, ranks=ranks(WORLD, f"node-{host}", [2 * host, 2 * host + 1])) for host in range(HOSTS)]

    def body(self, host: int, **fields: Any) -> bytes:
        sent = batch(next(self.seq[host]), host=f"node-{host}", attempt=f"l.{self.attempt}", **fields)
        self.sent.append(wire.encode(sent))
        return self.sent[-1]

    def turn(self, oddity: float) -> list[bytes]:
        """What comes between two ticks."""
        bodies = []
        for _ in range(int(self.random.integers(1, 12))):
            # Hosts of a synchronous job stay within a few steps of each other.
            slowest, any_host = int(np.argmin(self.step)), int(self.random.integers(HOSTS))
            host = slowest if self.random.random() < 0.8 else any_host
            odd = self.random.random() < oddity
            bodies += self.odd(host) if odd else [self.usual(host)]
        return bodies

    def usual(self, host: int) -> bytes:
        steps = 2
        first, self.step[host] = self.step[host], self.step[host] + steps
        fields: dict[str, Any] = {"steps": self.table(host, range(first, first + steps))}
        if first:
            fields["values"] = self.table(host, range(first - steps, first), loss=1.0)
        if self.random.random() < 0.3:
            fields["progress"] = tuple(progress(rank, first + steps) for rank in self.ranks(host))
        return self.body(host, **fields)

    def odd(self, host: int) -> list[bytes]:
        step, who = self.step[host], list(self.ranks(host))
        any_host = int(self.random.integers(HOSTS))
        match int(self.random.integers(14)):
            case 0:
                return [self.sent[int(self.random.integers(len(self.sent)))]]
            case 1:  # the same rows under another number
                return [self.body(host, steps=self.table(host, range(max(step - 2, 0), step + 1)))]
            case 2:
                return [self.body(host, steps=self.table(any_host, [step]))]
            case 3:
                return [self.body(host, steps=table([step, step], [who[0], WORLD + 3], busy_s=[1.0, 1.0]))]
            case 4:
                return [self.body(host, steps=table([step, step], [who[0], who[0]], busy_s=[1.0, 2.0]))]
            case 5:
                return [self.body(host, steps=table([step + 5_000], [who[0]], busy_s=[1.0]))]
            case 6:
                return [self.body(host, events=(wire.Event("note", 1, who[0], step, {"text": "x"}),))]
            case 7:
                return [self.body(host, events=(wire.Event("rank_left", 1, who[0], step),))]
            case 8:
                return [self.body(host, progress=(progress(who[0], step, state="exited"),))]
            case 9:
                bad = wire.Table(2, {"step": column([step, step], "i8"), "rank": column([0], "u4")})
                return [self.body(host, steps=bad), b"\x93not a batch", self.body(host)[:-3]]
            case 10:
                return [self.body(host, steps=table([step], [who[0]], busy_s=[None], loss=[float("nan")]))]
            case 11:
                self.attempt += int(self.random.random() < 0.3)
                return self.introduce()
            case 12:
                next(self.seq[host])  # one is lost
                return [self.usual(host)]
            case _:
                exact = {"nonfinite": [0, 3], "fingerprint": [2**62, -5], "kind": [0, 1]}
                wide = {f"user.{self.random.integers(6)}": [1.0, None]}
                return [self.body(host, steps=table([step, step], who, exact, **wide))]

    def ranks(self, host: int) -> range:
        return range(HOST_RANKS * host, HOST_RANKS * host + HOST_RANKS)

    def table(self, host: int, steps: Sequence[int], **fixed: float) -> wire.Table:
        rows = [(step, rank) for rank in self.ranks(host) for step in steps]
        names = {"busy_s", "step_time_s"} | ({f"phase.{host}"} if self.random.random() < 0.2 else set())
        values = {name: self.random.random(len(rows)).tolist() for name in sorted(names)}
        values |= {name: [value] * len(rows) for name, value in fixed.items()}
        return table([step for step, _ in rows], [rank for _, rank in rows], **values)


def turns_of(seed: int, oddity: float, turns: int = 25) -> list[tuple[float, list[bytes]]]:
    random = np.random.default_rng(seed)
    agents = Agents(random)
    now_s, found = 1_000.0, [(1_000.0, agents.introduce())]
    for _ in range(turns):
        now_s += float(random.choice([0.2, 1.0, 1.0, 2.5]))
        found.append((now_s, agents.turn(oddity)))
    return found


@settings(max_examples=trials(20, 60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    oddity=st.sampled_from([0.0, 0.03, 0.1, 0.4]),
    portions=st.lists(st.integers(1, 12), min_size=1, max_size=4),
)
def test_bundles_have_the_same_outcome_as_bundles_of_one(seed, oddity, portions):
    turns = turns_of(seed, oddity)
    assert played(turns, portions) == played(turns, [1])


@pytest.mark.parametrize("seed", range(4))
def test_bundles_have_the_same_outcome_when_frames_and_names_reach_their_limits(seed, monkeypatch):
    monkeypatch.setattr(frames_module, "OPEN_MAX", 5)
    monkeypatch.setattr(frames_module, "NAMES_MAX", 6)
    turns = turns_of(seed, 0.2, 60)
    assert played(turns, [12]) == played(turns, [1])


def test_usual_telemetry_is_taken_in_bundles(monkeypatch):
    taken: list[int] = []
    real = Assembler.add

    def noted(self: Assembler, bundle: Any, now_s: float, **how: Any) -> Any:
        taken.append(len(bundle.batches))
        return real(self, bundle, now_s, **how)

    agents = Agents(np.random.default_rng(1))
    world = World()
    world.tick_at(1.0)
    world.records(agents.introduce(), [1])
    monkeypatch.setattr(Assembler, "add", noted)
    for second in range(2, 12):
        world.tick_at(float(second))
        world.records([agents.usual(host) for _ in range(4) for host in range(HOSTS)], [100])
    assert taken == [4 * HOSTS] * 10


def test_only_the_bad_batch_of_a_bundle_is_refused():
    agents = Agents(np.random.default_rng(1))
    world = World()
    world.tick_at(1.0)
    world.records(agents.introduce(), [1])
    good = [agents.usual(host) for host in range(HOSTS)]
    bad = agents.body(1, steps=table([-4], [2], busy_s=[1.0]))
    world.records([good[0], bad, *good[1:]], [100])
    (refused,) = world.effects.refused
    assert (refused.position, refused.reason, refused.value) == (HOSTS + 1, "range", bad)
    assert any(isinstance(one, tuple) and one[0] == "steps" for one in world.heard)


@pytest.fixture
def gaps() -> GapTracker:
    return GapTracker()


def test_a_message_in_order_is_new_and_a_repeated_one_changes_nothing(gaps):
    reported = [gaps.arrive("h", "b", seq, 0.0) for seq in (0, 1, 1, 0, 2)]
    assert [one is Arrival.NEW for one in reported] == [True, True, False, False, True]
    assert reported[2:4] == [Arrival.REPEATED] * 2
    assert gaps.gaps(100.0) == []


def test_a_gap_is_reported_once_and_only_after_waiting(gaps):
    gaps.arrive("h", "b", 0, 0.0)
    gaps.arrive("h", "b", 4, 1.0)
    assert gaps.gaps(1.0 + GAP_WAIT_S - 0.1) == []
    assert gaps.gaps(1.0 + GAP_WAIT_S) == [Gap("h", "b", 3)]
    assert gaps.gaps(100.0) == []


def test_a_message_that_was_only_slower_fills_its_gap(gaps):
    for seq in (0, 3):
        gaps.arrive("h", "b", seq, 0.0)
    assert gaps.arrive("h", "b", 1, 0.5) is Arrival.LATE
    assert gaps.arrive("h", "b", 1, 0.5) is Arrival.REPEATED
    assert gaps.arrive("h", "b", 2, 0.5) is Arrival.LATE
    assert gaps.gaps(100.0) == []


def test_a_message_that_comes_after_its_gap_was_reported_is_late_and_not_repeated(gaps):
    for seq in (0, 2):
        gaps.arrive("h", "b", seq, 0.0)
    assert gaps.gaps(10.0) == [Gap("h", "b", 1)]
    assert gaps.arrive("h", "b", 1, 11.0) is Arrival.LATE


def test_messages_before_the_first_that_arrived_are_no_gap(gaps):
    assert gaps.arrive("h", "b", 500, 0.0) is Arrival.NEW
    assert gaps.arrive("h", "b", 499, 0.0) is Arrival.LATE
    assert gaps.gaps(100.0) == []


def test_each_boot_counts_anew_and_the_oldest_are_forgotten(gaps):
    for boot in range(BOOTS_MAX + 1):
        assert gaps.arrive("h", f"b{boot}", 0, 0.0) is Arrival.NEW
    assert gaps.arrive("h", f"b{BOOTS_MAX}", 0, 0.0) is Arrival.REPEATED
    assert gaps.arrive("h", "b0", 0, 0.0) is Arrival.NEW


def test_memory_of_gaps_is_bounded_and_none_is_lost_silently(gaps):
    count = INTERVALS_MAX + 10
    for seq in range(0, 2 * count + 1, 2):
        gaps.arrive("h", "b", seq, 0.0)
    assert gaps.gaps(0.0) == [Gap("h", "b", 10)]
    assert gaps.gaps(GAP_WAIT_S) == [Gap("h", "b", INTERVALS_MAX)]


def test_a_huge_jump_costs_no_memory(gaps):
    gaps.arrive("h", "b", 0, 0.0)
    gaps.arrive("h", "b", 2**50, 0.0)
    assert gaps.gaps(GAP_WAIT_S) == [Gap("h", "b", 2**50 - 1)]


def test_a_restored_state_goes_on_as_before(gaps):
    for seq in (0, 3):
        gaps.arrive("h", "b", seq, 0.0)
    again = GapTracker()
    again.restore(gaps.state())
    assert again.arrive("h", "b", 1, 1.0) is Arrival.LATE
    assert again.gaps(GAP_WAIT_S) == [Gap("h", "b", 1)]


def test_names_of_hosts_that_somebody_makes_up_take_no_more_memory_than_the_jobs_own():
    tracker = GapTracker()
    for number in range(10 * HOSTS_MIN):
        assert tracker.arrive(f"made-up-{number}", "b", 0, 0.0, ranks=4) is Arrival.NEW
    assert len(tracker.state()) == HOSTS_MIN
    for number in range(1_000):
        tracker.arrive(f"node-{number}", "b", 0, 0.0, ranks=1_000)
    assert len(tracker.state()) == HOSTS_MIN + 1_000, "a job of one rank on each host has room for all"
