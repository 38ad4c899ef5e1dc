"""Requests of people are answered by a second api process, so that they do not delay agents.

A process has one interpreter: while it computes a heat map or a list of incidents, it accepts no telemetry. The api
process therefore does for all requests what is quick (token, budgets, turns, headers), answers agents itself, and
passes the others over a Unix socket to a second process, which answers them from the same database. While no second
process listens, the first answers everything.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

import msgspec
import structlog
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rankwatch_service.access.identities import Authenticator
from rankwatch_service.api.http.gate import is_relayed, presented_token, source_of
from rankwatch_service.api.http.problem import RETRY_AFTER_S, problem, unavailable
from rankwatch_service.store.errors import StoreError

BEGINS_WITHIN_S: Final = 360.0
"""How long an answer may take to begin: longer than the longest preview."""
_HEADER: Final = "x-rankwatch-relayed"
"""Request id, scheme and client's address, for the second process. One that a client sends is removed."""
_UNKNOWN: Final = "-"
_ALERTS: Final = b"x-rankwatch-alerts"
"""What has become of alerts, from the second process, as a JSON object: result to number."""
LIVE_PATH: Final = "/livez"
"""What the first process asks the second, without a token, to see that it answers."""
_LOOK_S: Final = 1.0
"""How often it is looked whether a client that waits has gone."""
_PIECE_BYTES: Final = 65_536
_HEAD_BYTES_MAX: Final = 65_536

_log = structlog.get_logger(__name__)


class PeopleRelay:
    """ASGI middleware of the first process, behind the gate."""

    def __init__(
        self,
        app: ASGIApp,
        socket: Path,
        authenticator: Authenticator,
        answered_here: Callable[[], None],
        count_alerts: Callable[[dict[str, int]], None],
    ) -> None:
        """Do no I/O.

        Args:
            app: answers what is not relayed, and everything while no second process listens.
            socket: where the second process listens.
            authenticator: that of the gate, which may know a token for a second longer than the second process does.
            answered_here: called for each request that the second process should have answered.
            count_alerts: called with what has become of alerts that it has received, since nobody asks for its metrics.
        """
        self._app = app
        self._socket = socket
        self._authenticator = authenticator
        self._answered_here = answered_here
        self._count_alerts = count_alerts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http" or scope["identity"] is None or not is_relayed(scope):
            await self._app(scope, receive, send)
            return
        try:
            reader, writer = await asyncio.open_unix_connection(self._socket, limit=_HEAD_BYTES_MAX)
        except OSError:
            self._answered_here()
            await self._app(scope, receive, send)
            return
        try:
            await self._relay(reader, writer, scope, receive, send)
        finally:
            writer.transport.abort()

    async def _relay(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, scope: Scope, receive: Receive, send: Send
    ) -> None:
        request_id, connection = scope["request_id"], scope.get("state", {}).get("connection")
        try:
            writer.write(_request(scope, await _body(receive)))
        except HTTPException as error:  # it is too long
            await problem(request_id, error.status_code, str(error.detail))(scope, receive, send)
            return
        try:
            status, headers = _head(await _whole_head(reader, lambda: connection is not None and connection.is_gone))
        except (
            OSError,
            EOFError,
            LookupError,
            ValueError,
            asyncio.LimitOverrunError,
        ):  # a write may have been done all the same
            detail = "the process that answers people has ended or stands still; try again"
            await problem(request_id, 503, detail, {"Retry-After": str(RETRY_AFTER_S)})(scope, receive, send)
            return
        if status == HTTPStatus.UNAUTHORIZED:
            await self._refuse(scope, receive, send)
            return
        is_chunked = (b"transfer-encoding", b"chunked") in headers
        kept = [field for field in headers if field[0] not in (b"connection", b"transfer-encoding", _ALERTS)]
        for _, results in (field for field in headers if field[0] == _ALERTS):
            self._count_alerts(msgspec.json.decode(results, type=dict[str, int]))
        await send({"type": "http.response.start", "status": status, "headers": kept})
        length = 0 if scope["method"] == "HEAD" else int(dict(headers).get(b"content-length", b"0"))
        try:
            async for piece in _chunks(reader) if is_chunked else _pieces(reader, length):
                if connection is not None and connection.is_gone:
                    return
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except (OSError, EOFError, ValueError) as error:
            _log.warning("answer_broken_off", path=scope["path"], request_id=request_id, why=repr(error))
            if connection is None:
                raise
            connection.cut_off()
            return
        await send({"type": "http.response.body", "body": b""})

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a token that has ended since the gate looked it up: whoever sends it does not guess."""
        token, _ = presented_token(Headers(scope=scope))
        self._authenticator.clear_cache()
        await run_in_threadpool(self._authenticator.authenticate, token)
        detail = self._authenticator.ended(token) or "the service refused the token"
        await problem(scope["request_id"], 401, detail, {"WWW-Authenticate": "Bearer"})(scope, receive, send)


async def _whole_head(reader: asyncio.StreamReader, is_gone: Callable[[], bool]) -> bytes:
    """The head of an answer.

    Raises:
        OSError, EOFError: it does not come in time, the client has gone, or the process has ended.
        asyncio.LimitOverrunError: it is too long.
    """
    head = asyncio.ensure_future(reader.readuntil(b"\r\n\r\n"))
    try:
        async with asyncio.timeout(BEGINS_WITHIN_S):
            while not (await asyncio.wait([head], timeout=_LOOK_S))[0]:
                if is_gone():
                    raise ConnectionAbortedError
            return head.result()
    finally:
        head.cancel()


async def _pieces(reader: asyncio.StreamReader, length: int) -> AsyncIterator[bytes]:
    """A body of so many bytes; EOFError if it breaks off."""
    while length:
        piece = await reader.read(min(length, _PIECE_BYTES))
        if not piece:
            raise EOFError
        length -= len(piece)
        yield piece


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """A chunked body; EOFError if it breaks off."""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _body(receive: Receive) -> bytes:
    pieces, more = list[bytes](), True
    while more:
        message = await receive()
        pieces.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(pieces)


def _request(scope: Scope, body: bytes) -> bytes:
    query = scope["query_string"]
    target = scope["raw_path"] + (b"?" + query if query else b"")
    relayed = f"{scope['request_id']} {scope['scheme']} {quote(source_of(scope) or _UNKNOWN)}".encode()
    ours = {b"connection", b"content-length", b"transfer-encoding", b"expect", _HEADER.encode()}
    lines = [
        scope["method"].encode() + b" " + target + b" HTTP/1.1",
        *(name + b": " + value for name, value in scope["headers"] if name not in ours),
        b"content-length: %d" % len(body),
        b"connection: close",
        _HEADER.encode() + b": " + relayed,
    ]
    return b"\r\n".join([*lines, b"", body])


def _head(text: bytes) -> tuple[int, list[tuple[bytes, bytes]]]:
    first, *lines = text[:-4].split(b"\r\n")
    fields = [line.partition(b":") for line in lines]
    return int(first.split(b" ", 2)[1]), [(name.lower(), value.strip()) for name, _, value in fields]


class Relayed:
    """ASGI middleware of the second process: finds again what the gate of the first has found."""

    def __init__(self, app: ASGIApp, authenticator: Authenticator) -> None:
        """Do no I/O."""
        self._app = app
        self._authenticator = authenticator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http" and scope["path"] != LIVE_PATH:
            headers = Headers(scope=scope)
            scope["request_id"], scope["scheme"], source = headers[_HEADER].split(" ")
            scope["client"] = None if source == _UNKNOWN else (unquote(source), 0)
            token, by_cookie = presented_token(headers)
            try:
                found = self._authenticator.cached(token)
                found = found or await run_in_threadpool(self._authenticator.authenticate, token)
            except StoreError:
                await unavailable(scope["request_id"])(scope, receive, send)
                return
            if found is None:  # it has ended since the gate looked it up, which says why
                await problem(scope["request_id"], 401, "the service refused the token")(scope, receive, send)
                return
            scope["identity"] = replace(found, by_cookie=by_cookie)
        await self._app(scope, receive, _with_alerts(scope, send))


def _with_alerts(scope: Scope, send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start" and "alerts" in scope:
            message["headers"] = [*message["headers"], (_ALERTS, msgspec.json.encode(scope["alerts"]))]
        await send(message)

    return sent
