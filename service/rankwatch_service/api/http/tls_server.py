"""uvicorn's server, with TLS of our own.

To uvicorn a connection begins when its handshake is over. Here it counts, and has a time, as soon as it is accepted.
Each handshake shows the certificate that is then in force.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Final

import uvicorn

from rankwatch_service.api.http.connection import ClientConnection, Connections

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
