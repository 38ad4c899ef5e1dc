"""The gradient norm of a whole job, from those of the slices that its ranks hold of a sharded model. Pure.

Each different slice counts once, however many ranks hold it. A norm is measured of the whole or not at all: it needs
the slices of all ranks to be known, and each of them to be measured in the frame by one of the ranks that hold it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from rankwatch import wire
from rankwatch_detectors.base import Frame, Ints

WHOLE: Final = "grad_norm"
PARTS: Final = tuple(f"{WHOLE}.{number}" for number in range(wire.SLICES_MAX))

AGREE_RATIO: Final = 1e-3
"""Norms of one slice that differ by more are not of one gradient, such as one that nobody has reduced. Kernels that add
up in another order differ by 1e-6."""


class WholeNorm:
    """Adds up the norms of one attempt. Memory: 24 bytes for each rank and slice."""

    def __init__(self, infos: Mapping[int, wire.RankInfo], world_size: int) -> None:
        """Number the different slices.

        Args:
            infos: the rank infos, by rank.
            world_size: ranks of the attempt.
        """
        held = [(number, rank, one.content) for rank in infos for number, one in enumerate(infos[rank].slices or ())]
        self._known = len(infos) == world_size and all(info.slices is not None for info in infos.values())
        self._declared = bool(held)
        contents = {content: index for index, content in enumerate(sorted({content for _, _, content in held}))}
        of = np.array([contents[content] for _, _, content in held], dtype=np.int64)
        order = np.argsort(of, kind="stable")
        self._part: Ints = np.array([number for number, _, _ in held], dtype=np.int64)[order]
        self._rank: Ints = np.array([rank for _, rank, _ in held], dtype=np.int64)[order]
        self._starts: Ints = np.searchsorted(of[order], np.arange(len(contents))).astype(np.int64)

    def of(self, frame: Frame) -> Frame:
        """The frame with the norm of the whole, if it can be known, on all ranks and without those of slices.

        A norm that the job itself logs stays.
        """
        if not (self._declared and any(name in frame.values for name in PARTS)):
            return frame
        values = {name: column for name, column in frame.values.items() if name not in PARTS}
        present = {name: column for name, column in frame.present.items() if name not in PARTS}
        norm = None if WHOLE in values or frame.late else self._sum(frame)
        if norm is not None:
            ranks = next(iter(frame.present.values())).size
            values[WHOLE], present[WHOLE] = np.full(ranks, norm), np.ones(ranks, dtype=np.bool_)
            for column in (values[WHOLE], present[WHOLE]):
                column.flags.writeable = False
        return replace(frame, values=values, present=present)

    def _sum(self, frame: Frame) -> float | None:
        if not self._known:
            return None
        norms, here = np.zeros(self._part.size), np.zeros(self._part.size, dtype=np.bool_)
        for number in range(int(self._part.max()) + 1):
            column = frame.values.get(PARTS[number])
            if column is not None:
                held = self._part == number
                ranks = self._rank[held]
                norms[held], here[held] = column[ranks], frame.present[PARTS[number]][ranks]
        if not np.logical_or.reduceat(here, self._starts).all():
            return None
        if not np.isfinite(norms[here]).all():
            return math.nan if np.isnan(norms[here]).any() else math.inf
        highest = np.maximum.reduceat(np.where(here, norms, 0.0), self._starts)
        lowest = np.minimum.reduceat(np.where(here, norms, math.inf), self._starts)
        if (highest - lowest > AGREE_RATIO * highest).any():
            return None
        return float(np.linalg.norm(highest))
