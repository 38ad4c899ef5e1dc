"""Ids of rows: new ones, and look-up by a unique prefix, since people do not type 24 digits."""

from __future__ import annotations

import secrets
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, or_, select
from sqlalchemy.orm import InstrumentedAttribute

from rankwatch_service.access.identities import Identity
from rankwatch_service.api.http.problem import ProblemError
from rankwatch_service.short_ids import TYPED_MIN, short, typed
from rankwatch_service.store.models import Command, Incident, Silence

PREFIXES: Final = {Incident: "inc_", Command: "cmd_", Silence: "sil_"}
ID_BYTES: Final = 12
"""24 digits, as many as ids have that follow from what they name."""
NAMED_MAX: Final = 5
"""Most ids listed in the refusal of an ambiguous prefix."""


def new_id(model: type[Command | Silence]) -> str:
    """A random id for a new row."""
    return PREFIXES[model] + secrets.token_hex(ID_BYTES)


def full_id(connection: Connection, model: type[Incident | Command | Silence], given: str, identity: Identity) -> str:
    """The id that `given` is or is a unique prefix of; `given` itself if there is none.

    Raises:
        ProblemError: it is a prefix of several ids.
    """
    column: InstrumentedAttribute[Any] = model.id
    if connection.scalar(select(column).where(column == given)) is not None:
        return given
    prefix = typed(given, PREFIXES[model])
    if len(prefix) < len(PREFIXES[model]) + TYPED_MIN:
        return given
    query = select(column).where(or_(column == prefix, column.startswith(prefix, autoescape=True)))
    query = query.where(identity.jobs.clause(model.job))
    ids = connection.scalars(query.order_by(column).limit(NAMED_MAX + 1)).all()
    if len(ids) > 1:
        matches = ", ".join(short(one) if len(prefix) < len(short(one)) else one for one in ids[:NAMED_MAX])
        raise ProblemError(409, f"several ids begin with {given!r}; type more digits: {matches}")
    return ids[0] if ids else given


def full_ids(
    connection: Connection, model: type[Incident | Command], given: list[str] | None, identity: Identity
) -> list[str] | None:
    """The `full_id` of each; None for a filter that was not given."""
    return given and [full_id(connection, model, one, identity) for one in given]


def id_is_any_of(model: type[Incident | Command], given: list[str]) -> ColumnElement[bool]:
    """Whether an id is one of those given, or begins with one of them. It looks nothing up."""
    prefix = PREFIXES[model]
    some_digits = range(len(prefix) + TYPED_MIN, len(prefix) + 2 * ID_BYTES)
    parts = [part for one in given if len(part := typed(one, prefix)) in some_digits]
    return or_(model.id.in_(given), *(model.id.startswith(part, autoescape=True) for part in parts))
