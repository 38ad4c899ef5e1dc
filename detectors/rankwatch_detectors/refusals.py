"""Reports what the service refused of a job: messages beyond a limit (`limit`), and forged ones (`forged`).

Fields of both: `what` (of a limit: what there may be only so many of; of a forgery: which part of the message was
forged) and `count`, the messages refused, 1 if it is missing. A limit has besides `limit`, the figure, and `figure`,
what it would have become; both may have `token`, `agent` and `host`: who sent it, as far as that is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rankwatch_detectors.base import AttemptStart, Finding, Kind, Occurrence, Presence, Severity
from rankwatch_detectors.dispatch import DispatchingDetector
from rankwatch_detectors.scope import WHOLE_JOB


@dataclass(frozen=True, slots=True)
class RefusalConfig:
    """Settings of both detectors of refusals."""

    quiet_s: float = 300.0
    """Time without a refusal after which the episode ends: limits count by the minute, and agents retry more often."""
    listed_max: int = 16
    """Different `what` that are counted apart; further ones count as "other"."""


class RefusalDetector(DispatchingDetector):
    """One kind of refusal. Scope "job"; a new attempt does not end the episode. Memory: constant."""

    STATE: ClassVar[str] = "_refused _reported _last_s"

    def __init__(self, kind: Kind, config: RefusalConfig) -> None:
        self.kind = kind
        super().__init__()
        self.name = str(kind)
        self.version = 1
        self._config = config
        self._refused: dict[str, int] = {}
        """By `what`, messages refused in this episode."""
        self._reported = 0
        """Messages refused as of the last finding."""
        self._last_s = 0.0

    def _begin(self, start: AttemptStart) -> list[Finding]:
        self.attempt = start.attempt
        self.world_size = start.topology.world_size
        return []

    def _on_occurrence(self, occurrence: Occurrence) -> Sequence[Finding]:
        if occurrence.kind != OCCURRENCES[self.kind]:
            return ()
        what = str(occurrence.fields.get("what", ""))
        if what not in self._refused and len(self._refused) >= self._config.listed_max:
            what = "other"
        self._refused[what] = self._refused.get(what, 0) + int(occurrence.fields.get("count", 1))
        self._last_s = self.now_s
        refused = sum(self._refused.values())
        reported = self._described(occurrence, refused)
        if WHOLE_JOB in self.episodes:
            # Reported again whenever the number has doubled: a flood of millions is twenty updates.
            if refused < 2 * self._reported:
                self.episodes.note(WHOLE_JOB, reported["evidence"])
                return ()
            self._reported = refused
            return self.episodes.update(WHOLE_JOB, detected_time_s=self.now_s, **reported)
        self._reported = refused
        return self.episodes.open(
            WHOLE_JOB,
            attempt=self.attempt or occurrence.attempt,
            severity=Severity.CRITICAL if self.kind is Kind.FORGED_TELEMETRY else Severity.WARNING,
            onset_step=None,
            detected_step=None,
            onset_time_s=self.now_s,
            detected_time_s=self.now_s,
            score=float("inf"),
            confidence=1.0,
            **reported,
        )

    def _on_tick(self, presence: Presence | None) -> Sequence[Finding]:  # noqa: ARG002
        if WHOLE_JOB not in self.episodes or self.now_s - self._last_s < self._config.quiet_s:
            return ()
        refused, self._refused, self._reported = sum(self._refused.values()), {}, 0
        why = f"Nothing was refused for {self._config.quiet_s:.0f} s; before, {_messages(refused)}."
        return self.episodes.close(WHOLE_JOB, None, self.now_s, why)

    def _described(self, occurrence: Occurrence, refused: int) -> dict[str, Any]:
        """Summary and evidence as of this occurrence."""
        fields = occurrence.fields
        host = str(fields.get("host", occurrence.host))
        who = [f"{name} {fields[name]}" for name in ("token", "agent") if fields.get(name)]
        who += [f"host {host}"] if host else []
        sender = f", the last from {', '.join(who)}" if who else ""
        if self.kind is Kind.LIMIT_REACHED:
            summary = f"More than {fields.get('limit')} {fields.get('what')}: {_messages(refused)} refused{sender}."
        else:
            parts = ", ".join(f"{what} {count}" for what, count in self._refused.items())
            summary = f"Forged telemetry: {_messages(refused)} refused ({parts}){sender}."
        evidence = {**fields, "host": host, "refused": refused, "refused_by_what": dict(self._refused)}
        known = {name: value for name, value in evidence.items() if name != "count" and value != ""}
        return {"summary": summary, "evidence": known}


OCCURRENCES = {Kind.LIMIT_REACHED: "limit", Kind.FORGED_TELEMETRY: "forged"}
"""The occurrence of which each kind of refusal is about."""


def _messages(count: int) -> str:
    return "1 message" if count == 1 else f"{count} messages"
