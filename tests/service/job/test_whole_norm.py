"""The norm of a whole job from those of slices: each once, and never a smaller one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from rankwatch import layout, wire
from rankwatch_detectors.base import Frame
from rankwatch_service.job.assembler import Assembler
from tests.support.values.batches import batch, bundle, table

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
    return next(one for one in assembler.take(bundle(sent), 0.0) if isinstance(one, Frame))


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
    seen = [*assembler.take(bundle(sent), 0.0), *assembler.tick(10.0, 0.0), *assembler.tick(60.0, 0.0)]
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
    list(first.take(bundle(batch(0, ranks=infos)), 0.0))
    second = Assembler.restored(first.state())
    sent = batch(1, steps=table([7, 7], [0, 1], **{"grad_norm.0": [3.0, 4.0]}))
    (frame,) = [one for one in second.take(bundle(sent), 0.0) if isinstance(one, Frame)]
    assert frame.values["grad_norm"].tolist() == [5.0, 5.0]


def test_a_rank_may_declare_as_many_slices_as_its_recorder_has_names_for():
    assert wire.SLICES_MAX == layout.SLICES_MAX
