"""Watches one metric of one job for one rule: thresholds, absence, and ratios to peers. Changes: `drift_watch`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final

import numpy as np

from rankwatch_detectors.base import Bools, Floats, Frame, Topology
from rankwatch_detectors.dispatch import finite, typical
from rankwatch_detectors.metric_rule import Condition, MetricRule
from rankwatch_detectors.rules.held_cells import HeldCells
from rankwatch_detectors.state import Stateful
from rankwatch_detectors.statistics.peers import PeerGroups

CULPRITS_MAX: Final = 64
"""Ranks that one finding names, those with the lowest numbers; `ranks_beyond` in its evidence counts all."""


class RuleWatch(Stateful, ABC):
    """The state of one rule in one job."""

    STATE: ClassVar[tuple[str, ...]] = ("held", "value")

    def __init__(self, rule: MetricRule) -> None:
        self.rule = rule
        self.held = HeldCells()
        self.value = 0.0
        """The newest value that was judged; of several ranks the one that is furthest beyond."""

    def begin(self, topology: Topology, *, fresh: bool) -> None:  # noqa: ARG002
        """Begin an attempt; `fresh`: of another launch, so nothing that was learned holds."""
        self.held.resize(1)

    def regroup(self, topology: Topology) -> None:
        """More of the topology became known."""

    @abstractmethod
    def push(self, frame: Frame, now_s: float) -> bool:
        """Judge a frame; returns whether it says anything of the metric."""

    @abstractmethod
    def sentence(self) -> str:
        """What is wrong, for the summary of a finding: without its end."""

    def accept(self) -> None:
        """A person accepts what is found: it is found again only after it was over."""
        self.held.accept()

    @abstractmethod
    def evidence(self) -> dict[str, Any]:
        """Numbers against their bound."""

    def culprits(self) -> tuple[int, ...]:
        """The ranks that are beyond; empty: the whole job."""
        return ()

    def _hold(self, bad: Bools, good: Bools, frame: Frame, now_s: float, calm_s: float | None = None) -> None:
        hold_s = self.rule.hold_s
        self.held.update(bad, good, frame.step, now_s, hold_s, hold_s if calm_s is None else calm_s)


class ThresholdWatch(RuleWatch):
    """The median over ranks, or each rank, against a threshold. Memory: constant, or linear in ranks."""

    def begin(self, topology: Topology, *, fresh: bool) -> None:  # noqa: ARG002, D102
        self.held.resize(topology.world_size if self.rule.each_rank else 1)

    def push(self, frame: Frame, now_s: float) -> bool:  # noqa: D102
        if self.rule.each_rank:
            found = finite(frame, self.rule.metric)
            if found is None:
                return False
            values, usable = found
        else:
            value = None if frame.late else typical(frame, self.rule.metric)
            if value is None:
                return False
            values, usable = np.array([value]), np.ones(1, dtype=np.bool_)
        above = self.rule.when is Condition.ABOVE
        beyond = values > self.rule.value if above else values < self.rule.value
        self.value = float(np.max(values[usable]) if above else np.min(values[usable]))
        self._hold(usable & beyond, usable & ~beyond, frame, now_s)
        return True

    def culprits(self) -> tuple[int, ...]:  # noqa: D102
        return tuple(np.flatnonzero(self.held.open).tolist()) if self.rule.each_rank else ()

    def evidence(self) -> dict[str, Any]:  # noqa: D102
        return {"value": self.value, "threshold": self.rule.value}

    def sentence(self) -> str:  # noqa: D102
        who = " of some ranks" if self.rule.each_rank else ""
        return f"{self.rule.metric}{who} is {self.rule.when} {self.rule.value:.6g}: {self.value:.6g}"


class AbsenceWatch(RuleWatch):
    """Steps without a value of any rank. NaN is a value: it is `nonfinite`, not absent. Memory: constant."""

    def push(self, frame: Frame, now_s: float) -> bool:  # noqa: D102
        if frame.late:
            return False
        present = frame.present.get(self.rule.metric)
        here = np.array([present is not None and bool(present.any())])
        self._hold(~here, here, frame, now_s, calm_s=0.0)
        since_s = float(self.held.since_s[0])
        self.value = 0.0 if here[0] else now_s - since_s
        return True

    def evidence(self) -> dict[str, Any]:  # noqa: D102
        return {"absent_s": self.value}

    def sentence(self) -> str:  # noqa: D102
        return f"{self.rule.metric} has been absent for {self.value:.0f} s while steps go on"


class PeerWatch(RuleWatch):
    """Each rank against the median of the ranks that do the same work, in groups of at least three.

    A step whose median is not above 0 has no ratios, and says nothing. Memory: linear in ranks.
    """

    STATE: ClassVar[tuple[str, ...]] = (*RuleWatch.STATE, "_groups")

    def __init__(self, rule: MetricRule) -> None:
        super().__init__(rule)
        self._groups = PeerGroups()

    def begin(self, topology: Topology, *, fresh: bool) -> None:  # noqa: ARG002, D102
        self.held.resize(topology.world_size)
        self.regroup(topology)

    def regroup(self, topology: Topology) -> None:  # noqa: D102
        self._groups.regroup(topology.peer_group)

    def push(self, frame: Frame, now_s: float) -> bool:  # noqa: D102
        found = None if frame.late else finite(frame, self.rule.metric)
        if found is None:
            return False
        values, usable = found
        middle = self._groups.location(values, usable)
        judged = usable & self._groups.proper & (middle > 0)
        if not judged.any():
            return False
        ratio: Floats = np.divide(values, middle, out=np.ones_like(values), where=judged)
        above = self.rule.value > 1
        beyond = ratio > self.rule.value if above else ratio < self.rule.value
        self.value = float(np.max(ratio[judged]) if above else np.min(ratio[judged]))
        self._hold(judged & beyond, judged & ~beyond, frame, now_s)
        return True

    def culprits(self) -> tuple[int, ...]:  # noqa: D102
        return tuple(np.flatnonzero(self.held.open).tolist())

    def evidence(self) -> dict[str, Any]:  # noqa: D102
        return {"ratio": self.value, "threshold": self.rule.value}

    def sentence(self) -> str:  # noqa: D102
        return f"{self.rule.metric} of some ranks is {self.value:.3g} times the median of their peers"
