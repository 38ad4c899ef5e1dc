"""Which jobs an identity may access: shell-style patterns, matched here and by the database alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from glob import escape
from typing import Any, Final

from sqlalchemy import ColumnElement, and_, literal, or_, select, true
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import Boolean

from rankwatch_service.job_pattern import as_glob, matches, parts
from rankwatch_service.store.models import JobProject

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
            mine = select(JobProject.job).where(JobProject.project == self.project)
            return and_(column.in_(mine), replace(self, project="").clause(column))
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
