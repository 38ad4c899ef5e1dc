"""Reports hosts that are silent although their ranks have not ended, or that have lost many of their messages.

Silence is not health. Progress blocks arrive once a second whatever training does, even if the job is paused, so the
state of a host without one for some seconds is unknown. A silent agent does not mean that its ranks are gone: that is
`rank_lost`. Hosts that fall silent within seconds of each other have a common cause (a sender, a switch, a job that was
killed), and are one episode that grows. It ends only when all of them are heard again. While no host at all is heard,
the service or the network before it may be what is away, as in a restart of the api: that is reported later. Hosts that
fall silent while the job is being ended on request are not reported: whether all ranks ended is up to `rank_lost`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rankwatch_detectors.base import AttemptStart, Bools, Finding, Floats, Ints, Kind, Occurrence, Presence, Severity
from rankwatch_detectors.dispatch import DispatchingDetector
from rankwatch_detectors.ends.teardown import ENDS, end_of, is_request
from rankwatch_detectors.scope import WHOLE_JOB, IncidentScope
from rankwatch_detectors.statistics.peers import anyone
from rankwatch_detectors.words import lasting


@dataclass(frozen=True, slots=True)
class TelemetryLostConfig:
    """Settings of the telemetry_lost detector."""

    silent_s: float = 10.0
    """Silence after which the state of a host is unknown: an agent's worker restarts within one second, a service role
    within three, and retries after an outage come every few seconds."""
    all_silent_factor: float = 3.0
    """How many times longer than `silent_s` it takes while no host of the job is heard: an api that is replaced by its
    next version is back within half a minute."""
    all_silent_share: float = 0.5
    """Share of `silent_s` for which the host that was heard last has been silent when none of them is heard."""
    gaps_min: int = 10
    """Messages missing within `gap_window_s` after which a host's data is unreliable: at one or two messages a second,
    more than a tenth of what it sent."""
    gap_window_s: float = 60.0
    tick_gap_s: float = 5.0
    """Ticks come every second. After a longer pause the stream itself was away, and no host could be heard."""
    together_s: float = 15.0
    """Hosts that fall silent within this time of the last one have the same cause: buffers of senders, ticks and
    retries spread the times by seconds."""
    listed_max: int = 64
    """Hosts that are listed in the evidence; further ones are only counted."""


class TelemetryLostDetector(DispatchingDetector):
    """Episodes by group of hosts, scope "host:NAME" of its first one; "job" if all of several are silent at once.

    Memory: linear in hosts.
    """

    kind: Kind = Kind.TELEMETRY_LOST
    STATE: ClassVar[str] = "_hosts _host_of _listening_s _gaps _tick_s _groups _asked _all_silent"

    def __init__(self, config: TelemetryLostConfig) -> None:
        super().__init__()
        self.name = "telemetry_lost"
        self.version = 7
        self._config = config
        self._hosts: list[str] = []
        self._host_of: Ints = np.zeros(0, dtype=np.int64)
        self._listening_s = 0.0
        self._tick_s: float | None = None
        self._all_silent = False
        self._gaps: dict[str, list[list[float]]] = {}
        self._asked = False
        """A rank of this attempt was asked to end: agents may be killed with the last ranks, before they can report."""
        self._groups: dict[str, dict[str, Any]] = {}
        """For each open episode: its reason, its hosts in the order in which they joined, and when the last one did."""

    def _on_attempt(self, start: AttemptStart, *, new_attempt: bool, new_launch: bool) -> Sequence[Finding]:  # noqa: ARG002
        hosts = start.topology.host
        self._hosts = sorted(set(hosts))
        number = {host: index for index, host in enumerate(self._hosts)}
        self._host_of = np.asarray([number[host] for host in hosts], dtype=np.int64)
        if new_attempt:
            self._gaps, self._groups, self._asked = {}, {}, False
            self._listening_s = self.now_s
        for group in self._groups.values():
            group["hosts"] = [host for host in group["hosts"] if host in number]
        return ()

    def _on_occurrence(self, occurrence: Occurrence) -> Sequence[Finding]:
        same_launch = occurrence.attempt.rpartition(".")[0] == self.attempt.rpartition(".")[0]
        if occurrence.kind in ENDS and same_launch and is_request(end_of(occurrence, self.now_s)):
            self._asked = True
        if occurrence.kind == "gap" and occurrence.host in self._hosts:
            missing = float(occurrence.fields.get("missing", 0))
            gaps = [*self._gaps.get(occurrence.host, []), [occurrence.time_s, missing]]
            # At most the newest hundred gaps, so that memory is bounded; they far exceed `gaps_min`.
            self._gaps[occurrence.host] = gaps[-100:]
        return ()

    def _on_tick(self, presence: Presence | None) -> Sequence[Finding]:
        if self._tick_s is not None and self.now_s - self._tick_s > self._config.tick_gap_s:
            self._listening_s = self.now_s
        self._tick_s = self.now_s
        if presence is None or not self._hosts:
            return ()
        judged, silent_s = self._silent(presence)
        heard_of_s = silent_s[judged]
        least_s = float(heard_of_s.min()) if heard_of_s.size else 0.0
        all_silent = least_s > self._config.all_silent_share * self._config.silent_s
        if self._all_silent and not all_silent:
            # The hosts come back one after the other, so silence counts from the return of the first one.
            self._listening_s = self.now_s
        self._all_silent = all_silent
        if not (self._gaps or self._groups or anyone(heard_of_s > self._config.silent_s)):
            return ()
        unheard = dict(zip(np.asarray(self._hosts)[judged].tolist(), heard_of_s.tolist(), strict=True))
        findings = self._close_recovered(presence, unheard)
        reported = {host for group in self._groups.values() for host in group["hosts"]}
        # While the stream was away, hosts could not be heard, so silence counts from its return.
        listening_s = self.now_s - self._listening_s
        timeout_s = self._config.silent_s * self._config.all_silent_factor
        waiting = all_silent and min(listening_s, least_s) <= timeout_s and self._joinable("silent") is None
        for reason in ("gaps",) if self._asked or waiting else ("silent", "gaps"):
            hosts = [
                host
                for host in self._hosts
                if host not in reported and self._reason(host, min(unheard.get(host, 0.0), listening_s)) == reason
            ]
            if hosts:
                findings.extend(self._report(reason, hosts, unheard, presence))
        return findings

    def _silent(self, presence: Presence) -> tuple[Bools, Floats]:
        """Hosts that were heard and have ranks that have not ended, and seconds since each host was last heard."""
        pending = presence.has_reported & ~presence.where("state", "left", "exited")
        newest_s = np.full(len(self._hosts), -np.inf)
        np.maximum.at(newest_s, self._host_of[presence.has_reported], presence.received_s[presence.has_reported])
        judged = np.zeros(len(self._hosts), dtype=np.bool_)
        judged[self._host_of[pending]] = True
        return judged, self.now_s - newest_s

    def _reason(self, host: str, silent_s: float) -> str:
        """Why the state of a host is unknown: "silent" or "gaps"; "" if it is known."""
        if silent_s > self._config.silent_s:
            return "silent"
        return "gaps" if self._missing(host) >= self._config.gaps_min else ""

    def _missing(self, host: str) -> int:
        since = self.now_s - self._config.gap_window_s
        return int(sum(count for time_s, count in self._gaps.get(host, []) if time_s > since))

    def _joinable(self, reason: str) -> str | None:
        """Scope of the open episode of that reason whose last host joined recently, which further ones join."""
        for text, group in self._groups.items():
            if group["reason"] == reason and self.now_s - group["joined_s"] <= self._config.together_s:
                return text
        return None

    def _report(self, reason: str, hosts: list[str], unheard: dict[str, float], presence: Presence) -> list[Finding]:
        """Add hosts to an episode that has begun recently, or open a new one."""
        if (text := self._joinable(reason)) is not None:
            group = self._groups[text]
            group.update(hosts=[*group["hosts"], *hosts], joined_s=self.now_s)
            what = self._described(reason, group["hosts"], unheard, presence)
            return self.episodes.update(IncidentScope.parse(text), detected_time_s=self.now_s, **what)
        everyone = reason == "silent" and len(hosts) == len(unheard) == len(self._hosts) > 1
        scope = WHOLE_JOB if everyone else IncidentScope.of_host(hosts[0])
        has_reported = presence.has_reported & np.isin(self._host_of, [self._hosts.index(host) for host in hosts])
        step = int(presence.step[has_reported].max()) if has_reported.any() and not everyone else None
        silent_s = min(max(unheard[host] for host in hosts), self.now_s - self._listening_s)
        silent_s = silent_s if reason == "silent" else 0.0
        findings = self.episodes.open(
            scope,
            attempt=self.attempt,
            severity=Severity.WARNING,
            onset_step=step,
            detected_step=step,
            onset_time_s=self.now_s - silent_s,
            detected_time_s=self.now_s,
            score=silent_s / self._config.silent_s * 6.0 if silent_s else 6.0,
            confidence=1.0,
            cause="network" if reason == "gaps" else "",
            **self._described(reason, hosts, unheard, presence),
        )
        if findings:
            self._groups[str(scope)] = {"reason": reason, "hosts": hosts, "joined_s": self.now_s}
        return findings

    def _described(
        self, reason: str, members: list[str], unheard: dict[str, float], presence: Presence
    ) -> dict[str, Any]:
        """Summary and evidence of an episode as it is now."""
        config = self._config
        hosts = [host for host in members if self._reason(host, unheard.get(host, 0.0)) == reason]
        evidence: dict[str, Any] = {"reason": reason, "hosts": hosts[: config.listed_max], "hosts_hit": len(hosts)}
        evidence |= {"hosts_of_the_job": len(self._hosts)}
        there = np.isin(self._host_of, [self._hosts.index(host) for host in hosts])
        evidence["ranks_on_hosts"] = int(there.sum())
        who, has = f"Host {hosts[0]}" if hosts[0] else "The host", "has"
        if len(hosts) > 1:
            who, has = f"{len(hosts)} of the job's {len(self._hosts)} hosts", "have"
        elif reason == "silent" and len(self._hosts) > 1:
            who += f" ({evidence['ranks_on_hosts']} of {there.size} ranks)"
        if reason == "gaps":
            evidence["messages_missing"] = sum(self._missing(host) for host in hosts)
            summary = f"{who} lost {evidence['messages_missing']} messages within {config.gap_window_s:.0f} s."
        else:
            evidence["silent_s"] = silent_s = min(unheard[host] for host in hosts)
            has_reported = f"{who} {has} sent no telemetry"
            if len(hosts) == len(self._hosts) > 1:
                has_reported = f"None of the job's {len(hosts)} hosts has sent telemetry"
            unknown = f": nobody knows whether {'its' if has == 'has' else 'their'} ranks train"
            here, others = presence.has_reported & there, presence.has_reported & ~there
            if here.any() and others.any():
                newest = int(presence.step[others].max())
                goes_on = evidence["steps_go_on"] = newest > int(presence.step[here].max()) + 1
                stands = f"training goes on (step {newest})" if goes_on else f"no step has begun since step {newest}"
                report = "host reports" if len(self._hosts) - len(hosts) == 1 else "hosts report"
                unknown = f"; the other {report}, and {stands}"
            summary = f"{has_reported} for {silent_s:.0f} s{unknown}."
        return {"summary": summary, "evidence": evidence}

    def _close_recovered(self, presence: Presence, unheard: dict[str, float]) -> list[Finding]:
        findings: list[Finding] = []
        step = int(presence.step[presence.has_reported].max()) if presence.has_reported.any() else None
        for text, group in list(self._groups.items()):
            if any(self._reason(host, unheard.get(host, 0.0)) for host in group["hosts"]):
                continue
            # If the ranks turn out to have ended, no telemetry is expected any more.
            back = any(host in unheard for host in group["hosts"])
            scope = IncidentScope.parse(text)
            if scope in self.episodes:
                why = self._was(group, self.now_s - self.episodes.reported(scope)["onset_time_s"], back=back)
                findings.extend(self.episodes.close(scope, step, self.now_s, why))
            del self._groups[text]
        return findings

    def _was(self, group: Mapping[str, Any], lasted_s: float, *, back: bool) -> str:
        """What became of hosts whose state was not known."""
        hosts = group["hosts"]
        who = f"Host {hosts[0]} was" if len(hosts) == 1 else f"{len(hosts)} of the job's {len(self._hosts)} hosts were"
        if group["reason"] == "gaps":
            return f"All messages arrive again; for {lasting(lasted_s)} some were lost."
        if not back:
            return f"{who} silent for {lasting(lasted_s)}: the ranks there have ended."
        return f"{who} silent for {lasting(lasted_s)} and report{'s' * (len(hosts) == 1)} again."
