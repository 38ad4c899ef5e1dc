"""The open episodes of one detector, with their newest finding, to which updates and the end refer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from rankwatch_detectors.base import Change, Finding, Kind, Severity
from rankwatch_detectors.scope import IncidentScope
from rankwatch_detectors.state import Stateful

# One bad host has 8 or 16 ranks, and a rack has 64: a longer list of culprits is not read. Beyond that the job as a
# whole is in trouble, which other findings report. Refused episodes are counted in `refused`.
EPISODES_MAX = 64

DATED_FROM_S = 1e8
"""Stream times from here on (1973) are Unix times; smaller ones count from the beginning of a recording."""


class Episodes(Stateful):
    """Open episodes of one kind by scope, at most `EPISODES_MAX`."""

    STATE: ClassVar[str] = "_open refused"

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._open: dict[str, dict[str, Any]] = {}
        self.refused = 0

    def __contains__(self, scope: IncidentScope) -> bool:
        return str(scope) in self._open

    def __iter__(self) -> Iterator[IncidentScope]:
        return iter([IncidentScope.parse(text) for text in self._open] if self._open else ())

    def __len__(self) -> int:
        return len(self._open)

    def reported(self, scope: IncidentScope) -> Mapping[str, Any]:
        """The newest finding of an open episode, by field name."""
        return self._open[str(scope)]

    def open(
        self,
        scope: IncidentScope,
        *,
        attempt: str,
        severity: Severity,
        onset_step: int | None,
        detected_step: int | None,
        onset_time_s: float,
        detected_time_s: float,
        score: float,
        confidence: float,
        summary: str,
        evidence: Mapping[str, Any],
        ranks: tuple[int, ...] = (),
        cause: str = "",
    ) -> list[Finding]:
        """Open an episode; an empty list if `EPISODES_MAX` are open already."""
        if len(self._open) >= EPISODES_MAX:
            self.refused += 1
            return []
        finding = Finding(
            kind=self._kind,
            change=Change.OPEN,
            scope=scope,
            attempt=attempt,
            severity=severity,
            ranks=ranks,
            onset_step=onset_step,
            detected_step=detected_step,
            onset_time_s=onset_time_s,
            detected_time_s=detected_time_s,
            score=score,
            confidence=confidence,
            summary=summary,
            evidence=plain(evidence),
            cause=cause,
        )
        self._remember(finding)
        return [finding]

    def update(self, scope: IncidentScope, **changes: Any) -> list[Finding]:
        """Report a material change of an open episode; fields that are not passed stay as last reported."""
        return [self._report(scope, Change.UPDATE, changes)]

    def mark(self, scope: IncidentScope, what: str, step: int) -> list[Finding]:
        """Note in an open episode that a change was declared since. It stays open: a declaration is no repair.

        Args:
            scope: of the episode.
            what: the change, as a sentence.
            step: the first with it; -1: not known.
        """
        reported = self._open[str(scope)]
        before, marks = reported["evidence"].get("declared", ""), {"declared": what, "declared_step": step}
        summary = f"{reported['summary'].removesuffix(f' {before}')} {what}"
        return self.update(scope, summary=summary, evidence={**reported["evidence"], **marks})

    def note(self, scope: IncidentScope, evidence: Mapping[str, Any]) -> None:
        """Change the evidence of an open episode without a finding; the next finding includes it."""
        self._open[str(scope)]["evidence"] = plain(evidence)

    def close(
        self,
        scope: IncidentScope,
        step: int | None,
        time_s: float,
        summary: str,
        evidence: Mapping[str, Any] | None = None,
    ) -> list[Finding]:
        """Close an episode. `evidence` is merged into the evidence reported before."""
        merged = {**self._open[str(scope)]["evidence"], **(evidence or {})}
        changes = {"detected_step": step, "detected_time_s": time_s, "summary": summary, "evidence": merged}
        finding = self._report(scope, Change.CLOSE, changes)
        del self._open[str(scope)]
        return [finding]

    def close_all(self, time_s: float, reason: str) -> list[Finding]:
        """Close all episodes, in the order in which they opened."""
        return [finding for scope in self for finding in self.close(scope, None, time_s, reason)]

    def forget(self) -> None:
        """Drop all episodes without a finding."""
        self._open = {}

    def _report(self, scope: IncidentScope, change: Change, changes: Mapping[str, Any]) -> Finding:
        reported = {**self._open[str(scope)], **changes}
        finding = Finding(
            kind=self._kind,
            change=change,
            **{
                **reported,
                "scope": scope,
                "severity": Severity(reported["severity"]),
                "ranks": tuple(reported["ranks"]),
                "evidence": plain(reported["evidence"]),
            },
        )
        self._remember(finding)
        return finding

    def _remember(self, finding: Finding) -> None:
        fields = {field.name: getattr(finding, field.name) for field in dataclasses.fields(finding)}
        del fields["kind"], fields["change"]
        plain_types = {"scope": str(finding.scope), "severity": finding.severity.value, "ranks": list(finding.ranks)}
        self._open[str(finding.scope)] = fields | plain_types


def plain(evidence: Mapping[str, Any]) -> dict[str, Any]:
    """Evidence as plain JSON types; non-finite numbers become the strings NaN, Inf and -Inf."""
    return {str(key): _plain(value) for key, value in evidence.items()}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Mapping):
        return plain(value)
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, float) and not math.isfinite(number):
        return "NaN" if math.isnan(number) else ("Inf" if number > 0 else "-Inf")
    return round(number, 9) if isinstance(number, float) else number


def since(onset_time_s: float) -> str:
    """An onset as a summary states it: the time of day, which stays true, unlike an age."""
    if onset_time_s < DATED_FROM_S:
        return f"since {onset_time_s:.0f} s"
    return f"since {time_of_day(onset_time_s)} UTC"


def time_of_day(time_s: float) -> str:
    """The time of day, such as 14:03:11, of a time in seconds since 1970."""
    hours, rest = divmod(int(time_s) % 86_400, 3_600)
    return f"{hours:02}:{rest // 60:02}:{rest % 60:02}"
