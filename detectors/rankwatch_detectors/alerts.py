"""Reports the alerts that a Prometheus has about a job: one episode for each name, with all alerts of that name.

An occurrence `alert` has in `alerts` what changed at once, a list of objects: `name`, `fingerprint` (identifies an
alert), `state` (firing; resolved: whoever sent it says so; expired: it was not repeated), `severity`, `summary`,
`hosts` (names of its host, as its labels have them), `rank` (or None), `starts_s`, `labels`, `url` and `runbook_url`
(either may be empty). Who sends them decides how many there are, so that they are limited before they come here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

from rankwatch_detectors.base import GRAVITY, AttemptStart, Change, Finding, Kind, Occurrence, Severity
from rankwatch_detectors.dispatch import DispatchingDetector
from rankwatch_detectors.episodes import EPISODES_MAX
from rankwatch_detectors.scope import IncidentScope

NAMES_MAX: Final = EPISODES_MAX
"""Names of alerts that fire in one job at a time, each with an incident."""

ALERTS_MAX: Final = 512
"""Alerts that fire in one job at a time: one of each of 512 hosts, 0.5 MB."""

LISTED_MAX: Final = 16
"""Alerts of one name that the evidence lists, the gravest first; a count says how many there are."""


class AlertDetector(DispatchingDetector):
    """One episode for each name, scope "alert:NAME"; it ends with the last alert of that name, whatever the job does.

    Memory: `ALERTS_MAX` alerts, and the hosts of all ranks.
    """

    kind: Kind = Kind.ALERT
    STATE: ClassVar[str] = "_firing _ranks_of"
    LEARNED_FOR_GOOD: ClassVar[tuple[str, ...]] = ("episodes", "_firing")

    def __init__(self) -> None:
        super().__init__()
        self.name = "alert"
        self.version = 1
        self._firing: dict[str, dict[str, dict[str, Any]]] = {}
        """By name and fingerprint, in the order in which they came."""
        self._ranks_of: dict[str, list[int]] = {}
        """By host."""

    def _begin(self, start: AttemptStart) -> list[Finding]:
        new_launch = start.launch != self.attempt.rpartition(".")[0]
        self.attempt, self.world_size = start.attempt, start.topology.world_size
        self._ranks_of = {}
        for rank, host in enumerate(start.topology.host):
            self._ranks_of.setdefault(host, []).append(rank)
        # The end of the job has ended its incidents, but not these alerts.
        return [finding for name in self._firing for finding in self._report(name)] if new_launch else []

    def _on_occurrence(self, occurrence: Occurrence) -> Sequence[Finding]:
        if occurrence.kind == "accepted":
            return self._accept(occurrence.fields)
        if occurrence.kind != "alert":
            return ()
        self.attempt = self.attempt or occurrence.attempt
        by_name: dict[str, list[Mapping[str, Any]]] = {}
        for alert in occurrence.fields["alerts"]:
            by_name.setdefault(alert["name"], []).append(alert)
        return [finding for name, alerts in by_name.items() for finding in self._take(name, alerts)]

    def _accept(self, fields: Mapping[str, Any]) -> list[Finding]:
        """A person resolved an incident although its alerts fire: only those that come later are reported."""
        if str(self.kind) not in fields["kinds"]:
            return []
        accepted = [name for name in self._firing if str(IncidentScope.of_alert(name)) in fields["scopes"]]
        return [finding for name in accepted for finding in self._end(name, f"Alert {name} was accepted.")]

    def _take(self, name: str, alerts: Iterable[Mapping[str, Any]]) -> list[Finding]:
        firing, before = self._firing.get(name, {}), dict(self._firing.get(name, {}))
        summary = ""
        for alert in alerts:
            if alert["state"] == "firing":
                firing[alert["fingerprint"]] = {key: alert[key] for key in alert if key not in ("name", "state")}
            else:
                firing.pop(alert["fingerprint"], None)
                how = "was not repeated in time" if alert["state"] == "expired" else "is over, says who sent it"
                summary = f"Alert {name} {how}."
        if not firing:
            return self._end(name, summary)
        self._firing[name] = firing
        return self._report(name) if firing.keys() != before.keys() else []

    def _report(self, name: str) -> list[Finding]:
        """Report the alerts of a name that fire now."""
        scope, alerts = IncidentScope.of_alert(name), sorted(self._firing[name].values(), key=_gravity, reverse=True)
        hosts: dict[str, list[str]] = {}
        for host in self._ranks_of:
            hosts.setdefault(host_key(host), []).append(host)
        ranks = [self._ranks(alert, hosts) for alert in alerts]
        reported: dict[str, Any] = {
            "attempt": self.attempt,
            "severity": Severity(alerts[0]["severity"]),
            # One alert about the whole job makes all of them about it.
            "ranks": tuple(dict.fromkeys(rank for some in ranks for rank in some)) if all(ranks) else (),
            "detected_time_s": self.now_s,
            "summary": _summary(name, alerts),
            "evidence": _evidence(name, alerts),
        }
        if scope in self.episodes:
            return self.episodes.update(scope, **reported)
        since_s = min(*(alert["starts_s"] for alert in alerts), self.now_s)
        return self.episodes.open(
            scope,
            onset_step=None,
            detected_step=None,
            onset_time_s=since_s,
            score=float("inf"),
            confidence=1.0,
            **reported,
        )

    def _end(self, name: str, summary: str) -> list[Finding]:
        scope = IncidentScope.of_alert(name)
        self._firing.pop(name, None)
        if scope in self.episodes:
            return self.episodes.close(scope, None, self.now_s, summary)
        # A detector that lost its state ends all the same what it reported before.
        return [
            Finding(
                kind=self.kind,
                change=Change.CLOSE,
                scope=scope,
                attempt=self.attempt,
                severity=Severity.INFO,
                ranks=(),
                onset_step=None,
                detected_step=None,
                onset_time_s=self.now_s,
                detected_time_s=self.now_s,
                score=0.0,
                confidence=1.0,
                summary=summary,
                evidence={},
            )
        ]

    def _ranks(self, alert: Mapping[str, Any], hosts: Mapping[str, Sequence[str]]) -> list[int]:
        """The ranks that an alert is about; empty: the whole job. `hosts` are those of the job by their key."""
        rank = alert["rank"]
        if rank is not None and 0 <= rank < self.world_size:
            return [rank]
        named = [host for name in alert["hosts"] for host in hosts.get(host_key(name), ()) if is_same_host(name, host)]
        return [rank for host in dict.fromkeys(named) for rank in self._ranks_of[host]]


def host_key(name: str) -> str:
    """What all names of a host have in common: what stands before port and domain; all of an address.

    >>> host_key("node-17.cluster.local:9100")
    'node-17'
    """
    name = _without_port(name)
    first = name.partition(".")[0]
    return name if first.isdecimal() else first


def is_same_host(name: str, host: str) -> bool:
    """Whether a label's value is the name of a host: with or without a port and a domain.

    >>> is_same_host("node-17.cluster.local:9100", "node-17")
    True
    """
    name = _without_port(name)
    either_is_short = "." not in name or "." not in host
    return name == host != "" or (either_is_short and host_key(name) == host_key(host) != "")


def _without_port(name: str) -> str:
    return name if name.count(":") > 1 else name.partition(":")[0]


def _gravity(alert: Mapping[str, Any]) -> int:
    return GRAVITY.index(Severity(alert["severity"]))


def _summary(name: str, alerts: Sequence[Mapping[str, Any]]) -> str:
    gravest = str(alerts[0]["summary"]).rstrip(".") or "no summary"
    return f"Alert {name}: {gravest}." if len(alerts) == 1 else f"{len(alerts)} alerts {name}, the gravest: {gravest}."


def _evidence(name: str, alerts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    gravest = alerts[0]
    listed = [{"summary": one["summary"], "labels": _text(one["labels"])} for one in alerts[:LISTED_MAX]]
    # An address that is not known stays, empty: it takes the place of that of an alert which has ended.
    reported = {
        "alert": name,
        "alerts_firing": len(alerts),
        "url": gravest["url"],
        "runbook_url": gravest["runbook_url"],
    }
    return reported | {"alerts": listed}


def _text(labels: Mapping[str, str]) -> str:
    return ", ".join(f'{name}="{value}"' for name, value in sorted(labels.items()) if name != "alertname")
