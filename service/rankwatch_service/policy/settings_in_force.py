"""What people have set (policy, feedback, rules, tunings) as of a position of the control log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from rankwatch_detectors.metric_rule import MetricRule
from rankwatch_service.names import matches_any
from rankwatch_service.policy.control_records import ControlRecord, JobOwnership, PolicySet, PrecisionSet, RulesSet
from rankwatch_service.policy.policy import Policy, policy_of, policy_record
from rankwatch_service.policy.precision import Precision
from rankwatch_service.tuning import TuningSet

WAITING_MAX: Final = 1_000
"""Jobs with a project that have not begun; beyond, the first of them begins without. As many as a partition takes."""


class SettingsInForce:
    """The settings that decide what is reported and what is done."""

    def __init__(self) -> None:
        self.policy = Policy()
        self.precision: Mapping[str, Precision] = {}
        """By kind of incident; a kind that is missing has none that is judged."""
        self.rules: tuple[MetricRule, ...] = ()
        """On metrics, of all jobs."""
        self.tuning = TuningSet()
        self.waiting: dict[str, JobOwnership] = {}
        """Project and owner of jobs that have not begun, in the order in which they were set. Copies have none."""

    def apply(self, record: ControlRecord) -> None:
        """Apply a control record; those about single jobs change nothing."""
        match record:
            case PolicySet():
                self.policy = policy_of(record)
            case PrecisionSet():
                self.precision = {kind: Precision(*counts) for kind, counts in record.kinds.items()}
            case RulesSet():
                self.rules = record.rules
            case TuningSet():
                self.tuning = record
            case JobOwnership():
                self.waiting[record.job] = record
                if len(self.waiting) > WAITING_MAX:
                    del self.waiting[next(iter(self.waiting))]
            case _:
                pass

    def take_for(self, job: str, record: ControlRecord) -> tuple[str, ...]:
        """Apply a control record; returns what has changed for one job but its tuning, in words."""
        policy, rules = self.policy, self.rules_of(job)
        self.apply(record)
        changed = {"policy changed": self.policy != policy, "rules on metrics changed": self.rules_of(job) != rules}
        return tuple(what for what, is_so in changed.items() if is_so)

    def copy(self) -> SettingsInForce:
        """A copy for one job, which changes alone while that job's past is replayed."""
        settings = SettingsInForce()
        settings.policy, settings.precision = self.policy, self.precision
        settings.rules, settings.tuning = self.rules, self.tuning
        return settings

    def rules_of(self, job: str) -> tuple[MetricRule, ...]:
        """The rules on the metrics of one job."""
        return tuple(rule for rule in self.rules if matches_any(rule.jobs, job))

    def state(self) -> dict[str, Any]:
        """The settings for a snapshot, as JSON types."""
        return {
            "policy": msgspec.to_builtins(policy_record(self.policy)),
            "precision": {kind: [of_kind.useful, of_kind.noise] for kind, of_kind in self.precision.items()},
            "rules": [rule.fields() for rule in self.rules],
            "tuning": msgspec.to_builtins(self.tuning),
            "waiting": [msgspec.structs.asdict(ownership) for ownership in self.waiting.values()],
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> SettingsInForce:
        """The settings of which `state` returned this."""
        settings = cls()
        settings.policy = policy_of(msgspec.convert(state["policy"], PolicySet))
        settings.precision = {kind: Precision(*counts) for kind, counts in state["precision"].items()}
        settings.rules = tuple(MetricRule.of(rule) for rule in state["rules"])
        settings.tuning = msgspec.convert(state["tuning"], TuningSet)
        settings.waiting = {ownership["job"]: JobOwnership(**ownership) for ownership in state["waiting"]}
        return settings
