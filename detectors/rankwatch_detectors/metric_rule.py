"""A rule of a person on a metric, as detectors get it. The service checks what people write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final, Self

RULES_PER_JOB_MAX: Final = 32
"""Rules that are judged in one job, the first of those that match; a job of 16,384 ranks takes 0.5 MB for each that
judges every rank, and half of the 64 episodes that a detector keeps open."""


class Condition(StrEnum):
    """When a rule finds something."""

    ABOVE = "above"
    """The metric is above the value."""
    BELOW = "below"
    """The metric is below the value."""
    ABSENT = "absent"
    """Steps go on without the metric."""
    PEERS = "peers"
    """A rank's metric, divided by the median of the ranks that do the same work, is beyond the value."""
    CHANGE = "change"
    """The metric has left the level that it had."""


class Direction(StrEnum):
    """Which changes of a level count."""

    UP = "up"
    DOWN = "down"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class MetricRule:
    """One rule. Times are in seconds of stream time, at the steps that log the metric."""

    name: str
    metric: str
    when: Condition
    value: float = 0.0
    """above, below: the threshold. peers: the ratio; above 1 a rank must exceed it, below 1 fall below it."""
    hold_s: float = 0.0
    """How long it must be so before an incident opens, and be over before it ends. absent: how long without a value;
    the first value ends it."""
    severity: str = "warning"
    each_rank: bool = False
    """above, below: each rank is judged and named; else the median over the ranks that log the metric is."""
    direction: Direction = Direction.BOTH
    """change: which changes are found. A change the other way sets a new level."""
    jobs: tuple[str, ...] = ()
    """Patterns of the jobs that it is for, empty: all. A detector gets only the rules of its job, without them."""

    def fields(self) -> dict[str, Any]:
        """As plain types."""
        return asdict(self) | {"when": str(self.when), "direction": str(self.direction), "jobs": list(self.jobs)}

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """The rule with these `fields`."""
        when, direction = Condition(fields["when"]), Direction(fields["direction"])
        return cls(**{**fields, "when": when, "direction": direction, "jobs": tuple(fields["jobs"])})
