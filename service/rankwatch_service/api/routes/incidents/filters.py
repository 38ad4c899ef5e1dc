"""Which incidents a list shows, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

from fastapi import Depends, Query
from pydantic import Field
from sqlalchemy import ColumnElement, Select, Text, case, cast, func, or_, select
from sqlalchemy.orm import InstrumentedAttribute

from rankwatch_detectors.base import Kind, Severity
from rankwatch_service.access.identities import Identity
from rankwatch_service.api.dependencies.context import Ctx
from rankwatch_service.api.http.lookup import id_is_any_of
from rankwatch_service.api.http.paging import Key, Projects, Time, any_of
from rankwatch_service.names import NAME_CHARS_MAX
from rankwatch_service.store.models import Incident as IncidentRow
from rankwatch_service.store.models import Job as JobRow
from rankwatch_service.store.models import JobProject

SEARCH_CHARS_MAX: Final = 200
RANK_MAX: Final = 2**31 - 1
NO_NUL: Final = r"^[^\x00]+$"
"""PostgreSQL stores no text with a NUL character."""

State = Literal["open", "acknowledged", "resolved", "unresolved"]
Order = Literal["newest", "oldest", "updated", "urgency", "cost"]
Host = Annotated[str, Field(min_length=1, max_length=NAME_CHARS_MAX, pattern=NO_NUL)]
Rank = Annotated[int, Field(ge=0, le=RANK_MAX)]
Selected = TypeVar("Selected", bound=Select[*tuple[Any, ...]])

URGENCY: Final = case(
    (IncidentRow.state == "resolved", 0),
    else_=case({"open": 3}, value=IncidentRow.state, else_=0)
    + case({"critical": 3, "warning": 2}, value=IncidentRow.severity, else_=1),
).label("urgency")
NEWEST: Final[tuple[Key, ...]] = (IncidentRow.onset_unix_ns, IncidentRow.id)
ORDERS: Final[dict[Order, tuple[Key, ...]]] = {
    "newest": NEWEST,
    "oldest": ((-IncidentRow.onset_unix_ns).label("oldest"), IncidentRow.id),
    "updated": (IncidentRow.updated_unix_ns, IncidentRow.id),
    "urgency": (URGENCY, *NEWEST),
    "cost": (IncidentRow.impact_gpu_hours_per_hour, *NEWEST),
}
"""Keys of each order, all descending."""
ORDERS_MEAN: Final = (
    "newest, oldest: by onset; updated: newest change first; cost: most GPU-hours per hour first; "
    "urgency: open before acknowledged before resolved, and within each of these the most severe first"
)


class IncidentFilters:
    """The filters of a request. All must match; one that is given several times matches each of its values."""

    def __init__(
        self,
        context: Ctx,
        incident_id: Annotated[list[str] | None, Query(alias="id", description="Ids, full or short")] = None,
        job: Annotated[list[str] | None, Query()] = None,
        state: Annotated[list[State] | None, Query(description="unresolved: open and acknowledged")] = None,
        kind: Annotated[list[Kind] | None, Query()] = None,
        severity: Annotated[list[Severity] | None, Query()] = None,
        project: Projects = None,
        rank: Annotated[list[Rank] | None, Query(description="Those that name one of these ranks")] = None,
        host: Annotated[list[Host] | None, Query(description="Those that name one of these hosts")] = None,
        device: Annotated[list[Host] | None, Query(description="Those that name one of these devices, by UUID")] = None,
        attempt: Annotated[list[str] | None, Query(description="Those that began in one of these attempts")] = None,
        from_unix_ns: Time = None,
        to_unix_ns: Time = None,
        search: Annotated[
            str | None,
            Query(
                min_length=1,
                max_length=SEARCH_CHARS_MAX,
                pattern=NO_NUL,
                description="Text in the summary, id, kind, job, hosts or acknowledged_by; case does not matter",
            ),
        ] = None,
    ) -> None:
        """`from_unix_ns` and `to_unix_ns` are ends of a range that incidents overlap: those that were not yet resolved
        at its beginning and that began before its end.
        """
        self._sqlite = context.engine.dialect.name == "sqlite"
        self._ids = incident_id
        self._jobs = job
        self._states = _stored(state)
        self._kinds = kind
        self._severities = severity
        self._projects = project
        self._ranks = rank
        self._hosts = host
        self._devices = device
        self._attempts = attempt
        self._from, self._to = from_unix_ns, to_unix_ns
        self._search = search

    @property
    def purpose(self) -> str:
        """Names the filters, for cursors."""
        return str([value for name, value in sorted(vars(self).items())])

    def apply(self, query: Selected, identity: Identity) -> Selected:
        """Restrict a query of incidents to those that match and that the identity may see.

        Those of archived jobs match only if `job` names the job.
        """
        query = query.where(identity.jobs.clause(IncidentRow.job))
        if not self._jobs:
            archived = select(JobRow.name).where(JobRow.archived_unix_ns.is_not(None))
            query = query.where(IncidentRow.job.not_in(archived))
        if self._ids:
            query = query.where(id_is_any_of(IncidentRow, self._ids))
        query = any_of(query, IncidentRow.job, self._jobs)
        query = any_of(query, IncidentRow.state, self._states)
        query = any_of(query, IncidentRow.kind, self._kinds)
        query = any_of(query, IncidentRow.severity, self._severities)
        query = any_of(query, IncidentRow.attempt, self._attempts)
        if self._projects:
            query = query.where(
                IncidentRow.job.in_(select(JobProject.job).where(JobProject.project.in_(self._projects)))
            )
        if self._ranks:
            query = query.where(self._names(IncidentRow.ranks, [str(rank) for rank in self._ranks]))
        if self._hosts:
            query = query.where(self._names(IncidentRow.hosts, self._hosts))
        if self._devices:
            query = query.where(self._names(IncidentRow.devices, self._devices))
        if self._from is not None:
            query = query.where(IncidentRow.resolved_unix_ns.is_(None) | (IncidentRow.resolved_unix_ns >= self._from))
        if self._to is not None:
            query = query.where(IncidentRow.onset_unix_ns < self._to)
        if self._search:
            query = query.where(_contains(self._search))
        return query

    def _names(self, column: InstrumentedAttribute[list[Any]], wanted: Sequence[str]) -> ColumnElement[bool]:
        """Whether a JSON list has one of these texts or numbers."""
        elements = func.json_each(column) if self._sqlite else func.json_array_elements_text(column)
        listed = elements.table_valued("value", name="listed")
        return select(1).select_from(listed).where(cast(listed.c.value, Text).in_(wanted)).exists()


Filters = Annotated[IncidentFilters, Depends()]


def _contains(text: str) -> ColumnElement[bool]:
    columns = (IncidentRow.summary, IncidentRow.id, IncidentRow.kind, IncidentRow.job, IncidentRow.acknowledged_by)
    found = (column.icontains(text, autoescape=True) for column in columns)
    return or_(*found, cast(IncidentRow.hosts, Text).icontains(text, autoescape=True))


def _stored(wanted: list[State] | None) -> list[str] | None:
    """The states as stored, without `unresolved`."""
    if wanted is None or "unresolved" not in wanted:
        return None if wanted is None else [*wanted]
    return sorted({"open", "acknowledged", *wanted} - {"unresolved"})
