"""Insert, or change what is there: the same statement on both databases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, inspect
from sqlalchemy.dialects import postgresql, sqlite

from rankwatch_service.store.models import Base


def upsert(connection: Connection, table: type[Base], changed: Iterable[str] = ()) -> Any:
    """A statement that inserts rows; where a row's primary key is there already only the columns `changed` are set.

    With no columns to change a row that is there stays as it is.
    """
    make = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    statement: Any = make(table)
    keys = list(inspect(table).primary_key)
    fresh = {name: statement.excluded[name] for name in changed}
    if not fresh:
        return statement.on_conflict_do_nothing(index_elements=keys)
    return statement.on_conflict_do_update(index_elements=keys, set_=fresh)
