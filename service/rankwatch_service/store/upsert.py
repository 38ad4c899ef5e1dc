"""Insert, or change what is there: the same statement on both databases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, inspect
from sqlalchemy.dialects import postgresql, sqlite

from rankwatch_service.store.models import Base


def upsert(connection: Connection, table: type[Base], changed: Iterable[str] = ()) -> Any:
    """A statement that inserts rows; where a row's primary key is there already only the columns `changed` are set,
    of which the key's own are passed over.

    With no columns to change a row that is there stays as it is, and the result's `rowcount` does not count it.
    """
    make = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    # Without being asked psycopg's count of inserted rows is gone when the result is looked at.
    statement: Any = make(table).execution_options(preserve_rowcount=True)
    keys = [column.name for column in inspect(table).primary_key]
    fresh = {name: statement.excluded[name] for name in changed if name not in keys}
    if not fresh:
        return statement.on_conflict_do_nothing(index_elements=keys)
    return statement.on_conflict_do_update(index_elements=keys, set_=fresh)
