"""Lists: `{items, next_cursor}` by key, never by offset, so that a page does not shift under its reader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Generic, TypeVar

from fastapi import Depends, Query
from pydantic import BaseModel
from sqlalchemy import ColumnElement, Connection, RowMapping, Select, and_, or_
from sqlalchemy.orm import InstrumentedAttribute

from rankwatch_service.api.problem import ProblemError
from rankwatch_service.api.sealed import Seal

LIMIT_DEFAULT: Final = 50
LIMIT_MAX: Final = 500

Item = TypeVar("Item", bound=BaseModel)


class Page(BaseModel, Generic[Item]):
    """One page of a list. Without `next_cursor` it is the last."""

    items: list[Item]
    next_cursor: str | None = None


class Window(BaseModel):
    """Which page is wanted."""

    limit: int
    cursor: str | None


def _window(
    limit: Annotated[int, Query(ge=1, le=LIMIT_MAX)] = LIMIT_DEFAULT,
    cursor: Annotated[str | None, Query(description="next_cursor of the page before")] = None,
) -> Window:
    return Window(limit=limit, cursor=cursor)


Wanted = Annotated[Window, Depends(_window)]


def fetch_page(
    connection: Connection,
    query: Select[Any],
    order: Sequence[InstrumentedAttribute[Any]],
    window: Window,
    seal: Seal,
    purpose: str,
    item: Callable[[RowMapping], Item],
) -> Page[Item]:
    """Read one page, newest first.

    Args:
        connection: of a read.
        query: selects the whole list, columns of `order` included.
        order: columns that order it, descending, the last of them unique within the list.
        window: which page.
        seal: signs the cursor.
        purpose: names the list and its filters: a cursor of another list is refused.
        item: makes an item of a row.

    Raises:
        ProblemError: the cursor is not one that this list handed out.
    """
    if window.cursor is not None:
        try:
            place = seal.open(purpose, window.cursor)
        except ValueError as error:
            raise ProblemError(422, "the cursor is not one of this list's") from error
        query = query.where(_after(order, place))
    query = query.order_by(*(column.desc() for column in order)).limit(window.limit + 1)
    rows = connection.execute(query).mappings().all()
    shown = rows[: window.limit]
    last = [shown[-1][column.key] for column in order] if len(rows) > window.limit else None
    return Page(items=[item(row) for row in shown], next_cursor=None if last is None else seal.close(purpose, last))


def _after(order: Sequence[InstrumentedAttribute[Any]], place: Sequence[Any]) -> ColumnElement[bool]:
    """Rows after `place`: a lexicographic comparison that both databases can answer from an index."""
    return or_(
        *(
            and_(*(order[i] == place[i] for i in range(depth)), order[depth] < place[depth])
            for depth in range(len(order))
        )
    )
