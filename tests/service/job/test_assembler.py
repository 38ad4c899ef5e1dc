"""Observations from batches: attempts, frames, presence, and the norm of a whole job from those of slices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from rankwatch import layout, wire
from rankwatch_detectors.base import AttemptStart, Frame, Observation, Occurrence, Tick
from rankwatch_service.job.assembler import START_WAIT_S, Assembler
from rankwatch_service.simulate.batches import batches
from rankwatch_service.simulate.faults import Hang, Kill, Restart
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job, RankPlacement
from rankwatch_service.stream.saved import pack, unpack
from tests.support.values.batches import batch, bundle, progress, ranks, table


def add(assembler: Assembler, sent: wire.Batch, now_s: float) -> list[Observation]:
    return list(assembler.add(bundle(sent), now_s))


def of(kind: type, observations: list[Observation]) -> list:
    return [observation for observation in observations if isinstance(observation, kind)]


def running(world_size: int = 2) -> Assembler:
    assembler = Assembler()
    add(assembler, batch(0, ranks=ranks(world_size)), 0.0)
    return assembler


@pytest.fixture
def assembler() -> Assembler:
    return running()


def test_an_attempt_starts_when_the_infos_of_all_ranks_are_known():
    assembler = Assembler()
    first = batch(0, ranks=ranks(2, chosen=[0]), steps=table([1], [0], loss=[1.0]))
    assert add(assembler, first, 0.0) == []
    second = batch(0, host="node-2", ranks=ranks(2, "node-2", [1]), steps=table([1], [1], loss=[2.0]))
    start, frame = add(assembler, second, 0.0)
    assert isinstance(start, AttemptStart)
    assert start.attempt == "l.0"
    assert start.topology.host == ("node-1", "node-2")
    assert isinstance(frame, Frame)
    assert frame.values["loss"].tolist() == [1.0, 2.0]


def test_an_attempt_starts_with_the_known_ranks_after_a_while():
    assembler = Assembler()
    add(assembler, batch(0, ranks=ranks(4, chosen=[0]), steps=table([1], [0], loss=[1.0])), 0.0)
    assert of(AttemptStart, list(assembler.tick(START_WAIT_S - 0.5, 0.0))) == []
    (start,) = of(AttemptStart, list(assembler.tick(START_WAIT_S, 0.0)))
    assert start.topology.world_size == 4
    assert start.topology.host == ("node-1", "", "", "")


def test_a_sender_without_rank_infos_starts_an_attempt_too():
    assembler = Assembler()
    add(assembler, batch(0, steps=table([1, 1], [0, 1], loss=[1.0, 2.0])), 0.0)
    start, frame, tick = list(assembler.tick(START_WAIT_S, 0.0))
    assert start.topology.world_size == 2
    assert frame.values["loss"].tolist() == [1.0, 2.0]
    assert isinstance(tick, Tick)


def test_a_larger_attempt_is_announced_before_its_first_larger_frame():
    assembler = Assembler()
    add(assembler, batch(0, steps=table([1], [0], loss=[1.0])), 0.0)
    list(assembler.tick(START_WAIT_S, 0.0))
    start, frame = add(assembler, batch(1, steps=table([2, 2], [0, 1], loss=[1.0, 2.0])), 3.0)
    assert start.topology.world_size == 2
    assert len(frame.values["loss"]) == 2


def test_a_repeated_batch_changes_nothing(assembler):
    sent = batch(1, steps=table([1, 1], [0, 1], loss=[1.0, 2.0]), events=(wire.Event("note", 1),))
    assert len(add(assembler, sent, 0.0)) == 2
    assert add(assembler, sent, 0.0) == []
    assert assembler.dropped == {"repeated_batches": 1}


def test_a_rollback_begins_a_new_attempt_in_which_steps_repeat(assembler):
    add(assembler, batch(1, steps=table([5, 5], [0, 1], loss=[1.0, 2.0])), 0.0)
    add(assembler, batch(2, steps=table([6], [0], loss=[1.0])), 0.0)
    out = add(assembler, batch(3, attempt="l.1", ranks=ranks(2), steps=table([5, 5], [0, 1], loss=[3.0, 4.0])), 1.0)
    assert [(type(o).__name__, o.attempt) for o in out] == [("Frame", "l.0"), ("AttemptStart", "l.1"), ("Frame", "l.1")]
    assert [o.step for o in of(Frame, out)] == [6, 5]


def test_rows_of_an_older_attempt_are_dropped_and_its_events_are_passed_on(assembler):
    add(assembler, batch(1, attempt="l.1", ranks=ranks(2)), 1.0)
    old = batch(2, steps=table([9, 9], [0, 1], loss=[1.0, 2.0]), events=(wire.Event("process_exit", 1, 1),))
    (occurrence,) = add(assembler, old, 1.0)
    assert (occurrence.kind, occurrence.attempt, occurrence.rank) == ("process_exit", "l.0", 1)
    assert assembler.dropped == {"old_attempt_rows": 2}


def test_a_batch_of_an_earlier_launch_begins_no_attempt(assembler):
    add(assembler, batch(1, attempt="m.0", ranks=ranks(2)), 1.0)
    assert add(assembler, batch(2, attempt="l.7"), 1.0) == []
    assert assembler.attempt == "m.0"


def test_a_rank_that_moved_to_another_host_is_announced(assembler):
    (start,) = add(assembler, batch(0, host="node-9", ranks=ranks(2, "node-9", [1])), 1.0)
    assert start.topology.host == ("node-1", "node-9")


def test_presence_has_the_newest_block_of_each_rank(assembler):
    add(assembler, batch(1, progress=(progress(0, 7, phase="backward", os_state="T"),)), 3.0)
    (tick,) = list(assembler.tick(4.0, 0.0))
    assert tick.now_s == 4.0
    assert tick.presence.has_reported.tolist() == [True, False]
    assert tick.presence.received_s[0] == 3.0
    assert (tick.presence.step[0], tick.presence.phase[0], tick.presence.os_state[0]) == (7, "backward", "T")


def test_a_late_message_does_not_move_progress_back(assembler):
    add(assembler, batch(2, progress=(progress(0, 8),)), 1.0)
    add(assembler, batch(1, progress=(progress(0, 7),)), 2.0)
    (tick,) = of(Tick, list(assembler.tick(3.0, 0.0)))
    assert tick.presence.step[0] == 8
    assert tick.presence.received_s[0] == 1.0


def test_no_rank_is_silent_because_the_service_could_not_receive(assembler):
    add(assembler, batch(1, progress=(progress(0, 1),)), 1.0)
    (tick,) = list(assembler.tick(61.0, 59.0))
    assert tick.presence.received_s[0] == 60.0


def test_missing_messages_become_a_gap(assembler):
    add(assembler, batch(4), 0.0)
    occurrences = of(Occurrence, list(assembler.tick(10.0, 0.0)))
    assert [(o.kind, o.host, o.fields) for o in occurrences] == [("gap", "node-1", {"missing": 3, "boot": "b1"})]
    assert assembler.dropped == {"missing_batches": 3}


def test_frames_do_not_wait_for_ranks_that_left_or_died():
    assembler = running(3)
    add(assembler, batch(1, events=(wire.Event("rank_left", 1, 0, 5, {"reason": "end"}),)), 0.0)
    add(assembler, batch(2, events=(wire.Event("process_exit", 1, 1, 5, {"signal": 9}),)), 0.0)
    (frame,) = of(Frame, add(assembler, batch(3, steps=table([6], [2], loss=[1.0])), 0.0))
    assert frame.step == 6
    assert not assembler.ended
    add(assembler, batch(4, progress=(progress(2, 6, state="exited"),)), 0.0)
    assert assembler.ended
    assert not assembler.finished


def test_a_rank_whose_process_ends_after_its_loop_has_finished():
    assembler = running(1)
    left = (wire.Event("rank_left", 1, 0, 5, {"reason": "end"}), wire.Event("process_exit", 2, 0, 5, {"code": 0}))
    add(assembler, batch(1, events=left), 0.0)
    assert assembler.finished


def test_records_that_agents_lost_are_counted_by_reason(assembler):
    lost = wire.Event("records_lost", 1, None, None, {"reason": "ring", "count": 12})
    odd = wire.Event("records_lost", 1, None, None, {"reason": ["x"], "count": "many"})
    add(assembler, batch(1, events=(lost, odd)), 0.0)
    assert assembler.dropped == {"agent_ring": 12}


SCRIPTED = Job(8, 60, 3, step_s=0.5, late_values=True, placement=RankPlacement(ranks_per_host=4)).inject(
    Hang(2, 20, seconds=5), Restart(40, 30, relaunch=False), Kill(5, 50), Restart(50, 40)
)


def scripted() -> list[tuple[float, wire.Batch]]:
    return [(message.time_s, message.batch) for message in batches("gpt", generate(SCRIPTED))]


def reported(observation: Observation) -> object:
    match observation:
        case Frame():
            values = {
                name: np.where(observation.present[name], v, -1.0).tolist() for name, v in observation.values.items()
            }
            exact = {name: v.tolist() for name, v in observation.exact.items()}
            return ("frame", observation.attempt, observation.family, observation.step, values, exact)
        case AttemptStart():
            return ("start", observation.attempt, observation.topology.host)
        case Occurrence():
            return (observation.kind, observation.attempt, observation.rank, observation.step, dict(observation.fields))
        case Tick():
            return ("tick", observation.now_s)


def play(assembler: Assembler, messages, restore_at: int | None = None) -> list:
    seen, tick = [], 0.0
    for index, (time_s, message) in enumerate(messages):
        if index == restore_at:
            assembler = Assembler.restored(unpack(pack(assembler.state())))
        while time_s >= tick + 1:
            tick += 1
            seen += [reported(o) for o in list(assembler.tick(tick, 0.0))]
        seen += [reported(o) for o in add(assembler, message, tick)]
    return seen


def test_frames_of_a_simulated_job_come_out_as_they_were_simulated():
    sent = [reported(o) for o in generate(SCRIPTED) if isinstance(o, Frame)]
    found = [o for o in play(Assembler(), scripted()) if o[0] == "frame"]
    assert sorted(found, key=repr) == sorted(sent, key=repr)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.55, 0.8, 0.95])
def test_a_restored_assembler_gives_the_same_observations(share):
    messages = scripted()
    assert play(Assembler(), messages, int(share * len(messages))) == play(Assembler(), messages)


def test_repeated_and_slightly_reordered_messages_give_the_same_frames():
    messages = scripted()
    shaken = []
    for index in range(0, len(messages), 2):
        shaken += [*reversed(messages[index : index + 2]), *messages[index : index + 2]]
    # Time goes on as it did: only the order within one moment changes.
    shaken = [(time_s, again) for (_, again), time_s in zip(shaken, sorted(t for t, _ in shaken), strict=True)]

    def frames(seen: list) -> list:
        return sorted((o for o in seen if o[0] == "frame"), key=repr)

    assert frames(play(Assembler(), shaken)) == frames(play(Assembler(), messages))


def test_an_exception_that_ends_a_rank_counts_as_its_exit_even_if_its_block_says_that_it_left():
    assembler = running(2)
    add(assembler, batch(1, progress=(progress(0, 5, state="left"), progress(1, 5, state="left"))), 0.0)
    broken = wire.Event("exception", 1, 0, 5, {"type": "ValueError", "message": "x", "left": False})
    add(assembler, batch(2, events=(broken, wire.Event("process_exit", 2, 1, 5, {"code": 3, "left": False}))), 0.0)
    assert assembler.board.presence().state == ("exited", "exited")
    assert assembler.ended
    assert not assembler.finished


Held = Sequence[str] | None
"""Contents of a rank's slices."""


def info(rank: int, held: Held, world_size: int) -> wire.RankInfo:
    slices = None if held is None else tuple(wire.Slice(content) for content in held)
    return wire.RankInfo(rank, world_size, host="node-1", dp=rank, slices=slices)


def frame_of(held: Sequence[Held], **columns: Sequence[float | None]) -> Frame:
    """The frame of one step of as many ranks."""
    size, assembler = len(held), Assembler()
    infos = tuple(info(rank, one, size) for rank, one in enumerate(held))
    values = {name.replace("_of_", "."): column for name, column in columns.items()}
    sent = batch(0, ranks=infos, steps=table([7] * size, list(range(size)), **values))
    return next(one for one in assembler.add(bundle(sent), 0.0) if isinstance(one, Frame))


def test_each_slice_counts_once_however_many_ranks_hold_it():
    held = [("a 0/2", "b"), ("a 1/2", "b"), ("a 0/2", "b"), ("a 1/2", "b")]
    frame = frame_of(held, grad_norm_of_0=[3.0, 4.0, 3.0, 4.0], grad_norm_of_1=[12.0] * 4, loss=[1.0] * 4)
    assert frame.values["grad_norm"].tolist() == [13.0] * 4
    assert sorted(frame.values) == ["grad_norm", "loss"]


def test_ranks_number_their_slices_as_they_like():
    frame = frame_of([("a", "b"), ("b", "a")], grad_norm_of_0=[3.0, 4.0], grad_norm_of_1=[4.0, 3.0])
    assert frame.values["grad_norm"].tolist() == [5.0, 5.0]


def test_a_replica_stands_in_for_a_rank_that_measured_nothing():
    frame = frame_of([("a",), ("a",), ("b",)], grad_norm_of_0=[None, 3.0, 4.0])
    assert frame.values["grad_norm"].tolist() == [5.0] * 3


@pytest.mark.parametrize(
    ("held", "norms"),
    [
        ([("a",), ("b",)], [3.0, None]),  # a rank did not measure
        ([("a",), None], [3.0, 4.0]),  # a rank does not know its slices, or its agent is older
        ([("a",), ("a",)], [3.0, 3.3]),  # ranks that should have the same gradient have not: nobody has reduced it
    ],
)
def test_a_norm_that_would_not_be_of_the_whole_is_not_measured(held, norms):
    frame = frame_of(held, grad_norm_of_0=norms, loss=[1.0] * len(held))
    assert sorted(frame.values) == ["loss"]


def test_nothing_is_measured_until_all_ranks_are_known():
    assembler = Assembler()
    sent = batch(0, ranks=(info(0, ("a",), 2),), steps=table([7], [0], loss=[1.0], **{"grad_norm.0": [3.0]}))
    seen = [*assembler.add(bundle(sent), 0.0), *assembler.tick(10.0, 0.0), *assembler.tick(60.0, 0.0)]
    (frame,) = [one for one in seen if isinstance(one, Frame)]
    assert sorted(frame.values) == ["loss"]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_slice_that_is_not_finite_makes_the_whole_so(bad):
    frame = frame_of([("a",), ("a",), ("b",)], grad_norm_of_0=[3.0, bad, 4.0])
    assert np.array_equal(frame.values["grad_norm"], [bad] * 3, equal_nan=True)


def test_what_the_script_logs_itself_wins():
    frame = frame_of([("a",), ("b",)], grad_norm_of_0=[3.0, 4.0], grad_norm=[7.0, None])
    assert frame.values["grad_norm"][frame.present["grad_norm"]].tolist() == [7.0]
    assert "grad_norm.0" not in frame.values


def test_a_metric_of_such_a_name_is_a_metric_where_no_slices_are_declared():
    frame = frame_of([None, None], grad_norm_of_0=[3.0, 4.0])
    assert frame.values["grad_norm.0"].tolist() == [3.0, 4.0]


def test_a_restored_assembler_adds_up_the_same():
    first = Assembler()
    infos = tuple(info(rank, one, 2) for rank, one in enumerate([("a",), ("b",)]))
    list(first.add(bundle(batch(0, ranks=infos)), 0.0))
    second = Assembler.restored(first.state())
    sent = batch(1, steps=table([7, 7], [0, 1], **{"grad_norm.0": [3.0, 4.0]}))
    (frame,) = [one for one in second.add(bundle(sent), 0.0) if isinstance(one, Frame)]
    assert frame.values["grad_norm"].tolist() == [5.0, 5.0]


def test_a_rank_may_declare_as_many_slices_as_its_recorder_has_names_for():
    assert wire.SLICES_MAX == layout.SLICES_MAX
