"""Judges the metrics that people have written rules about. What is not finite is no value here: see `nonfinite`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

import numpy as np

from rankwatch_detectors.base import AttemptStart, Finding, Frame, Kind, Occurrence, Severity
from rankwatch_detectors.dispatch import DispatchingDetector
from rankwatch_detectors.metric_rule import RULES_PER_JOB_MAX, Condition, MetricRule
from rankwatch_detectors.rules.drift_watch import DriftWatch
from rankwatch_detectors.rules.rule_watch import CULPRITS_MAX, AbsenceWatch, PeerWatch, RuleWatch, ThresholdWatch
from rankwatch_detectors.scope import IncidentScope

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
    STATE: ClassVar[tuple[str, ...]] = (*DispatchingDetector.STATE, "lockstep")

    def __init__(self) -> None:
        super().__init__()
        self.name = "metric"
        self.version = 1
        self._watches: dict[str, RuleWatch] = {}
        """By name of the rule, in the order of the rules."""

    def snapshot(self) -> dict[str, Any]:
        """With the rules, so that a restored detector needs no other source of them."""
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

    def _on_frame(self, frame: Frame) -> Sequence[Finding]:
        return [
            finding
            for watch in self._watches.values()
            if watch.push(frame, self.now_s)
            for finding in self._tell(watch, frame)
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

    def _tell(self, watch: RuleWatch, frame: Frame) -> list[Finding]:
        scope = IncidentScope.of_rule(watch.rule.name)
        if not watch.held.any_open:
            if scope not in self.episodes:
                return []
            summary = f"Rule {watch.rule.name}: {watch.rule.metric} is within its bounds again."
            return self.episodes.close(scope, frame.step, self.now_s, summary)
        culprits = watch.culprits()
        ranks = culprits[:CULPRITS_MAX]
        if scope not in self.episodes:
            return self._open(scope, watch, frame, ranks)
        told = self.episodes.told(scope)
        if set(ranks) <= set(told["ranks"]):
            return []
        evidence = {**told["evidence"], **watch.evidence(), "ranks_beyond": len(culprits)}
        return self.episodes.update(
            scope, ranks=ranks, detected_step=max(frame.step, told["onset_step"]), evidence=evidence
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
