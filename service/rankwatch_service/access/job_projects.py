"""Projects and owners of jobs: who sets them, and what tokens pass on to the jobs that begin by them.

They are set by the api, in one transaction with a control record, by which the stream knows them at the same place of
the log in every replay.
"""

from __future__ import annotations

from threading import Lock
from typing import Final

from sqlalchemy import Connection, Engine, exists, select

from rankwatch_service.clock import Clock
from rankwatch_service.log.base import Entry
from rankwatch_service.log.control_log import ControlLog
from rankwatch_service.policy.control_records import JobProject, encode_control
from rankwatch_service.store import audit_trail
from rankwatch_service.store.engine import read, upsert, write
from rankwatch_service.store.models import Job
from rankwatch_service.store.models import JobProject as JobProjectRow

CACHE_S: Final = 1.0
"""How long the project of a job is remembered: as long as a valid token."""

CACHE_MAX: Final = 65_536
"""Jobs in the cache. A full cache is emptied; each then costs one query again."""


class JobProjects:
    """The projects of jobs, as tokens need them. Thread-safe."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        """Do no I/O yet.

        Args:
            engine: of a database with this version's tables.
            clock: decides how long a project is remembered.
        """
        self._engine = engine
        self._clock = clock
        self._cache: dict[str, tuple[float, str | None]] = {}
        self._lock = Lock()

    def project_of(self, job: str) -> str | None:
        """The project of a job; empty if it has none, None if there is no such job. May query."""
        # Without the lock: a look-up in a dict is atomic.
        entry, now_s = self._cache.get(job), self._clock.monotonic_s()
        if entry is not None and now_s - entry[0] <= CACHE_S:
            return entry[1]
        with read(self._engine) as connection:
            found = project_of(connection, job).project if _is_known(connection, job) else None
        self._keep(job, found)
        return found

    def begin(self, whose: JobProject, controls: ControlLog, actor: str, source: str) -> None:
        """Give a job that begins now its project and owner; one that is known keeps what it has. May query."""
        if self.project_of(whose.job) is not None:
            return
        with write(self._engine) as connection:
            if not _is_known(connection, whose.job):
                set_project(connection, whose, controls, self._clock.unix_ns(), actor, source)
            project = project_of(connection, whose.job).project
        self._keep(whose.job, project)

    def _keep(self, job: str, project: str | None) -> None:
        with self._lock:
            if len(self._cache) >= CACHE_MAX:
                self._cache.clear()
            self._cache[job] = (self._clock.monotonic_s(), project)


def project_of(connection: Connection, job: str) -> JobProject:
    """Project and owner of a job; both empty if nobody set them."""
    row = connection.execute(
        select(JobProjectRow.project, JobProjectRow.owner).where(JobProjectRow.job == job)
    ).one_or_none()
    return JobProject(job, *(row or ()))


def set_project(
    connection: Connection, whose: JobProject, controls: ControlLog, now_unix_ns: int, actor: str, source: str
) -> None:
    """Set project and owner of a job, in a `write`, with a record for the stream and a line in the audit trail."""
    row = {"job": whose.job, "project": whose.project, "owner": whose.owner}
    connection.execute(upsert(connection, JobProjectRow, row), row)
    controls.append_in(connection, [Entry(whose.job, encode_control(whose))])
    fields = {"project": whose.project, "owner": whose.owner}
    audit_trail.append(connection, now_unix_ns, actor, "job.edit", whose.job, "ok", source=source, fields=fields)


def _is_known(connection: Connection, job: str) -> bool:
    known = select(exists().where(Job.name == job) | exists().where(JobProjectRow.job == job))
    return bool(connection.scalar(known))
