"""Which commands a list shows, and in which order."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from fastapi import Depends, Query
from sqlalchemy import Connection, Select, func

from rankwatch_service.access.identities import Identity
from rankwatch_service.api.dependencies.context import Ctx
from rankwatch_service.api.http.lookup import full_ids
from rankwatch_service.api.http.paging import Key, Time, any_of
from rankwatch_service.orders import commands
from rankwatch_service.policy.policy import Action
from rankwatch_service.store.models import Command, Incident

CommandOrder = Literal["newest", "oldest", "changed"]
CHANGED: Final = func.coalesce(Command.finished_unix_ns, Command.applied_unix_ns, Command.requested_unix_ns)
ORDERS: Final[dict[CommandOrder, tuple[Key, ...]]] = {
    "newest": (Command.requested_unix_ns, Command.id),
    "oldest": ((-Command.requested_unix_ns).label("oldest"), Command.id),
    "changed": (CHANGED.label("changed"), Command.id),
}
"""Keys of each order, all descending."""
ORDERS_MEAN: Final = "newest, oldest: by request; changed: requested, applied or finished last comes first"


class CommandFilters:
    """The filters of a request. All must match; one that is given several times matches each of its values."""

    def __init__(
        self,
        context: Ctx,
        job: Annotated[list[str] | None, Query()] = None,
        state: Annotated[list[str] | None, Query()] = None,
        incident: Annotated[list[str] | None, Query()] = None,
        waiting: Annotated[bool, Query(description="Only those that wait for an approval")] = False,
        action: Annotated[list[Action] | None, Query()] = None,
        attempt: Annotated[list[str] | None, Query()] = None,
        from_unix_ns: Time = None,
        to_unix_ns: Time = None,
    ) -> None:
        """`from_unix_ns` and `to_unix_ns` are ends of a range in which commands were requested."""
        self._now = context.clock.unix_ns
        self._incidents = incident
        self._waiting = waiting
        self._columns = {Command.job: job, Command.state: state, Command.action: action, Command.attempt: attempt}
        self._from, self._to = from_unix_ns, to_unix_ns
        self.purpose = str([job, state, incident, waiting, action, attempt, from_unix_ns, to_unix_ns])
        """Names the filters, for cursors."""

    def apply(self, query: Select[Any], connection: Connection, identity: Identity) -> Select[Any]:
        """Restrict a query of commands to those that match and that the identity may see.

        Raises:
            ProblemError: the id of an incident is a prefix of several.
        """
        query = query.where(identity.jobs.clause(Command.job))
        for column, values in self._columns.items():
            query = any_of(query, column, values)
        query = any_of(query, Command.incident_id, full_ids(connection, Incident, self._incidents, identity))
        if self._waiting:
            query = query.where(commands.waits_for_approval(self._now()))
        if self._from is not None:
            query = query.where(Command.requested_unix_ns >= self._from)
        if self._to is not None:
            query = query.where(Command.requested_unix_ns < self._to)
        return query


CommandFiltersDep = Annotated[CommandFilters, Depends()]
