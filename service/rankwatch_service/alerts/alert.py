"""An alert as a Prometheus reports it, and what its labels mean here. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rankwatch_detectors.base import Severity
from rankwatch_service.policy.control_records import ReportedAlert

LASTS_S: Final = 300
"""How long an alert without `endsAt` counts as firing after it was reported, as in Alertmanager."""

LABELS_MAX: Final = 64
LABELS_CHARS_MAX: Final = 8_192
"""Names and values of an alert's labels together. They identify it, so they cannot be cut."""

NAME_CHARS_MAX: Final = 200
"""Longest name of an alert: it is part of a scope, which a silence may name."""

ANNOTATIONS_MAX: Final = 32
ANNOTATION_CHARS_MAX: Final = 1_000
"""They describe, so further ones are left out and longer ones are cut."""

SUMMARY_CHARS_MAX: Final = 300
"""Longest text of an alert in the summary of its incident; a longer one is cut."""

URL_CHARS_MAX: Final = 2_000
"""Longest link; a longer one is left out, since a part of it leads nowhere."""

HOST_LABELS: Final = ("host", "hostname", "Hostname", "node", "nodename", "kubernetes_node", "instance")
"""Labels whose values may be the name of a host: those of node_exporter, the DCGM exporter and Kubernetes."""

NAME_LABEL: Final = "alertname"
WATCHDOG: Final = "Watchdog"
OWN_PREFIX: Final = "Rankwatch"
INCIDENT_LABEL: Final = "incident"

_SEVERITIES: Final[Mapping[str, Severity]] = {
    "critical": Severity.CRITICAL,
    "page": Severity.CRITICAL,
    "emergency": Severity.CRITICAL,
    "warning": Severity.WARNING,
    "info": Severity.INFO,
    "none": Severity.INFO,
}

_SUMMARIES: Final = ("summary", "description", "message")
"""Annotations that may hold what people read first, best first."""

_FNV_OFFSET: Final = 0xCBF29CE484222325
_FNV_PRIME: Final = 0x100000001B3


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert, as it was reported last."""

    fingerprint: str
    """16 hexadecimal digits that identify it: those by which Alertmanager knows it."""
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    """They describe it."""
    starts_unix_ns: int
    ends_unix_ns: int
    """In the past: it is over. Else it counts as over then, unless it is repeated."""
    url: str = ""
    """Its query in its Prometheus; empty: unknown."""

    @classmethod
    def of(
        cls,
        labels: Mapping[str, str],
        annotations: Mapping[str, str],
        starts_unix_ns: int | None,
        ends_unix_ns: int | None,
        url: str,
        now_unix_ns: int,
    ) -> Alert:
        """The alert of what was sent; a time that is missing is None.

        Raises:
            ValueError: it cannot be accepted.
        """
        labels = {name: value for name, value in labels.items() if value}
        _check_labels(labels)
        if starts_unix_ns is None:
            starts_unix_ns = now_unix_ns if ends_unix_ns is None else min(ends_unix_ns, now_unix_ns)
        if ends_unix_ns is None:
            ends_unix_ns = now_unix_ns + LASTS_S * 10**9
        if ends_unix_ns < starts_unix_ns:
            raise ValueError("endsAt is before startsAt")
        kept = list(annotations.items())[:ANNOTATIONS_MAX]
        cut = {name[:NAME_CHARS_MAX]: text[:ANNOTATION_CHARS_MAX] for name, text in kept if text}
        return cls(_fingerprint(labels), labels, cut, min(starts_unix_ns, now_unix_ns), ends_unix_ns, _link(url))

    @property
    def name(self) -> str:
        """Its name; alerts of one name are one incident."""
        return self.labels.get(NAME_LABEL, "unnamed")

    @property
    def severity(self) -> Severity:
        """By its label `severity`; a warning if that is missing or unknown."""
        return _SEVERITIES.get(self.labels.get("severity", "").lower(), Severity.WARNING)

    @property
    def is_own(self) -> bool:
        """Whether it is about rankwatch itself or came from it, or says only that its Prometheus lives.

        An incident of it would be about no job, and one of an alert about our open incidents would keep itself open.
        """
        sent_by_us = self.labels.get(INCIDENT_LABEL, "").startswith("inc_")
        return self.name == WATCHDOG or self.name.startswith(OWN_PREFIX) or sent_by_us

    @property
    def hosts(self) -> tuple[str, ...]:
        """What its labels call its host: names and addresses, with or without a port."""
        return tuple(dict.fromkeys(self.labels[name] for name in HOST_LABELS if name in self.labels))

    def job_names(self, job_labels: Sequence[str]) -> list[str]:
        """Values of the labels that may name its job, best first."""
        return [self.labels[name] for name in job_labels if name in self.labels]

    def is_over(self, now_unix_ns: int) -> bool:
        """Whether it has ended."""
        return self.ends_unix_ns <= now_unix_ns

    @property
    def summary(self) -> str:
        """What people read first, in one line; empty if it says nothing."""
        summary = next((self.annotations[name] for name in _SUMMARIES if name in self.annotations), "")
        return " ".join(summary.split())[:SUMMARY_CHARS_MAX]

    def reported(self) -> ReportedAlert:
        """What stream is told of it when it begins."""
        rank = self.labels.get("rank", "")
        return ReportedAlert(
            fingerprint=self.fingerprint,
            name=self.name,
            state="firing",
            severity=self.severity,
            summary=self.summary,
            hosts=self.hosts,
            rank=int(rank) if rank.isascii() and rank.isdecimal() and len(rank) < 10 else None,
            starts_s=self.starts_unix_ns / 1e9,
            labels=dict(self.labels),
            url=self.url,
            runbook_url=_link(self.annotations.get("runbook_url", "")),
        )


def _fingerprint(labels: Mapping[str, str]) -> str:
    """FNV-1a of the labels, sorted by name."""
    digest = _FNV_OFFSET
    for byte in b"".join(name.encode() + b"\xff" + labels[name].encode() + b"\xff" for name in sorted(labels)):
        digest = (digest ^ byte) * _FNV_PRIME % 2**64
    return f"{digest:016x}"


def _check_labels(labels: Mapping[str, str]) -> None:
    if not labels:
        raise ValueError("an alert has at least one label")
    if len(labels) > LABELS_MAX:
        raise ValueError(f"an alert has at most {LABELS_MAX} labels")
    if sum(len(name) + len(value) for name, value in labels.items()) > LABELS_CHARS_MAX:
        raise ValueError(f"the labels of an alert have at most {LABELS_CHARS_MAX} characters")
    name = labels.get(NAME_LABEL, "unnamed")
    if len(name) > NAME_CHARS_MAX or not name.isprintable():
        raise ValueError(f"alertname has at most {NAME_CHARS_MAX} characters, all of which can be printed")


def _link(url: str) -> str:
    """A link that pages may show; empty for anything else."""
    return url if url.startswith(("https://", "http://")) and len(url) <= URL_CHARS_MAX else ""
