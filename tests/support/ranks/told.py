"""What the service says of steps that ranks have recorded: their sinks as batches, through the real job pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rankwatch import wire
from rankwatch_detectors.base import Finding, Frame
from rankwatch_detectors.catalogue import detectors
from rankwatch_service.job.assembler import Assembler
from tests.support.values.batches import batch, bundle, table

Steps = Sequence[tuple[Mapping[str, float], Mapping[str, int]]]
"""Values and integers of each step of one rank."""


def introduced(rank: int, world_size: int, declared: Mapping[str, Any]) -> wire.RankInfo:
    """The rank as its agent introduces it."""
    slices = declared.get("slices")
    return wire.RankInfo(
        rank,
        world_size,
        host="node-1",
        parameters=tuple(declared.get("parameters", ())),
        slices=None if slices is None else tuple(wire.Slice(*one) for one in slices),
        **{"dp": rank} | {axis: declared[axis] for axis in ("dp", "tp", "pp", "cp", "ep") if axis in declared},
    )


def reported(
    declared: Sequence[Mapping[str, Any]], recorded: Sequence[Steps], missing: Sequence[tuple[int, int]] = ()
) -> tuple[list[Frame], list[Finding]]:
    """The frames of the ranks' steps, and what the detectors find in them.

    Args:
        declared: identity fields of each rank.
        recorded: steps of each rank.
        missing: pairs of rank and step that never arrive.
    """
    size, assembler, judges = len(declared), Assembler(), detectors()
    frames: list[Frame] = []
    findings: list[Finding] = []
    infos = tuple(introduced(rank, size, declared[rank]) for rank in range(size))
    sent = [batch(0, ranks=infos)]
    for step in range(len(recorded[0])):
        here = [rank for rank in range(size) if (rank, step) not in missing]
        names = {name: None for rank in here for name in recorded[rank][step][0]}
        exact = {name: None for rank in here for name in recorded[rank][step][1]}
        columns = {name: [recorded[rank][step][0].get(name) for rank in here] for name in names}
        whole = {name: [recorded[rank][step][1].get(name) for rank in here] for name in exact}
        sent.append(batch(step + 1, steps=table([step] * len(here), here, whole, **columns)))
    for number, one in enumerate(sent):
        for observation in [*assembler.add(bundle(one), float(number))]:
            frames += [observation] if isinstance(observation, Frame) else []
            findings += [finding for evaluate in judges for finding in evaluate.observe(observation)]
    for observation in [*assembler.tick(1_000.0, 0.0)]:
        frames += [observation] if isinstance(observation, Frame) else []
    return frames, findings


def reported_of(ranks: Sequence[Mapping[str, Any]], case: str, **how: Any) -> tuple[list[Frame], list[Finding]]:
    """The same, of what each rank has answered of this case."""
    return reported([one[case]["declared"] for one in ranks], [one[case]["steps"] for one in ranks], **how)
