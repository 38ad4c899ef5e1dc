"""Pages of lists. They continue after a key, not at an offset, so new rows do not shift the next page.

Cursors are opaque and signed: one that was changed, or that belongs to another list, is refused.
"""

from __future__ import annotations

import hmac
import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Annotated, Any, Final, Generic, TypeVar

from fastapi import Depends, Query
from pydantic import BaseModel, Field
from sqlalchemy import ColumnElement, Connection, RowMapping, Select, and_, func, or_
from sqlalchemy.orm import InstrumentedAttribute
from sqlalchemy.sql.elements import KeyedColumnElement

from rankwatch_service.api.http.problem import ProblemError
from rankwatch_service.api.reply import ApiReply

TAG_BYTES: Final = 12
CURSOR_CHARS_MAX: Final = 1_024


class CursorSigner:
    """Signs cursors with a key that all api processes of one database share."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def encode(self, list_name: str, place: Any) -> str:
        """Make the cursor of a place, which is any small JSON value, in one list."""
        content = json.dumps(place, separators=(",", ":")).encode()
        return urlsafe_b64encode(self._tag(list_name, content) + content).decode().rstrip("=")

    def decode(self, list_name: str, text: str) -> Any:
        """The place that a cursor of this list stands for.

        Raises:
            ValueError: it is malformed, was changed, or belongs to another list.
        """
        if len(text) > CURSOR_CHARS_MAX or not text.isascii():
            raise ValueError("not a cursor of this list")
        signed = urlsafe_b64decode(text + "=" * (-len(text) % 4))
        tag, content = signed[:TAG_BYTES], signed[TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(list_name, content)):
            raise ValueError("not a cursor of this list")
        return json.loads(content)

    def _tag(self, list_name: str, content: bytes) -> bytes:
        return hmac.new(self._key, list_name.encode() + b"\0" + content, sha256).digest()[:TAG_BYTES]


LIMIT_DEFAULT: Final = 50
LIMIT_MAX: Final = 500

Item = TypeVar("Item", bound=BaseModel)
Selected = TypeVar("Selected", bound=Select[*tuple[Any, ...]])
Key = InstrumentedAttribute[Any] | KeyedColumnElement[Any]
"""Orders a list: a column, one of a subquery, or a labelled expression of the query."""


class Page(ApiReply, Generic[Item]):
    """One page of a list. The last page has no `next_cursor`. `total` is the length of the whole list; only the first
    page of incidents and jobs has it.
    """

    items: list[Item]
    next_cursor: str | None = None
    total: int | None = None


class Window(BaseModel):
    """Which page to return."""

    limit: int
    cursor: str | None


def _window(
    limit: Annotated[int, Query(ge=1, le=LIMIT_MAX)] = LIMIT_DEFAULT,
    cursor: Annotated[str | None, Query(description="next_cursor of the previous page")] = None,
) -> Window:
    return Window(limit=limit, cursor=cursor)


Wanted = Annotated[Window, Depends(_window)]
Time = Annotated[int | None, Query(ge=0, lt=2**63, description="Nanoseconds since the Unix epoch")]
Projects = Annotated[list[Annotated[str, Field(min_length=1)]] | None, Query()]
"""Projects to which a list is restricted."""


def fetch_page(
    connection: Connection,
    query: Select[Any],
    order: Sequence[Key],
    window: Window,
    cursors: CursorSigner,
    purpose: str,
    item: Callable[[RowMapping], Item],
    *,
    counted: bool = False,
) -> Page[Item]:
    """Read one page, newest first.

    Args:
        connection: of a read transaction.
        query: selects the whole list, columns of `order` included.
        order: keys of the list, all descending; together they must be unique.
        window: which page.
        cursors: sign the cursor.
        purpose: names the list and its filters; a cursor of another list is refused.
        item: converts a row to an item.
        counted: whether the first page has a `total`.

    Raises:
        ProblemError: the cursor does not belong to this list.
    """
    total = None
    if counted and window.cursor is None:
        total = connection.scalar(query.with_only_columns(func.count(), maintain_column_froms=True))
    if window.cursor is not None:
        try:
            place = cursors.decode(purpose, window.cursor)
        except ValueError as error:
            raise ProblemError(422, "the cursor does not belong to this list") from error
        query = query.where(_after(order, place))
    query = query.order_by(*(column.desc() for column in order)).limit(window.limit + 1)
    rows = connection.execute(query).mappings().all()
    shown = rows[: window.limit]
    last = [shown[-1][column.key] for column in order] if len(rows) > window.limit else None
    next_cursor = None if last is None else cursors.encode(purpose, last)
    return Page(items=[item(row) for row in shown], next_cursor=next_cursor, total=total)


def any_of(query: Selected, column: InstrumentedAttribute[Any], values: Sequence[Any] | None) -> Selected:
    """Add a filter to the query: rows with any of these values; all rows if there are none."""
    return query.where(column.in_(values)) if values else query


def _after(order: Sequence[Key], place: Sequence[Any]) -> ColumnElement[bool]:
    """Rows after `place`: a lexicographic comparison that both databases can answer with an index."""
    return or_(
        *(
            and_(*(order[i] == place[i] for i in range(depth)), order[depth] < place[depth])
            for depth in range(len(order))
        )
    )
