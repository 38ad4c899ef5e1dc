"""Alerts of a Prometheus: their fields, the jobs that they concern, their rows, and which of them wait."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import Connection, Engine, RowMapping, and_, delete, func, select, tuple_

from rankwatch_detectors.alerts import ALERTS_MAX as ALERTS_PER_JOB_MAX
from rankwatch_detectors.alerts import NAMES_MAX, host_key, is_same_host
from rankwatch_detectors.base import Severity
from rankwatch_service.log.base import Entry
from rankwatch_service.log.control_log import ControlLog
from rankwatch_service.names import is_name, plain_host
from rankwatch_service.policy.control_records import AlertsReceived, ReportedAlert, encode_control
from rankwatch_service.store.engine import read, upsert, write
from rankwatch_service.store.models import AgentView, AlertRow, Attempt, Job

LASTS_S: Final = 300
"""How long an alert without `endsAt` counts as firing after it was reported, as in Alertmanager."""

LABELS_MAX: Final = 64
LABELS_CHARS_MAX: Final = 8_192
"""Names and values of an alert's labels together. They identify it, so they cannot be cut."""

NAME_CHARS_MAX: Final = 200
"""Longest name of an alert: it is part of a scope, which a silence may name."""

ANNOTATIONS_MAX: Final = 32
ANNOTATION_CHARS_MAX: Final = 1_000
"""Annotations only describe, so further ones are left out and longer ones are cut."""

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
    """The time at which it counts as resolved, unless it is repeated; in the past: it is resolved."""
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
        """Whether it is about rankwatch itself or came from it, or shows only that its Prometheus is alive.

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
        """The report to stream when it begins."""
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


SEEN_NS: Final = 3_600 * 10**9
"""A host is one of a job if the agent of a rank there has reported within this time: its alert comes after it fails."""

JOBS_PER_ALERT_MAX: Final = 16
"""Jobs that one alert is reported in; further ones on the host are left out."""


def read_jobs(
    connection: Connection, alerts: Sequence[Alert], job_labels: Sequence[str], now_unix_ns: int
) -> dict[str, list[str]]:
    """The jobs that each alert concerns, by fingerprint; jobs that have ended are none.

    Args:
        connection: of a `read`.
        alerts: the alerts.
        job_labels: labels that may name a job, best first.
        now_unix_ns: decides who is on a host.
    """
    named = {alert.fingerprint: [name for name in alert.job_names(job_labels) if is_name(name)] for alert in alerts}
    wanted = sorted({name for names in named.values() for name in names})
    running = set(connection.scalars(select(Job.name).where(Job.name.in_(wanted), Job.state != "ended")))
    found = {key: [name for name in names if name in running][:1] for key, names in named.items()}
    by_host = [alert for alert in alerts if not found[alert.fingerprint] and alert.hosts]
    if by_host:
        hosts = _hosts(connection, {host_key(name) for alert in by_host for name in alert.hosts}, now_unix_ns)
        for alert in by_host:
            found[alert.fingerprint] = _on_hosts(alert, hosts)
    return found


def visible(jobs: Mapping[str, Sequence[str]], may_see: Callable[[str], bool]) -> dict[str, list[str]]:
    """The same with those jobs alone that somebody may see."""
    return {key: [name for name in names if may_see(name)] for key, names in jobs.items()}


def _hosts(connection: Connection, keys: Collection[str], now_unix_ns: int) -> dict[str, list[tuple[str, str]]]:
    """Hosts with the jobs whose running attempt has ranks on them, by the key of the host.

    An agent reports its own host: it counts if it owns a rank there.
    """
    running = and_(Job.name == AgentView.job, Job.attempt == AgentView.attempt, Job.state != "ended")
    seen = select(AgentView.host, AgentView.agent, AgentView.job).join(Job, running)
    rows = connection.execute(seen.where(AgentView.at_unix_ns > now_unix_ns - SEEN_NS).order_by(AgentView.job))
    named = [(plain_host(host), agent, job) for host, agent, job in rows if host_key(plain_host(host)) in keys]
    current = and_(Attempt.job == Job.name, Attempt.attempt == Job.attempt)
    topologies = (
        select(Job.name, Attempt.topology).join(Attempt, current).where(Job.name.in_({job for *_, job in named}))
    )
    carrying = {
        (job, plain_host(rank["host"]), rank.get("agent") or "")
        for job, topology in connection.execute(topologies)
        for rank in topology.get("ranks", ())
    }
    found: dict[str, list[tuple[str, str]]] = {}
    for host, agent, job in named:
        # Who carries a rank is not known where it was introduced before its agent had enrolled.
        if not carrying.isdisjoint({(job, host, agent), (job, host, "")}):
            found.setdefault(host_key(host), []).append((host, job))
    return found


def _on_hosts(alert: Alert, hosts: Mapping[str, Sequence[tuple[str, str]]]) -> list[str]:
    here = (job for name in alert.hosts for host, job in hosts.get(host_key(name), ()) if is_same_host(name, host))
    return sorted(set(here))[:JOBS_PER_ALERT_MAX]


ALERTS_MAX: Final = 10_000
"""Alerts that fire at a time, in all jobs and in none: 20 MB of rows."""

_REPEATED: Final = ("is_reported", "ends_unix_ns", "updated_unix_ns")
"""Columns that a repeat changes."""

NO_JOB: Final = ""
"""In place of the job of an alert that concerns none."""


class AlertResult(StrEnum):
    """What became of an alert that was received."""

    BEGUN = "begun"
    """An incident has it from now on."""
    REPEATED = "repeated"
    """It fires or is resolved as before."""
    ENDED = "ended"
    EXPIRED = "expired"
    """It was not repeated in time."""
    WAITING = "waiting"
    """It matches no job, or its job has too many alerts: its next repeat may find a job, or room."""
    OWN = "own"
    """It is about rankwatch itself."""
    MALFORMED = "malformed"
    REFUSED = "refused"
    """Too many fire."""


class AlertRows:
    """Takes alerts, and what follows for stream, in one write transaction."""

    def __init__(self, connection: Connection, controls: ControlLog, now_unix_ns: int) -> None:
        """Do nothing yet.

        Args:
            connection: of a `write`.
            controls: the control log.
            now_unix_ns: the present time.
        """
        self._connection = connection
        self._controls = controls
        self._now = now_unix_ns
        self._changed: list[dict[str, Any]] = []
        """Rows of alerts that fire."""
        self._reported: defaultdict[str, list[ReportedAlert]] = defaultdict(list)
        """By job."""

    def store(
        self, alerts: Sequence[Alert], jobs: Mapping[str, Sequence[str]], of_jobs: Collection[str]
    ) -> list[AlertResult]:
        """Store the alerts of one request, each once; return the outcome of each.

        Args:
            alerts: with different fingerprints.
            jobs: by fingerprint, the jobs that it concerns.
            of_jobs: the jobs in which the sender may end an alert, `NO_JOB` among them.
        """
        keys = [alert.fingerprint for alert in alerts]
        rows = self._connection.execute(select(AlertRow.__table__).where(AlertRow.fingerprint.in_(keys))).mappings()
        known = {(row["fingerprint"], row["job"]): row for row in rows}
        room = _AlertLimits(self._connection, {job for key in keys for job in jobs[key]})
        results = [
            self._end([row for (key, job), row in known.items() if key == alert.fingerprint and job in of_jobs])
            if alert.is_over(self._now)
            else self._fire(alert, jobs[alert.fingerprint], known, room)
            for alert in alerts
        ]
        if self._changed:
            self._connection.execute(upsert(self._connection, AlertRow, _REPEATED), self._changed)
        self._report()
        return results

    def expire(self) -> int:
        """End the alerts that were not repeated in time; returns how many."""
        due = select(AlertRow.__table__).where(AlertRow.ends_unix_ns <= self._now).order_by(AlertRow.starts_unix_ns)
        rows = self._connection.execute(due).mappings().all()
        self._remove(rows, "expired")
        self._report()
        return len(rows)

    def _fire(
        self, alert: Alert, jobs: Sequence[str], known: Mapping[tuple[str, str], RowMapping], room: _AlertLimits
    ) -> AlertResult:
        if jobs and (waiting := known.get((alert.fingerprint, NO_JOB))) is not None:
            self._remove([waiting], "resolved")
        results = [self._fire_in(job, alert, known.get((alert.fingerprint, job)), room) for job in jobs or [NO_JOB]]
        order = (AlertResult.BEGUN, AlertResult.REFUSED, AlertResult.WAITING, AlertResult.REPEATED)
        return next(result for result in order if result in results)

    def _fire_in(self, job: str, alert: Alert, row: RowMapping | None, room: _AlertLimits) -> AlertResult:
        was_reported = row is not None and row["is_reported"]
        if row is None and not room.take_row():
            return AlertResult.REFUSED
        reported = was_reported or (job != NO_JOB and room.take_in(job, alert.name))
        self._changed.append(
            {
                "fingerprint": alert.fingerprint,
                "job": job,
                "name": alert.name,
                "is_reported": reported,
                "labels": dict(alert.labels),
                "annotations": dict(alert.annotations),
                "url": alert.url,
                "starts_unix_ns": alert.starts_unix_ns,
                "ends_unix_ns": alert.ends_unix_ns,
                "updated_unix_ns": self._now,
            }
        )
        if reported and not was_reported:
            self._reported[job].append(alert.reported())
            return AlertResult.BEGUN
        return AlertResult.REPEATED if reported else AlertResult.WAITING

    def _end(self, rows: Sequence[RowMapping]) -> AlertResult:
        self._remove(rows, "resolved")
        return AlertResult.ENDED if rows else AlertResult.REPEATED

    def _remove(self, rows: Sequence[RowMapping], state: str) -> None:
        gone = [(row["fingerprint"], row["job"]) for row in rows]
        if gone:
            self._connection.execute(delete(AlertRow).where(tuple_(AlertRow.fingerprint, AlertRow.job).in_(gone)))
        for row in rows:
            if row["is_reported"]:
                self._reported[row["job"]].append(ReportedAlert(row["fingerprint"], row["name"], state))

    def _report(self) -> None:
        entries = [
            Entry(job, encode_control(AlertsReceived(tuple(reported))))
            for job, reported in sorted(self._reported.items())
        ]
        if entries:
            self._controls.append_in(self._connection, entries)


class _AlertLimits:
    """How many more alerts may fire, as of the beginning of a request and what it has brought since."""

    def __init__(self, connection: Connection, jobs: Collection[str]) -> None:
        self._left = ALERTS_MAX - (connection.scalar(select(func.count()).select_from(AlertRow)) or 0)
        counted = select(AlertRow.job, AlertRow.name, func.count()).where(AlertRow.is_reported, AlertRow.job.in_(jobs))
        self._names: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for job, name, count in connection.execute(counted.group_by(AlertRow.job, AlertRow.name)):
            self._names[job][name] = count

    def take_row(self) -> bool:
        """Whether one more may fire at all."""
        self._left -= 1
        return self._left >= 0

    def take_in(self, job: str, name: str) -> bool:
        """Whether one more of this name may be reported in a job."""
        names = self._names[job]
        if names.total() >= ALERTS_PER_JOB_MAX or (name not in names and len(names) >= NAMES_MAX):
            return False
        names[name] += 1
        return True


def jobs_of_rows(connection: Connection, fingerprints: Collection[str]) -> set[str]:
    """The jobs in which any of these alerts fires, `NO_JOB` among them."""
    found = select(AlertRow.job).where(AlertRow.fingerprint.in_(fingerprints)).distinct()
    return set(connection.scalars(found))


WAITING: Final = AlertRow.is_reported.is_(False)
"""Selects them."""


def waiting_count(connection: Connection) -> int:
    """How many alerts wait."""
    return connection.scalar(select(func.count()).where(WAITING)) or 0


def why_it_waits(alert: Alert, job: str, job_labels: Sequence[str]) -> str:
    """Why no incident has an alert, in sentences.

    Args:
        alert: it waits.
        job: that it concerns; `NO_JOB`: it was found to concern none.
        job_labels: labels that may name a job, best first.

    >>> why_it_waits(Alert("f", {"job_name": "gpt-2"}, {}, 0, 0), NO_JOB, ["job_name"])
    'No running job that its sender may access is named gpt-2.'
    """
    if job != NO_JOB:
        limits = f"{ALERTS_PER_JOB_MAX} alerts or {NAMES_MAX} names of alerts"
        return f"Job {job} has {limits}, which is the limit: it is reported when there is room."
    names, hosts = alert.job_names(job_labels), alert.hosts
    of_names = f"No running job that its sender may access is named {' or '.join(names)}."
    of_hosts = (
        f"No agent of a running job that its sender may access has reported from {' or '.join(hosts)} for an hour."
    )
    reported = [text for text, given in ((of_names, names), (of_hosts, hosts)) if given]
    return " ".join(reported) or f"No label names a job ({', '.join(job_labels)}) or a host ({', '.join(HOST_LABELS)})."


def store_alerts(
    engine: Engine,
    controls: ControlLog,
    alerts: Sequence[Alert],
    job_labels: Sequence[str],
    may_see: Callable[[str], bool],
    now_unix_ns: int,
) -> list[AlertResult]:
    """Store alerts; return the outcome of each.

    Args:
        engine: of the database.
        controls: the control log.
        alerts: with different fingerprints.
        job_labels: labels that may name a job, best first.
        may_see: whether the sender may access a job.
        now_unix_ns: the present time.
    """
    with read(engine) as connection:
        jobs = read_jobs(connection, alerts, job_labels, now_unix_ns)
        firing_in = jobs_of_rows(connection, jobs.keys())
    # Outside of the read, since whoever is restricted to a project asks the database.
    of_jobs = {job for job in firing_in if job == NO_JOB or may_see(job)}
    jobs = visible(jobs, may_see)
    with write(engine) as connection:
        return AlertRows(connection, controls, now_unix_ns).store(alerts, jobs, of_jobs)
