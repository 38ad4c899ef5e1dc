"""What routes read from a query and put into a reply: known parameters, pages, ids as people type them, numbers.

Numbers that JSON cannot express are the strings NaN, Inf and -Inf, never null.
"""

from __future__ import annotations

import hmac
import json
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from hashlib import sha256
from typing import Annotated, Any, Final, Generic, TypeVar, get_args, get_origin

from fastapi import Depends, Query, Request, params
from fastapi.dependencies.utils import get_flat_params
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field, PlainSerializer, WithJsonSchema
from sqlalchemy import ColumnElement, Connection, RowMapping, Select, and_, func, or_, select
from sqlalchemy.orm import InstrumentedAttribute
from sqlalchemy.sql.elements import KeyedColumnElement
from starlette.concurrency import run_in_threadpool

from rankwatch_service.access.identities import Identity
from rankwatch_service.api.http.problem import ProblemError
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.names import TYPED_MIN, short, typed
from rankwatch_service.numbers import as_json, plain
from rankwatch_service.store.models import Command, Incident, Silence

Number = Annotated[
    float,
    PlainSerializer(as_json),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string", "enum": ["NaN", "Inf", "-Inf"]}]}),
]

Contents = Annotated[dict[str, Any], PlainSerializer(plain, return_type=dict[str, Any])]
"""An object whose fields depend on what it is about."""


async def reject_unknown_parameters(request: Request) -> None:
    """Dependency of every API route.

    Raises:
        ProblemError: a parameter is unknown, or is repeated though the route takes one value.
    """
    route = request.scope.get("route")
    if request.query_params and isinstance(route, APIRoute):
        await run_in_threadpool(_reject_unknown_parameters, request, route)


def _reject_unknown_parameters(request: Request, route: APIRoute) -> None:
    fields = [field for field in get_flat_params(route.dependant) if isinstance(field.field_info, params.Query)]
    known = {field.alias for field in fields}
    unknown = sorted(set(request.query_params) - known)
    if unknown:
        errors = []
        for name in unknown:
            close = get_close_matches(name, known, 1)
            msg = f"unknown parameter; did you mean {close[0]!r}?" if close else "unknown parameter"
            errors.append({"loc": f"query.{name}", "msg": msg})
        raise ProblemError(422, f"unknown query parameters: {', '.join(unknown)}", errors=errors)
    singles = [field.alias for field in fields if not _takes_several(field.field_info.annotation)]
    twice = [name for name in singles if len(request.query_params.getlist(name)) > 1]
    if twice:
        raise ProblemError(422, f"query parameters given more than once: {', '.join(twice)}")


def _takes_several(annotation: Any) -> bool:
    return any(get_origin(one) is list for one in (annotation, *get_args(annotation)))


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


TAG_BYTES: Final = 12
CURSOR_CHARS_MAX: Final = 1_024


class CursorSigner:
    """Signs cursors with a key that all api processes of one database share."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def encode(self, list_name: str, position: Any) -> str:
        """Make the cursor of a position in one list; a position is any small JSON value."""
        content = json.dumps(position, separators=(",", ":")).encode()
        return urlsafe_b64encode(self._tag(list_name, content) + content).decode().rstrip("=")

    def decode(self, list_name: str, text: str) -> Any:
        """The position of a cursor of this list.

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
            position = cursors.decode(purpose, window.cursor)
        except ValueError as error:
            raise ProblemError(422, "the cursor does not belong to this list") from error
        query = query.where(_after(order, position))
    query = query.order_by(*(column.desc() for column in order)).limit(window.limit + 1)
    rows = connection.execute(query).mappings().all()
    shown = rows[: window.limit]
    last = [shown[-1][column.key] for column in order] if len(rows) > window.limit else None
    next_cursor = None if last is None else cursors.encode(purpose, last)
    return Page(items=[item(row) for row in shown], next_cursor=next_cursor, total=total)


def any_of(query: Selected, column: InstrumentedAttribute[Any], values: Sequence[Any] | None) -> Selected:
    """Add a filter to the query: rows with any of these values; all rows if there are none."""
    return query.where(column.in_(values)) if values else query


def _after(order: Sequence[Key], position: Sequence[Any]) -> ColumnElement[bool]:
    """Rows after `position`: a lexicographic comparison that both databases can answer with an index."""
    return or_(
        *(
            and_(*(order[i] == position[i] for i in range(depth)), order[depth] < position[depth])
            for depth in range(len(order))
        )
    )
