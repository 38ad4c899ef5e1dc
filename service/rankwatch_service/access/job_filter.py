"""Projects and owners of jobs: who sets them, and what tokens pass on to the jobs that begin by them.

They are set by the api, in one transaction with a control record, by which the stream knows them at the same place of
the log in every replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from glob import escape
from threading import Lock
from typing import Any, Final, cast

from sqlalchemy import ColumnElement, Connection, Engine, and_, exists, literal, or_, select, true
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import Boolean

from rankwatch_service.clock import Clock
from rankwatch_service.log.base import Entry
from rankwatch_service.log.control_log import ControlLog
from rankwatch_service.names import as_glob, matches, parts
from rankwatch_service.policy.control_records import JobOwnership, encode_control
from rankwatch_service.store import audit_trail
from rankwatch_service.store.engine import read, upsert, write
from rankwatch_service.store.models import Job
from rankwatch_service.store.models import JobOwnership as OwnershipRow

CACHE_S: Final = 1.0
"""How long the project of a job is remembered: as long as a valid token."""

CACHE_MAX: Final = 65_536
"""Jobs in the cache. A full cache is emptied; each then costs one query again."""


class JobProjects:
    """The projects of jobs, as tokens need them. Thread-safe."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        """Do no I/O yet."""
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

    def begin(self, ownership: JobOwnership, controls: ControlLog, actor: str, source: str) -> None:
        """Assign project and owner to a job that begins now; a known job keeps its own. May query."""
        if self.project_of(ownership.job) is not None:
            return
        with write(self._engine) as connection:
            if not _is_known(connection, ownership.job):
                set_project(connection, ownership, controls, self._clock.unix_ns(), actor, source)
            project = project_of(connection, ownership.job).project
        self._keep(ownership.job, project)

    def _keep(self, job: str, project: str | None) -> None:
        with self._lock:
            if len(self._cache) >= CACHE_MAX:
                self._cache.clear()
            self._cache[job] = (self._clock.monotonic_s(), project)


def project_of(connection: Connection, job: str) -> JobOwnership:
    """Project and owner of a job; both empty if nobody set them."""
    row = connection.execute(
        select(OwnershipRow.project, OwnershipRow.owner).where(OwnershipRow.job == job)
    ).one_or_none()
    return JobOwnership(job, *(row or ()))


def set_project(
    connection: Connection, ownership: JobOwnership, controls: ControlLog, now_unix_ns: int, actor: str, source: str
) -> None:
    """Set project and owner of a job, in a `write`, with a record for the stream and a line in the audit trail."""
    row = {"job": ownership.job, "project": ownership.project, "owner": ownership.owner}
    connection.execute(upsert(connection, OwnershipRow, row), row)
    controls.append_in(connection, [Entry(ownership.job, encode_control(ownership))])
    fields = {"project": ownership.project, "owner": ownership.owner}
    audit_trail.append(connection, now_unix_ns, actor, "job.edit", ownership.job, "ok", source=source, fields=fields)


def in_project(job: Any, project: str) -> ColumnElement[bool]:
    """The condition that a column names a job of this project; empty: of none."""
    if project:
        return cast("ColumnElement[bool]", job.in_(select(OwnershipRow.job).where(OwnershipRow.project == project)))
    return cast("ColumnElement[bool]", job.not_in(select(OwnershipRow.job).where(OwnershipRow.project != "")))


def _is_known(connection: Connection, job: str) -> bool:
    known = select(exists().where(Job.name == job) | exists().where(OwnershipRow.job == job))
    return bool(connection.scalar(known))


_LIKE_ESCAPED: Final = {"%": "\\%", "_": "\\_", "\\": "\\\\"}


def _of_no_project(_job: str) -> str | None:
    return ""


@dataclass(frozen=True)
class JobFilter:
    """The jobs whose names match any of some patterns, of one project or of all. Upper and lower case differ."""

    patterns: tuple[str, ...] = ()
    """In a pattern `*` stands for any text, `?` for one character, and `[c]` for the character c itself.

    No pattern at all: every job.
    """
    project: str = ""
    """If it is not empty, only those jobs of them that are of this project."""
    project_of: Callable[[str], str | None] = field(default=_of_no_project, compare=False, repr=False)
    """The project of a job; None if there is no such job. Asked only if there is a `project`."""

    @classmethod
    def of(cls, job: str) -> JobFilter:
        """The filter for the job of this very name; empty: every job."""
        return cls((escape(job),)) if job else cls()

    @classmethod
    def any_of(cls, filters: Iterable[JobFilter]) -> JobFilter:
        """The filter for the jobs that any of one or more filters includes."""
        listed = list(filters)
        assert not any(one.project for one in listed), "patterns alone cannot say which of them hold in which project"
        if any(one.every for one in listed):
            return cls()
        return cls(tuple(dict.fromkeys(pattern for one in listed for pattern in one.patterns)))

    @property
    def every(self) -> bool:
        """Whether it includes every job, also those to come."""
        return not self.project and self._every_name

    @property
    def only(self) -> str:
        """The name of the only job that it includes; empty if it may include several."""
        return self._names[0] if len(self.patterns) == 1 and self._names else ""

    def includes(self, job: str) -> bool:
        """Whether it includes the job of this name. May query, if there is a `project`."""
        return self._has_name(job) and (not self.project or self.project_of(job) == self.project)

    def admits(self, job: str) -> bool:
        """Whether it includes the job of this name, or will, if the job begins in its project. May query."""
        return self._has_name(job) and (not self.project or self.project_of(job) in (None, self.project))

    def clause(self, column: Any) -> ColumnElement[bool]:
        """The condition on a column of names of jobs, on SQLite and PostgreSQL."""
        if self.project:
            return and_(in_project(column, self.project), replace(self, project="").clause(column))
        if self.every:
            return true()
        wild = [pattern for pattern in self.patterns if _name_of(pattern) is None]
        named = [column.in_(self._names)] if self._names else []
        return or_(*named, *(_Pattern(column, literal(_as_like(one)), literal(as_glob(one))) for one in wild))

    def __str__(self) -> str:
        """As messages name it."""
        if self.project and self._every_name:
            return f"project {self.project!r}"
        if self.every:
            return "every job"
        if self.only:
            return f"job {self.only!r}"
        return f"jobs {', '.join(repr(pattern) for pattern in self.patterns)}"

    @property
    def _every_name(self) -> bool:
        return not self.patterns or "*" in self.patterns

    def _has_name(self, job: str) -> bool:
        return self._every_name or any(matches(pattern, job) for pattern in self.patterns)

    @cached_property
    def _names(self) -> list[str]:
        return [name for pattern in self.patterns if (name := _name_of(pattern)) is not None]


class _Pattern(FunctionElement[bool]):
    """Whether a text matches a pattern, which is given for LIKE and for GLOB: LIKE of SQLite ignores case."""

    type = Boolean()
    inherit_cache = True


@compiles(_Pattern)
def _like(element: _Pattern, compiler: SQLCompiler, **more: Any) -> str:
    column, like, _ = element.clauses
    return f"{compiler.process(column, **more)} LIKE {compiler.process(like, **more)} ESCAPE '\\'"


@compiles(_Pattern, "sqlite")
def _glob(element: _Pattern, compiler: SQLCompiler, **more: Any) -> str:
    column, _, glob = element.clauses
    return f"{compiler.process(column, **more)} GLOB {compiler.process(glob, **more)}"


def _name_of(pattern: str) -> str | None:
    """The only name that matches a pattern; None if several do."""
    found = parts(pattern)
    return (
        None if any(star or mark for _, star, mark, _ in found) else "".join(one or other for one, _, _, other in found)
    )


def _as_like(pattern: str) -> str:
    """A pattern as LIKE reads it, with a backslash as escape character."""
    texts = (
        "%" if star else "_" if mark else _LIKE_ESCAPED.get(one or other, one or other)
        for one, star, mark, other in parts(pattern)
    )
    return "".join(texts)
