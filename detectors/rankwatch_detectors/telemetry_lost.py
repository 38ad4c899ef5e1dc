"""Tells that a host is silent although its ranks have not ended, or that many of its messages were lost.

Silence is not health. Progress blocks come once a second whatever training does, paused jobs included, so a host of
which none came for some seconds is unknown from then on. That its collector is silent does not mean that its ranks are
gone: those are `rank_lost`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rankwatch_detectors.base import AttemptStart, Finding, Ints, Kind, Occurrence, Presence, Severity
from rankwatch_detectors.dispatch import DispatchingDetector, which


@dataclass(frozen=True, slots=True)
class TelemetryLostConfig:
    """Settings of the telemetry_lost detector."""

    silent_s: float = 10.0
    """Silence of a host after which nothing is known of it: an agent's worker is back within one second, a service
    role within three, and retries after an outage come every few seconds."""
    gaps_min: int = 10
    """Messages missing within `gap_window_s` that make a judgement about the host unsafe: at one or two messages a
    second, more than a tenth of what it sent."""
    gap_window_s: float = 60.0
    tick_gap_s: float = 5.0
    """Ticks come every second. After a longer pause the stream was away, and nobody could be heard."""


class TelemetryLostDetector(DispatchingDetector):
    """Episodes by host, scope "host:NAME"; "job" when all hosts of several are silent. Memory: by host."""

    kind: Kind = Kind.TELEMETRY_LOST
    STATE: ClassVar[tuple[str, ...]] = (
        *DispatchingDetector.STATE,
        "_hosts",
        "_host_of",
        "_listening_s",
        "_gaps",
        "_tick_s",
    )

    def __init__(self, config: TelemetryLostConfig) -> None:
        super().__init__()
        self.name = "telemetry_lost"
        self.version = 1
        self._config = config
        self._hosts: list[str] = []
        self._host_of: Ints = np.zeros(0, dtype=np.int64)
        self._listening_s = 0.0
        self._tick_s: float | None = None
        self._gaps: dict[str, list[list[float]]] = {}

    def _on_attempt(self, start: AttemptStart, *, new_attempt: bool, new_launch: bool) -> Sequence[Finding]:  # noqa: ARG002
        hosts = start.topology.host
        self._hosts = sorted(set(hosts))
        number = {host: index for index, host in enumerate(self._hosts)}
        self._host_of = np.asarray([number[host] for host in hosts], dtype=np.int64)
        if new_attempt:
            self._gaps = {}
            self._listening_s = self.now_s
        return ()

    def _on_occurrence(self, occurrence: Occurrence) -> Sequence[Finding]:
        if occurrence.kind == "gap" and occurrence.host in self._hosts:
            missing = float(occurrence.fields.get("missing", 0))
            gaps = [*self._gaps.get(occurrence.host, []), [occurrence.time_s, missing]]
            # One entry a gap, of which the newest hundred decide as well as all would.
            self._gaps[occurrence.host] = gaps[-100:]
        return ()

    def _on_tick(self, presence: Presence | None) -> Sequence[Finding]:
        if self._tick_s is not None and self.now_s - self._tick_s > self._config.tick_gap_s:
            self._listening_s = self.now_s
        self._tick_s = self.now_s
        if presence is None or not self._hosts:
            return ()
        silence = self._silence(presence)
        silent = [host for host, seconds in silence.items() if seconds > self._config.silent_s]
        if not (silent or self._gaps or len(self.episodes)):
            return ()
        reasons = {host: self._reason(host, silence.get(host)) for host in self._hosts}
        if len(self._hosts) > 1 and len(silent) == len(self._hosts):
            return self._all_silent(silence)
        findings = self._close_recovered(presence, reasons, silence)
        for host, reason in reasons.items():
            scope = f"host:{host}"
            if reason is not None and scope not in self.episodes and "job" not in self.episodes:
                findings.extend(self._open(scope, host, reason, presence))
        return findings

    def _silence(self, presence: Presence) -> dict[str, float]:
        """Seconds since each host was heard; hosts never heard, or with nothing left to report, are left out."""
        gone = which(presence.state, "left") | which(presence.state, "exited")
        pending = presence.heard & ~gone
        newest = np.full(len(self._hosts), -np.inf)
        np.maximum.at(newest, self._host_of[presence.heard], presence.heard_s[presence.heard])
        judged = np.zeros(len(self._hosts), dtype=np.bool_)
        judged[self._host_of[pending]] = True
        return {
            self._hosts[index]: self.now_s - max(float(newest[index]), self._listening_s)
            for index in np.flatnonzero(judged)
        }

    def _reason(self, host: str, silent_s: float | None) -> dict[str, Any] | None:
        if silent_s is not None and silent_s > self._config.silent_s:
            return {"reason": "silent", "silent_s": silent_s}
        since = self.now_s - self._config.gap_window_s
        missing = sum(count for time_s, count in self._gaps.get(host, []) if time_s > since)
        return {"reason": "gaps", "messages_missing": int(missing)} if missing >= self._config.gaps_min else None

    def _all_silent(self, silence: dict[str, float]) -> list[Finding]:
        if "job" in self.episodes:
            return []
        shortest = min(silence.values())
        reason = {"reason": "silent", "silent_s": shortest, "hosts": len(silence)}
        findings = []
        for scope in self.episodes:
            summary = "All hosts of the job are silent now; told as one."
            findings.extend(self.episodes.close(scope, None, self.now_s, summary))
        return [*findings, *self._told("job", f"None of the job's {len(silence)} hosts", reason, None)]

    def _open(self, scope: str, host: str, reason: dict[str, Any], presence: Presence) -> list[Finding]:
        on_host = self._host_of == self._hosts.index(host)
        evidence = {**reason, "host": host, "ranks_on_host": int(on_host.sum())}
        heard = presence.heard & on_host
        step = int(presence.step[heard].max()) if heard.any() else None
        return self._told(scope, f"Host {host}" if host else "The host", evidence, step)

    def _told(self, scope: str, who: str, reason: dict[str, Any], step: int | None) -> list[Finding]:
        silent_s = float(reason.get("silent_s", 0.0))
        if reason["reason"] == "silent":
            verb = "has been heard" if scope == "job" else "has not been heard"
            summary = f"{who} {verb} for {silent_s:.0f} s; the state of its ranks is unknown."
        else:
            summary = f"{who} lost {reason['messages_missing']} messages within {self._config.gap_window_s:.0f} s."
        return self.episodes.open(
            scope,
            attempt=self.attempt,
            severity=Severity.WARNING,
            onset_step=step,
            detected_step=step,
            onset_time_s=self.now_s - silent_s,
            detected_time_s=self.now_s,
            score=silent_s / self._config.silent_s * 6.0 if silent_s else 6.0,
            confidence=1.0,
            summary=summary,
            evidence=reason,
            cause="network" if reason["reason"] == "gaps" else "",
        )

    def _close_recovered(
        self, presence: Presence, reasons: dict[str, dict[str, Any] | None], silence: dict[str, float]
    ) -> list[Finding]:
        findings: list[Finding] = []
        step = int(presence.step[presence.heard].max()) if presence.heard.any() else None
        for scope in self.episodes:
            host = scope.removeprefix("host:")
            # Ranks that turned out to have ended leave nothing to hear.
            if scope == "job":
                findings.extend(self.episodes.close(scope, step, self.now_s, "Telemetry is back."))
            elif reasons.get(host) is None:
                why = "Telemetry is back." if host in silence else "Its ranks have ended; nothing is left to hear."
                findings.extend(self.episodes.close(scope, step, self.now_s, why))
        return findings
