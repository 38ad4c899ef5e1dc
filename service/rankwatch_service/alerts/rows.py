"""The alerts that fire, and what stream is told of them: that they began, and that they ended."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import Connection, RowMapping, delete, func, select, tuple_

from rankwatch_detectors.alerts import ALERTS_MAX as ALERTS_PER_JOB_MAX
from rankwatch_detectors.alerts import NAMES_MAX
from rankwatch_service.alerts.alert import Alert
from rankwatch_service.log.base import Entry
from rankwatch_service.log.control_log import ControlLog
from rankwatch_service.policy.control_records import AlertsReceived, ReportedAlert, encode_control
from rankwatch_service.store.models import AlertRow
from rankwatch_service.store.upsert import upsert

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
    """It fires or is over as before."""
    ENDED = "ended"
    EXPIRED = "expired"
    """It was not repeated in time."""
    WAITING = "waiting"
    """It concerns no job, or its job has too many: its next repeat may find one, or room."""
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
        self._told: defaultdict[str, list[ReportedAlert]] = defaultdict(list)
        """By job."""

    def take(
        self, alerts: Sequence[Alert], jobs: Mapping[str, Sequence[str]], of_jobs: Collection[str]
    ) -> list[AlertResult]:
        """Take alerts of one request, each once; returns what became of each.

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
        self._tell()
        return results

    def expire(self) -> int:
        """End the alerts that were not repeated in time; returns how many."""
        due = select(AlertRow.__table__).where(AlertRow.ends_unix_ns <= self._now).order_by(AlertRow.starts_unix_ns)
        rows = self._connection.execute(due).mappings().all()
        self._remove(rows, "expired")
        self._tell()
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
            self._told[job].append(alert.reported())
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
                self._told[row["job"]].append(ReportedAlert(row["fingerprint"], row["name"], state))

    def _tell(self) -> None:
        entries = [Entry(job, encode_control(AlertsReceived(tuple(told)))) for job, told in sorted(self._told.items())]
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
