"""Inserts rows or updates those that exist: the same statement on both databases."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final

from sqlalchemy import Connection, inspect
from sqlalchemy.dialects import postgresql, sqlite

from rankwatch_service.store.models import Base

STATEMENTS_MAX: Final = 256
"""Statements kept, since building one takes longer than executing it. There are some twenty tables, of which few are
written with several sets of columns."""


def upsert(connection: Connection, table: type[Base], changed: Iterable[str] = ()) -> Any:
    """A statement that inserts rows, and in rows whose primary key exists sets only the columns `changed`.

    Columns of the key in `changed` are ignored. Without columns to change, a row that exists stays as it is, and the
    result's `rowcount` does not count it.
    """
    return _statement(connection.dialect.name, table, tuple(changed))


@lru_cache(STATEMENTS_MAX)
def _statement(dialect: str, table: type[Base], changed: tuple[str, ...]) -> Any:
    make = postgresql.insert if dialect == "postgresql" else sqlite.insert
    # Without this option, psycopg's count of inserted rows is lost before the caller reads it.
    statement: Any = make(table).execution_options(preserve_rowcount=True)
    keys = [column.name for column in inspect(table).primary_key]
    fresh = {name: statement.excluded[name] for name in changed if name not in keys}
    if not fresh:
        return statement.on_conflict_do_nothing(index_elements=keys)
    return statement.on_conflict_do_update(index_elements=keys, set_=fresh)
