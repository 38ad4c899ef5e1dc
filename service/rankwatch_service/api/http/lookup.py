"""Things by their id, or by the beginning of it: nobody types 24 digits."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Connection, or_, select
from sqlalchemy.orm import InstrumentedAttribute

from rankwatch_service.access.identities import Identity
from rankwatch_service.api.http.problem import ProblemError
from rankwatch_service.short_ids import TYPED_MIN, short, typed
from rankwatch_service.store.models import Command, Incident, Silence

PREFIXES: Final = {Incident: "inc_", Command: "cmd_", Silence: "sil_"}
NAMED_MAX: Final = 5
"""Ids named where a beginning is that of several."""


def full_id(connection: Connection, model: type[Incident | Command | Silence], given: str, identity: Identity) -> str:
    """The id that `given` is, or is the only one to begin with; else `given` as it is.

    Raises:
        ProblemError: several begin with it.
    """
    column: InstrumentedAttribute[Any] = model.id
    if connection.scalar(select(column).where(column == given)) is not None:
        return given
    begins = typed(given, PREFIXES[model])
    if len(begins) < len(PREFIXES[model]) + TYPED_MIN:
        return given
    found = select(column).where(or_(column == begins, column.startswith(begins, autoescape=True)))
    if identity.job:
        found = found.where(model.job == identity.job)
    ids = connection.scalars(found.order_by(column).limit(NAMED_MAX + 1)).all()
    if len(ids) > 1:
        told = ", ".join(short(one) if len(begins) < len(short(one)) else one for one in ids[:NAMED_MAX])
        raise ProblemError(409, f"several ids begin with {given!r}, give more of it: {told}")
    return ids[0] if ids else given
