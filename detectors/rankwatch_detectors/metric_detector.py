"""Judges the metrics that people have written rules about. What is not finite is no value here: see `nonfinite`.

A rule is a threshold, absence, a ratio to peers, or a lasting change: River's ADWIN and Page-Hinkley on standardised
residuals. Of a change the first `REFERENCE_POINTS` values give the level, its scatter, and how much each value
resembles the one before (the autocorrelation at lag 1). What a value differs from what the one before predicts, divided
by its usual scatter, is a residual without autocorrelation: the tests would take a slow wave of autocorrelated noise
for a change. The level is fixed until a person accepts another one, a new launch begins, or the metric changes in a
direction that the rule does not watch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

import numpy as np

from rankwatch_detectors.base import (
    AttemptStart,
    Bools,
    Finding,
    Floats,
    Frame,
    Ints,
    Kind,
    Observation,
    Occurrence,
    Severity,
    Topology,
)
from rankwatch_detectors.dispatch import STARTS, DispatchingDetector, finite, typical
from rankwatch_detectors.metric_rule import RULES_PER_JOB_MAX, Condition, Direction, MetricRule
from rankwatch_detectors.metrics import column_words
from rankwatch_detectors.scope import IncidentScope
from rankwatch_detectors.state import Stateful
from rankwatch_detectors.statistics.peers import PeerGroups
from rankwatch_detectors.statistics.series import DriftTest
from rankwatch_detectors.words import compared, lasting


class HeldCells(Stateful):
    """The state of each cell. A cell that is neither bad nor good in an observation stays as it is."""

    STATE: ClassVar[str] = "open since_s since_step _good_s _accepted"

    def __init__(self, cells: int = 1) -> None:
        self.resize(cells)

    def resize(self, cells: int) -> None:
        """Begin anew with so many cells."""
        self.open: Bools = np.zeros(cells, dtype=np.bool_)
        self.since_s: Floats = np.full(cells, np.nan)
        """Time from which on the cell has been bad; NaN: it is not."""
        self.since_step: Ints = np.full(cells, -1, dtype=np.int64)
        self._good_s: Floats = np.full(cells, np.nan)
        """Time from which on an open cell has been good; NaN: it is bad."""
        self._accepted: Bools = np.zeros(cells, dtype=np.bool_)
        """A person has accepted that it is bad: it opens again only after it was good."""

    @property
    def any_open(self) -> bool:
        """Whether any cell is open."""
        return bool(self.open.any())

    def update(self, bad: Bools, good: Bools, step: int, now_s: float, hold_s: float, clear_s: float) -> None:
        """Process one observation.

        Args:
            bad: cells whose condition holds now.
            good: cells whose condition clearly does not hold.
            step: of the observation.
            now_s: its time.
            hold_s: seconds for which a cell must be bad to open.
            clear_s: seconds for which an open cell must be good to close.
        """
        begins = bad & np.isnan(self.since_s)
        self.since_s[begins], self.since_step[begins] = now_s, step
        self._good_s[bad] = np.nan
        self.open |= bad & ~self._accepted & (now_s - self.since_s >= hold_s)
        self._good_s[good & np.isnan(self._good_s)] = now_s
        waits = self.open | self._accepted
        over = good & (~waits | (now_s - self._good_s >= clear_s))
        self.open[over] = self._accepted[over] = False
        self.since_s[over], self.since_step[over] = np.nan, -1

    def accept(self) -> None:
        """Close all open cells until they have been good."""
        self._accepted |= self.open
        self.open[:] = False


CULPRITS_MAX: Final = 64
"""Ranks that one finding names, those with the lowest numbers; `ranks_beyond` in its evidence counts all."""


class RuleWatch(Stateful, ABC):
    """The state of one rule in one job."""

    STATE: ClassVar[str] = "held value"

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
        """Judge a frame; return whether it contains the metric."""

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

    def _hold(self, bad: Bools, good: Bools, frame: Frame, now_s: float, clear_s: float | None = None) -> None:
        hold_s = self.rule.hold_s
        self.held.update(bad, good, frame.step, now_s, hold_s, hold_s if clear_s is None else clear_s)


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
        name = column_words(self.rule.metric)
        return f"{name}{who} is {self.value:.6g}, {self.rule.when} {self.rule.value:.6g}"


class AbsenceWatch(RuleWatch):
    """Steps without a value of any rank. NaN is a value: it is `nonfinite`, not absent. Memory: constant."""

    def push(self, frame: Frame, now_s: float) -> bool:  # noqa: D102
        if frame.late:
            return False
        present = frame.present.get(self.rule.metric)
        here = np.array([present is not None and bool(present.any())])
        self._hold(~here, here, frame, now_s, clear_s=0.0)
        since_s = float(self.held.since_s[0])
        self.value = 0.0 if here[0] else now_s - since_s
        return True

    def evidence(self) -> dict[str, Any]:  # noqa: D102
        return {"absent_s": self.value}

    def sentence(self) -> str:  # noqa: D102
        return f"{column_words(self.rule.metric)} has been absent for {lasting(self.value)} while steps go on"


class PeerWatch(RuleWatch):
    """Each rank against the median of the ranks that do the same work, in groups of at least three.

    A step whose median is not above 0 has no ratios, and says nothing. Memory: linear in ranks.
    """

    STATE: ClassVar[str] = "_groups"

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
        return f"{column_words(self.rule.metric)} of some ranks is {compared(self.value)} the median of their peers"


REFERENCE_POINTS: Final = 64
"""Values that give the level. Fewer leave its autocorrelation unknown, to which the tests are most sensitive."""

RECENT_POINTS: Final = 16
"""Values whose mean is the present level."""

RESIDUAL_MAX: Final = 4.0
"""Residuals are cut here: a single value, however far off, is no change."""

SHIFT_MIN: Final = 1.0
"""The least change of the level that is reported, in units of the scatter of the reference."""

BACK_SHARE: Final = 0.5
"""The level is back once less than this share of the change is left."""

MAD_TO_SIGMA: Final = 1.4826
"""Standard deviation of normal noise by its median absolute deviation."""

AUTOCORRELATION_MAX: Final = 0.95
"""Beyond it no residual of a change would be left: of 64 values the estimate often is 1."""


class DriftWatch(RuleWatch):
    """The level of one metric, the median over ranks. Memory: constant."""

    STATE: ClassVar[str] = "_reference _level _scatter _noise _autocorrelation _before _recent _shift _drift"

    def __init__(self, rule: MetricRule) -> None:
        super().__init__(rule)
        self._drift = DriftTest()
        self._learn_anew()

    def _learn_anew(self) -> None:
        self._reference: list[float] = []
        self._level, self._scatter, self._noise, self._autocorrelation = 0.0, 0.0, 0.0, 0.0
        self._before = 0.0
        """How far the value before was from the level."""
        self._recent: list[float] = []
        self._shift = 0.0
        """The change of the level that was found; 0: none."""
        self._drift.reset()

    def begin(self, topology: Topology, *, fresh: bool) -> None:  # noqa: D102
        super().begin(topology, fresh=fresh)
        if fresh:
            self._learn_anew()

    def accept(self) -> None:
        """The present level is learned as the one to keep."""
        self.held.resize(1)
        self._learn_anew()

    def push(self, frame: Frame, now_s: float) -> bool:  # noqa: D102
        value = None if frame.late else typical(frame, self.rule.metric)
        if value is None:
            return False
        if len(self._reference) < REFERENCE_POINTS:
            self._reference.append(value)
            if len(self._reference) == REFERENCE_POINTS:
                self._fit()
            return False
        self._recent = [*self._recent[1 - RECENT_POINTS :], value]
        self.value = sum(self._recent) / len(self._recent)
        residual = self._residual(value)
        if not self._shift and self._drift.push(residual):
            self._evaluate_shift(self.value - self._level)
        bad = self._shift * (self.value - self._level) > BACK_SHARE * self._shift**2
        was_open = self.held.any_open
        self._hold(np.array([bad]), np.array([not bad]), frame, now_s)
        if self._shift and not bad and not self.held.any_open:
            self._shift = 0.0
            self._begin_tests()
        return bool(self._shift) or was_open

    def evidence(self) -> dict[str, Any]:  # noqa: D102
        return {
            "value": self.value,
            "level": self._level,
            "scatter": self._scatter,
            "autocorrelation": self._autocorrelation,
        }

    def sentence(self) -> str:  # noqa: D102
        return f"{column_words(self.rule.metric)} has left its usual {self._level:.6g} and is at {self.value:.6g}"

    def _evaluate_shift(self, shift: float) -> None:
        if abs(shift) < SHIFT_MIN * self._scatter:
            return
        if self.rule.direction in (Direction.BOTH, Direction.UP if shift > 0 else Direction.DOWN):
            self._shift = shift
        else:
            self._learn_anew()

    def _residual(self, value: float) -> float:
        """What the value differs from what the one before predicts, in usual deviations."""
        before, self._before = self._before, value - self._level
        return max(-RESIDUAL_MAX, min(RESIDUAL_MAX, (self._before - self._autocorrelation * before) / self._noise))

    def _begin_tests(self) -> None:
        """Begin the tests with the residuals of the reference, whose mean is the one to keep."""
        newest = self._before
        self._drift.reset([self._residual(value) for value in self._reference][1:])
        self._before = newest

    def _fit(self) -> None:
        points = np.array(self._reference)
        self._level = float(np.median(points))
        away = points - self._level
        # Of few values the estimate is too small by about (1 + 4 r) / n.
        power = float(away @ away)
        lagged = float(away[1:] @ away[:-1]) / power if power else 0.0
        corrected = lagged + (1 + 4 * lagged) / len(points)
        self._autocorrelation = min(max(corrected, 0.0), AUTOCORRELATION_MAX)
        # A constant metric has no scatter: then a thousandth of it is.
        least = max(abs(self._level) * 1e-3, 1e-12)
        self._scatter = max(_sigma(away), least)
        self._noise = max(_sigma(away[1:] - self._autocorrelation * away[:-1]), least)
        self._before = float(away[-1])
        self._begin_tests()


def _sigma(residuals: Floats) -> float:
    """The scatter of residuals around 0, by their median; by their squares if more than half of them are 0."""
    middle = MAD_TO_SIGMA * float(np.median(np.abs(residuals)))
    return middle or float(np.sqrt(np.mean(residuals**2)))


WATCHES: Final[Mapping[Condition, type[RuleWatch]]] = {
    Condition.ABOVE: ThresholdWatch,
    Condition.BELOW: ThresholdWatch,
    Condition.ABSENT: AbsenceWatch,
    Condition.PEERS: PeerWatch,
    Condition.CHANGE: DriftWatch,
}


class MetricDetector(DispatchingDetector):
    """One episode for each rule, scope "rule:NAME".

    Rules come with `AttemptStart`. One that is new or changed begins anew; the others go on. Memory: that of
    `RULES_PER_JOB_MAX` watches.
    """

    kind: Kind = Kind.METRIC
    TAKES_LATE = True
    STATE: ClassVar[str] = "lockstep"

    def __init__(self) -> None:
        super().__init__()
        self.name = "metric"
        self.version = 2
        self._watches: dict[str, RuleWatch] = {}
        """By name of the rule, in the order of the rules."""

    def snapshot(self) -> dict[str, Any]:
        """The state with the rules, so that a restored detector needs no other source of them."""
        watches = [{"rule": watch.rule.fields(), "state": watch.snapshot()} for watch in self._watches.values()]
        return super().snapshot() | {"watches": watches}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load a snapshot of the same version."""
        super().restore(state)
        self._watches = {}
        for saved in state["watches"]:
            watch = _watch(MetricRule.of(saved["rule"]))
            watch.restore(saved["state"])
            self._watches[watch.rule.name] = watch

    def _on_attempt(self, start: AttemptStart, *, new_attempt: bool, new_launch: bool) -> Sequence[Finding]:
        before, findings = self._watches, list[Finding]()
        rules = [replace(rule, jobs=()) for rule in start.rules[:RULES_PER_JOB_MAX]]
        self._watches = {rule.name: _watch(rule) for rule in rules}
        for name, watch in before.items():
            if name in self._watches and self._watches[name].rule == watch.rule:
                self._watches[name] = watch
                if new_attempt:
                    watch.begin(start.topology, fresh=new_launch)
                else:
                    watch.regroup(start.topology)
            elif (scope := IncidentScope.of_rule(name)) in self.episodes:
                findings += self.episodes.close(scope, None, self.now_s, f"The rule {name} was changed or deleted.")
        for name, watch in self._watches.items():
            if watch is not before.get(name):
                watch.begin(start.topology, fresh=True)
        return findings

    @property
    def reads(self) -> frozenset[type[Observation]]:
        """Without a rule there is nothing to judge."""
        return super().reads if self._watches else STARTS

    def _on_frame(self, frame: Frame) -> Sequence[Finding]:
        return [
            finding
            for watch in self._watches.values()
            if watch.push(frame, self.now_s)
            for finding in self._report(watch, frame)
        ]

    def _on_occurrence(self, occurrence: Occurrence) -> Sequence[Finding]:
        if occurrence.kind != "accepted" or self.kind.value not in occurrence.fields.get("kinds", ()):
            return ()
        findings: list[Finding] = []
        for name, watch in self._watches.items():
            scope = IncidentScope.of_rule(name)
            if scope in self.episodes and str(scope) in occurrence.fields.get("scopes", ()):
                watch.accept()
                findings += self.episodes.close(scope, None, self.now_s, f"What the rule {name} found was accepted.")
        return findings

    def _report(self, watch: RuleWatch, frame: Frame) -> list[Finding]:
        scope = IncidentScope.of_rule(watch.rule.name)
        if not watch.held.any_open:
            if scope not in self.episodes:
                return []
            summary = f"Rule {watch.rule.name}: {column_words(watch.rule.metric)} is within its bounds again."
            return self.episodes.close(scope, frame.step, self.now_s, summary)
        culprits = watch.culprits()
        ranks = culprits[:CULPRITS_MAX]
        if scope not in self.episodes:
            return self._open(scope, watch, frame, ranks)
        reported = self.episodes.reported(scope)
        if set(ranks) <= set(reported["ranks"]):
            return []
        evidence = {**reported["evidence"], **watch.evidence(), "ranks_beyond": len(culprits)}
        return self.episodes.update(
            scope, ranks=ranks, detected_step=max(frame.step, reported["onset_step"]), evidence=evidence
        )

    def _open(self, scope: IncidentScope, watch: RuleWatch, frame: Frame, ranks: tuple[int, ...]) -> list[Finding]:
        rule, held = watch.rule, watch.held
        since_s, since_step = float(np.min(held.since_s[held.open])), int(np.min(held.since_step[held.open]))
        return self.episodes.open(
            scope,
            attempt=self.attempt,
            severity=Severity(rule.severity),
            onset_step=since_step,
            detected_step=max(frame.step, since_step),
            onset_time_s=since_s,
            detected_time_s=self.now_s,
            score=float("inf"),
            confidence=1.0,
            summary=f"Rule {rule.name}: {watch.sentence()}, since step {since_step}.",
            evidence={
                "rule": rule.name,
                "metric": rule.metric,
                "when": str(rule.when),
                **watch.evidence(),
                "since_step": since_step,
                "hold_s": rule.hold_s,
                **({"ranks_beyond": len(watch.culprits())} if ranks else {}),
            },
            ranks=ranks,
        )


def _watch(rule: MetricRule) -> RuleWatch:
    return WATCHES[rule.when](rule)
