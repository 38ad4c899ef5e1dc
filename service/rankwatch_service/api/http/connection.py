"""Limits of one connection and of all together, below the application, and uvicorn's server with TLS of our own.

Against heads without end, slow senders, slow readers and crowds. A connection counts in `Budgets` for its address until
a request on it had a valid token, and for that token from then on; behind a trusted proxy for the client of its newest
request. Where all are taken, whoever holds most loses the oldest that waits for its client: for a request, or for its
reader. So a newcomer always has the time to show its token.

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
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from rankwatch_service.access.budgets import (
    BODIES,
    CONNECTIONS,
    CONNECTIONS_MAX,
    PART,
    UNREAD,
    Account,
    Budgets,
    account_at,
)
from rankwatch_service.api.http.arrivals import WAITING_MAX, AcceptedSocket, Arrivals
from rankwatch_service.clock import SystemClock

HEAD_BYTES_MAX: Final = 65_536
HEADERS_MAX: Final = 100
HEAD_S: Final = 10.0
"""Limit from the connection, or the first byte of a further request, to the end of its headers. TLS included."""
BODY_S: Final = 60.0
"""Limit from there to the end of the body: 8 MB at 140 KB/s."""
ANSWER_S: Final = 10.0
"""Within each such time a client takes `TAKEN_BYTES_MIN` of what waits for it, or all of it."""
TAKEN_BYTES_MIN: Final = 16_384
FILES_KEPT: Final = 512
"""Descriptors for the database, the log, the libraries, requests that the second process answers, and connections that
are closing."""
WRITE_BUFFER_BYTES: Final = 65_536
"""Of an answer that the client does not read; asyncio's default over TLS is eight times as much. From here on the
answer counts as unread."""
CLOSING_MAX: Final = 128
"""Connections beyond the limit that get an answer with the reason and are not closed yet; further ones are cut off."""
SWEEP_S: Final = 1.0
"""How often each connection is looked at."""
SWEPT_TOGETHER: Final = 256
"""So many are looked at at once, so that no request waits for all of them."""
RETRY_AFTER_S: Final = 5


class HeadSizeError(Exception):
    """The head of a request exceeds `HEAD_BYTES_MAX` or `HEADERS_MAX`."""


class Connections:
    """All connections of this process. For the thread of the event loop only."""

    def __init__(self, count: Callable[[str], None], budgets: Budgets) -> None:
        """Raise the limit of open files as far as allowed, and share no more connections than it leaves.

        Args:
            count: called with the reason of each connection that is refused or closed.
            budgets: whose connections and unread answers these are.
        """
        self._count = count
        self._budgets = budgets
        self._all: set[ClientConnection] = set()
        self._closing: set[ClientConnection] = set()
        self._sweeping = False
        self._most = _connections_max()
        self.arrivals = Arrivals(SystemClock(), -(-self._most * WAITING_MAX // CONNECTIONS_MAX))
        budgets.shrink(CONNECTIONS, self._most)

    def protocol(self, **how: Any) -> ClientConnection:
        """A protocol for one connection, as `uvicorn.Config(http=...)` calls it."""
        return ClientConnection(self, **how)

    def add(self, one: ClientConnection) -> None:
        """A connection was made."""
        if not self._sweeping:
            self._sweeping = True
            self._sweep()
        self._all.add(one)
        gone = self._budgets.reserve(CONNECTIONS, one.account, one)
        if gone is one:
            self.refuse(one, "full", 503, "the service has no room for another connection")
        elif gone is not None:
            self.refuse(gone, "crowded", 503, "this connection made room for those of others")

    def charge(self, one: ClientConnection) -> bool:
        """A connection counts for another account from now on; False: that one has no room, or it is gone already."""
        is_here = one in self._all and one not in self._closing
        gone = self._budgets.reserve(CONNECTIONS, one.account, one) if is_here else one
        if gone is None and one.has_place:
            one.has_place = False
            self.arrivals.give_back()
        elif gone is not None and gone is not one:
            self.refuse(gone, "crowded", 503, "this connection made room for those of others")
        return gone is not one

    def unread(self, one: ClientConnection) -> None:
        """An answer waits for its reader."""
        gone = self._budgets.reserve(UNREAD, one.account, one)
        if gone is not None:
            self.refuse(gone, "unread", 503, "too many answers wait for their readers")

    def is_read(self, one: ClientConnection) -> None:
        """Note that the client has received what waited."""
        self._budgets.release(UNREAD, one)

    def receive(self, one: ClientConnection) -> bool:
        """A large body is about to come; False: this account has its part of them, so the request should be refused."""
        gone = self._budgets.reserve(BODIES, one.account, one)
        if gone is not None and gone is not one:
            self.refuse(gone, "bodies", 503, "too many large bodies are being received; try again")
        return gone is not one

    def is_received(self, one: ClientConnection) -> None:
        """Its body is worked on, or gone."""
        self._budgets.release(BODIES, one)

    def remove(self, one: ClientConnection) -> None:
        """A connection was lost."""
        self._all.discard(one)
        self._closing.discard(one)
        self._release(one)

    def _release(self, one: ClientConnection) -> None:
        for limit in (CONNECTIONS, UNREAD, BODIES):
            self._budgets.release(limit, one)

    def fail(self, one: ClientConnection) -> None:
        """A handshake failed, or the client went away in the middle of it."""
        self._count("handshake")
        self.remove(one)

    def turn_away(self, accepted: socket.socket) -> None:
        """Close a connection that has waited to begin, for newer ones."""
        self._count("waiting")
        accepted.close()

    def refuse(self, one: ClientConnection, reason: str, status: int, detail: str) -> None:
        """Answer, if an answer can still be sent, and close the connection. It counts for nobody any more."""
        self._count(reason)
        self._release(one)
        self._closing.add(one)
        if len(self._all) > self._most + CLOSING_MAX:
            one.cut_off()
        else:
            one.close_with(status, detail)

    def _sweep(self) -> None:
        loop, everyone = asyncio.get_running_loop(), list(self._all)
        loop.call_later(SWEEP_S, self._sweep)
        for begin in range(0, len(everyone), SWEPT_TOGETHER):
            loop.call_later(SWEEP_S * begin / len(everyone), self._look_at, everyone[begin : begin + SWEPT_TOGETHER])

    def _look_at(self, some: Sequence[ClientConnection]) -> None:
        """Close those that are too slow, a few at a time."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        slow = [one for one in some if one.deadline_s < now_s]
        untaken = [one for one in some if one.is_read_too_slowly()]
        for begin in range(0, max(len(slow), len(untaken)), CLOSED_TOGETHER):
            together = slice(begin, begin + CLOSED_TOGETHER)
            loop.call_later(begin * CLOSE_EVERY_S / CLOSED_TOGETHER, self._close, slow[together], untaken[together])

    def _close(self, slow: Sequence[ClientConnection], untaken: Sequence[ClientConnection]) -> None:
        """Close those of these that are still too slow."""
        now_s = asyncio.get_running_loop().time()
        for one in slow:
            if one.deadline_s < now_s and one in self._all:
                what = "head" if one.in_head else "body"
                self.refuse(one, f"slow_{what}", 408, f"the {what} of the request took too long")
        for one in untaken:
            if one in self._all:
                self.refuse(one, "slow_answer", 408, "the answer was not read")


def _nothing() -> None:
    """End a connection that has not begun, or is lost."""


class ClientConnection(HttpToolsProtocol):
    """One connection. uvicorn parses and answers; this limits what is parsed, and how long it may take."""

    def __init__(self, guard: Connections, **how: Any) -> None:
        super().__init__(**how)
        self._guard = guard
        self._head_bytes = 0
        self._too_large = False
        self._has_begun = False
        self._answering: RequestResponseCycle | None = None
        self._is_lost = False
        self._most_waiting = 0
        """Bytes that waited for the client at most since it last took some."""
        self._untaken = 0
        """Sweeps since then."""
        self.abort: Callable[[], object] = _nothing
        self.is_open = False
        """Whether requests can come: over TLS, the handshake is over."""
        self.in_head = True
        self.account = account_at("")
        """For which it counts."""
        self.has_place = True
        """Whether it holds a place in the pace of `arrivals`: there was no room for its token yet."""
        self.deadline_s = float("inf")
        """When what is awaited must be there, by the event loop's clock; infinite between requests."""

    @property
    def is_idle(self) -> bool:
        """Whether it waits for its client: for a request or the rest of one, or for the reader of an answer."""
        return (
            self.deadline_s < float("inf")
            or self.cycle is None
            or self.cycle.response_complete
            or self._waiting_bytes() > 0
        )

    @property
    def is_gone(self) -> bool:
        """Whether nobody waits for an answer any more."""
        return self._is_lost or (self._answering is not None and self._answering.disconnected)

    def _waiting_bytes(self) -> int:
        """Bytes of an answer that the client has not received."""
        if not self.is_open or (self.scheme == "https" and self.transport.is_closing()):
            return 0  # over TLS, a client has `CLOSE_S` then
        try:
            return self.transport.get_write_buffer_size()
        except RuntimeError:
            return 0  # uvloop has closed it, and says so in the next round of the loop

    def is_read_too_slowly(self) -> bool:
        """Whether the client has received too little within `ANSWER_S`; called once in `SWEEP_S`."""
        waiting = self._waiting_bytes()
        if not waiting or self._most_waiting - waiting >= TAKEN_BYTES_MIN:
            self._most_waiting, self._untaken = waiting, 0
        else:
            self._most_waiting, self._untaken = max(self._most_waiting, waiting), self._untaken + 1
        return self._untaken * SWEEP_S > ANSWER_S

    def begin(self, address: str, abort: Callable[[], object]) -> None:
        """A client has connected.

        Args:
            address: of the client.
            abort: ends the connection as long as it is not open.
        """
        self.account, self.abort = account_at(address), abort
        self._has_begun = True
        self.deadline_s = self.loop.time() + HEAD_S
        self._guard.add(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Requests can come: a client has connected, or its handshake is over."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self.is_open, self.abort = True, transport.abort
        if not self._has_begun:
            self.begin(self.client[0] if self.client else "", transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._guard.remove(self)
        super().connection_lost(exc)
        self._is_lost = True
        # A request refers to its connection. Without the way back, both are freed without a garbage collection.
        self.abort = _nothing
        self._answering = self.cycle = self.scope = None  # type: ignore[assignment]

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

    def pause_writing(self) -> None:
        """More than `WRITE_BUFFER_BYTES` wait for the client."""
        super().pause_writing()
        self._guard.unread(self)

    def resume_writing(self) -> None:
        """The client has received nearly all of the bytes."""
        super().resume_writing()
        self._most_waiting = self._untaken = 0
        self._guard.is_read(self)

    def charge(self, account: Account) -> bool:
        """Count for this account, whose request this is; False: there is no room, so the request should be refused."""
        if account == self.account:
            return True
        self.account = account
        return self._guard.charge(self)

    def receive_large(self) -> bool:
        """A large body is about to come; False: there is no room, so the request should be refused."""
        return self._guard.receive(self)

    def is_received(self) -> None:
        """The body is worked on, or gone."""
        self._guard.is_received(self)

    def cut_off(self) -> None:
        """End the connection at once. What a request still answers goes nowhere."""
        if self._answering is not None:
            self._answering.disconnected = True
        self.abort()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle  # `self.cycle` is the newest request, which may wait for this one
        super()._start_asgi_task(cycle, app)

    def close_with(self, status: int, detail: str) -> None:
        """Close the connection, with a problem as the answer unless another answer has begun."""
        self.deadline_s = float("inf")
        if not self.is_open or self.transport.is_closing() or self._waiting_bytes():
            self.cut_off()  # what would be written would not be read
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
    """`CONNECTIONS_MAX`, or as many as there are file descriptors for, beside those that wait to begin."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS_MAX + WAITING_MAX + FILES_KEPT
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return CONNECTIONS_MAX
    room = (soft - FILES_KEPT) * CONNECTIONS_MAX // (CONNECTIONS_MAX + WAITING_MAX)
    return max(min(CONNECTIONS_MAX, room), PART)


CLOSED_TOGETHER: Final = 32
CLOSE_EVERY_S: Final = 0.01
"""So many slow connections are closed at once, and as many after this time: others are answered between."""
CLOSE_S: Final = 2.0
"""How long a client may take to agree to the end of a connection."""
ACCEPT_AGAIN_S: Final = 1.0
"""Pause after a connection could not be accepted, since descriptors or memory are short."""


class TlsServer(uvicorn.Server):
    """Begins one connection at a time, at a pace, so that who connects without a pause delays no requests of others."""

    def __init__(
        self, config: uvicorn.Config, connections: Connections, tls: Callable[[], ssl.SSLContext] | None
    ) -> None:
        """Do no I/O.

        Args:
            config: whose `http` is `connections.protocol`.
            connections: limits them.
            tls: how the next connection is secured; None: connections are plain http.
        """
        super().__init__(config)
        self._connections = connections
        self._tls = tls
        self._arrived = asyncio.Event()
        self._accepting: Sequence[asyncio.Task[None]] = ()
        self._handshakes: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        [listener] = sockets or [self.config.bind_socket()]
        listener.listen(self.config.backlog)
        listener.setblocking(False)
        await super().startup([])  # the application alone
        loop = asyncio.get_running_loop()
        self._accepting = loop.create_task(self._accept(listener)), loop.create_task(self._begin_all())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, and end what is open."""
        for task in (*self._accepting, *self._handshakes):
            task.cancel()
        self._connections.arrivals.close()
        await super().shutdown(sockets)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    accepted, peer = await loop.sock_accept(listener)
                except OSError:
                    await asyncio.sleep(ACCEPT_AGAIN_S)
                    continue
                arrival = AcceptedSocket(accepted, peer[0])
                if self._connections.arrivals or self._connections.arrivals.wait_s():
                    if gone := self._connections.arrivals.add(arrival):
                        self._connections.turn_away(gone.accepted)
                    self._arrived.set()
                else:
                    self._begin(arrival)
                await asyncio.sleep(0)

    async def _begin_all(self) -> None:
        """Begin connections that had to wait, when they may."""
        while True:
            while arrival := self._connections.arrivals.next():
                if arrival.is_gone():
                    arrival.accepted.close()
                else:
                    self._begin(arrival)
                    await asyncio.sleep(0)
            self._arrived.clear()
            if self._connections.arrivals:
                await asyncio.sleep(self._connections.arrivals.wait_s())
            else:
                await self._arrived.wait()

    def _begin(self, arrival: AcceptedSocket) -> None:
        one: ClientConnection = self.config.http_protocol_class(  # type: ignore[call-arg,assignment]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        opening = _open(one, arrival.accepted, self._tls() if self._tls else None)
        task = asyncio.get_running_loop().create_task(opening)
        self._handshakes.add(task)
        task.add_done_callback(partial(self._shaken, one, arrival.accepted))
        self._connections.arrivals.begin()
        one.begin(arrival.address, task.cancel)

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


async def _open(one: ClientConnection, accepted: socket.socket, context: ssl.SSLContext | None) -> None:
    within_s = CLOSE_S if context else None
    with contextlib.suppress(OSError):  # ssl.SSLError is one
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await one.loop.connect_accepted_socket(lambda: one, accepted, ssl=context, ssl_shutdown_timeout=within_s)
