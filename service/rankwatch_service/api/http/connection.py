"""Limits of one connection and of all together, below the application, and uvicorn's server with TLS of our own.

Against heads without end, slow senders and crowds. A connection is anonymous until a request on it had a valid token.
If too many are, the oldest that waits for nothing is
closed in favour of the newest: half-open connections never finish a request, so whoever has a token gets one in. An
established connection with a token is never closed for others.

To uvicorn a connection begins when its handshake is over. Here it counts, and has a time, as soon as it is accepted.
Each handshake shows the certificate that is then in force.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import ssl
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rankwatch_service.access.budgets import CONNECTIONS_MAX
from rankwatch_service.api.http.gate import TrustedProxies

HEAD_BYTES_MAX: Final = 65_536
HEADERS_MAX: Final = 100
HEAD_S: Final = 10.0
"""From the connection, or the first byte of a further request, to the end of its headers. TLS included."""
BODY_S: Final = 60.0
"""From there to the end of the body: 8 MB at 140 KB/s."""
RESERVED: Final = 2_048
"""Of these, for connections with a token."""
ANONYMOUS_PER_ADDRESS_MAX: Final = 256
"""Does not hold for trusted proxies, whose connections are those of many clients."""
FILES_KEPT: Final = 256
"""Descriptors for the database, the log and the libraries."""
WRITE_BUFFER_BYTES: Final = 65_536
"""Of an answer that the client does not read; asyncio's default over TLS is eight times as much."""
SWEEP_S: Final = 1.0
RETRY_AFTER_S: Final = 5


class HeadSizeError(Exception):
    """The head of a request exceeds `HEAD_BYTES_MAX` or `HEADERS_MAX`."""


class Connections:
    """All connections of this process. For the thread of the event loop only."""

    def __init__(self, count: Callable[[str], None], proxies: TrustedProxies) -> None:
        """Raise the limit of open files as far as allowed.

        Args:
            count: called with the reason of each connection that is refused or closed.
            proxies: exempt from `ANONYMOUS_PER_ADDRESS_MAX`.
        """
        self._count = count
        self._proxies = proxies
        self._all: set[ClientConnection] = set()
        self._anonymous: dict[ClientConnection, None] = {}
        """Oldest first."""
        self._by_address: dict[str, dict[ClientConnection, None]] = {}
        self._sweeping = False
        self._max = _connections_max()

    def protocol(self, **how: Any) -> ClientConnection:
        """A protocol for one connection, as `uvicorn.Config(http=...)` calls it."""
        return ClientConnection(self, **how)

    def add(self, one: ClientConnection) -> None:
        """A connection was made."""
        if not self._sweeping:
            self._sweeping = True
            self._sweep()
        if len(self._all) >= self._max:
            self.refuse(one, "full", 503, "the service has no room for another connection")
            return
        self._all.add(one)
        self._anonymous[one] = None
        if one.address not in self._proxies:
            neighbours = self._by_address.setdefault(one.address, {})
            neighbours[one] = None
            if len(neighbours) > ANONYMOUS_PER_ADDRESS_MAX:
                self._make_room(neighbours)
        if len(self._anonymous) > max(self._max - RESERVED, 1):
            self._make_room(self._anonymous)

    def authenticated(self, one: ClientConnection) -> None:
        """A request on this connection had a valid token."""
        if one in self._anonymous:
            del self._anonymous[one]
            neighbours = self._by_address.get(one.address, {})
            neighbours.pop(one, None)
            if not neighbours:
                self._by_address.pop(one.address, None)

    def remove(self, one: ClientConnection) -> None:
        """A connection was lost."""
        self._all.discard(one)
        self.authenticated(one)

    def fail(self, one: ClientConnection) -> None:
        """A handshake failed, or the client went away in the middle of it."""
        self._count("handshake")
        self.remove(one)

    def refuse(self, one: ClientConnection, reason: str, status: int, detail: str) -> None:
        """Answer, if an answer can still be sent, and close the connection."""
        self._count(reason)
        one.close_with(status, detail)

    def _make_room(self, anonymous: dict[ClientConnection, None]) -> None:
        """Close the oldest that is not being answered; the newest, which is last, if all others are."""
        oldest = next(one for one in anonymous if one.is_idle)
        self.authenticated(oldest)
        self.refuse(oldest, "crowded", 503, "too many connections without a valid token")

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        for one in [one for one in self._all if one.deadline_s < now_s]:
            what = "head" if one.in_head else "body"
            self.refuse(one, f"slow_{what}", 408, f"the {what} of the request took too long")
        loop.call_later(SWEEP_S, self._sweep)


class ClientConnection(HttpToolsProtocol):
    """One connection. uvicorn parses and answers; this limits what is parsed, and how long it may take."""

    def __init__(self, guard: Connections, **how: Any) -> None:
        super().__init__(**how)
        self._guard = guard
        self._head_bytes = 0
        self._too_large = False
        self._abort: Callable[[], object] = lambda: None
        self.is_open = False
        """Whether requests can come: over TLS, the handshake is over."""
        self.in_head = True
        self.address = ""
        self.deadline_s = float("inf")
        """When what is awaited must be there, by the event loop's clock; infinite between requests."""

    @property
    def is_idle(self) -> bool:
        """Whether no request on it is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def begin(self, address: str, abort: Callable[[], object]) -> None:
        """A client has connected.

        Args:
            address: of the client.
            abort: ends the connection as long as it is not open.
        """
        self.address, self._abort = address, abort
        self.deadline_s = self.loop.time() + HEAD_S
        self._guard.add(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Requests can come: a client has connected, or its handshake is over."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self.is_open = True
        if not self.address:
            self.begin(self.client[0] if self.client else "", transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._guard.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes came: parse them, unless a head goes on for too long."""
        if self.transport.is_closing():
            return
        began_in_head = self.in_head
        super().data_received(data)
        # The parser passes a header on once it is complete, so what it still holds is counted here.
        self._head_bytes += len(data) if began_in_head else 0
        if self.in_head and self._head_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            self._guard.refuse(self, "large_head", 431, _too_large())

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self.scope["state"]["connection"] = self
        self.in_head, self._head_bytes = True, 0
        self.deadline_s = self.loop.time() + HEAD_S

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header is complete."""
        super().on_header(name, value)
        if len(self.headers) > HEADERS_MAX or len(name) + len(value) > HEAD_BYTES_MAX:
            self._too_large = True
            raise HeadSizeError

    def on_headers_complete(self) -> None:
        """The head is complete, and the application is called."""
        self.in_head = False
        self.deadline_s = self.loop.time() + BODY_S
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request is complete."""
        self.deadline_s = float("inf")
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """The parser gave up: the request is malformed, or its head too large."""
        if self._too_large:
            self._guard.refuse(self, "large_head", 431, _too_large())
        else:
            self._guard.refuse(self, "malformed", 400, msg)

    def authenticated(self) -> None:
        """The request had a valid token."""
        self._guard.authenticated(self)

    def close_with(self, status: int, detail: str) -> None:
        """Close the connection, with a problem as the answer unless another answer has begun."""
        self.deadline_s = float("inf")
        if not self.is_open:
            self._abort()
            return
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            phrase = HTTPStatus(status).phrase
            fields = {"type": "about:blank", "title": phrase, "status": status, "detail": detail}
            body = json.dumps(fields).encode()
            retry = f"retry-after: {RETRY_AFTER_S}\r\n" if status == HTTPStatus.SERVICE_UNAVAILABLE else ""
            head = (
                f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/problem+json\r\n"
                f"content-length: {len(body)}\r\n{retry}connection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()


def _too_large() -> str:
    return f"the head of a request may have {HEADERS_MAX} headers and {HEAD_BYTES_MAX} bytes"


def _connections_max() -> int:
    """`CONNECTIONS_MAX`, or as many as there are file descriptors for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS_MAX + FILES_KEPT
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return CONNECTIONS_MAX if soft == resource.RLIM_INFINITY else min(CONNECTIONS_MAX, soft - FILES_KEPT)


CLOSE_S: Final = 2.0
"""How long a client may take to agree to the end of a connection."""
ACCEPT_AGAIN_S: Final = 1.0
"""Pause after a connection could not be accepted, since descriptors or memory are short."""


class TlsServer(uvicorn.Server):
    """Serves plain http without a context for TLS."""

    def __init__(
        self, config: uvicorn.Config, connections: Connections, tls: Callable[[], ssl.SSLContext] | None
    ) -> None:
        """Do no I/O.

        Args:
            config: whose `http` is `connections.protocol`.
            connections: limits them.
            tls: how the next connection is secured; None: connections are plain.
        """
        super().__init__(config)
        self._connections = connections
        self._tls = tls
        self._accepting: asyncio.Task[None] | None = None
        self._handshakes: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        if self._tls is None:
            await super().startup(sockets)
            return
        [listener] = sockets or [self.config.bind_socket()]
        listener.listen(self.config.backlog)
        listener.setblocking(False)
        await super().startup([])  # the application alone
        self._accepting = asyncio.get_running_loop().create_task(self._accept(listener, self._tls))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, and end what is open."""
        for task in [*self._handshakes, *([self._accepting] if self._accepting else [])]:
            task.cancel()
        await super().shutdown(sockets)

    async def _accept(self, listener: socket.socket, tls: Callable[[], ssl.SSLContext]) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    accepted, peer = await loop.sock_accept(listener)
                except OSError:
                    await asyncio.sleep(ACCEPT_AGAIN_S)
                    continue
                one: ClientConnection = self.config.http_protocol_class(  # type: ignore[call-arg,assignment]
                    config=self.config, server_state=self.server_state, app_state=self.lifespan.state
                )
                task = loop.create_task(_shake_hands(one, accepted, tls()))
                self._handshakes.add(task)
                task.add_done_callback(partial(self._shaken, one, accepted))
                one.begin(peer[0], task.cancel)

    def _shaken(self, one: ClientConnection, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        """A handshake has ended; if it failed, so has the connection."""
        self._handshakes.discard(task)
        if one.is_open:
            return
        accepted.close()
        if task.cancelled():
            self._connections.remove(one)
        else:
            self._connections.fail(one)


async def _shake_hands(one: ClientConnection, accepted: socket.socket, context: ssl.SSLContext) -> None:
    with contextlib.suppress(OSError):  # ssl.SSLError is one
        await one.loop.connect_accepted_socket(lambda: one, accepted, ssl=context, ssl_shutdown_timeout=CLOSE_S)
