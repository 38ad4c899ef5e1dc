"""Scopes of findings: the whole job, or one switch, host, rank or pipeline stage of it, or what one rule or the alerts
of one name are about; and the only place that parses them.

The wire, the tables, snapshots and the API use their text: "job", "switch:NAME", "host:NAME", "rank:N", "stage:N",
"rule:NAME", "alert:NAME".
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self


class ScopeLevel(StrEnum):
    """The kind of part that a scope names."""

    JOB = "job"
    SWITCH = "switch"
    HOST = "host"
    RANK = "rank"
    STAGE = "stage"
    RULE = "rule"
    ALERT = "alert"


@dataclass(frozen=True, slots=True, order=True)
class IncidentScope:
    """One part of a job. `str()` returns its text, `parse` reads it."""

    level: ScopeLevel
    name: str = ""
    """Name of the switch, host, rule or alerts, or number of the rank or stage; empty for the job."""

    def __str__(self) -> str:
        return str(self.level) if self.level is ScopeLevel.JOB else f"{self.level}:{self.name}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The scope with this text.

        >>> IncidentScope.parse("rank:3") == IncidentScope.of_rank(3)
        True

        Raises:
            ValueError: no scope has this text.
        """
        level, colon, name = text.partition(":")
        scope = cls(ScopeLevel(level), name)
        if bool(colon) is (scope.level is ScopeLevel.JOB):
            raise ValueError(f"{text!r} names no part of a job")
        return scope

    @classmethod
    def of_switch(cls, switch: str) -> Self:
        """The hosts of one switch."""
        return cls(ScopeLevel.SWITCH, switch)

    @classmethod
    def of_host(cls, host: str) -> Self:
        """One host."""
        return cls(ScopeLevel.HOST, host)

    @classmethod
    def of_rank(cls, rank: int) -> Self:
        """One rank."""
        return cls(ScopeLevel.RANK, str(int(rank)))

    @classmethod
    def of_stage(cls, stage: int) -> Self:
        """One pipeline stage."""
        return cls(ScopeLevel.STAGE, str(int(stage)))

    @classmethod
    def of_rule(cls, name: str) -> Self:
        """What one rule on metrics is about."""
        return cls(ScopeLevel.RULE, name)

    @classmethod
    def of_alert(cls, name: str) -> Self:
        """What the alerts of one name are about."""
        return cls(ScopeLevel.ALERT, name)

    @property
    def host(self) -> str | None:
        """The host's name; None unless the scope is a host."""
        return self.name if self.level is ScopeLevel.HOST else None

    @property
    def number(self) -> int:
        """Number of the rank or stage.

        Raises:
            ValueError: the scope is neither.
        """
        return int(self.name)


WHOLE_JOB: Final = IncidentScope(ScopeLevel.JOB)
