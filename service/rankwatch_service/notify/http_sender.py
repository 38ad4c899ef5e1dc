"""Sends messages to receivers that are reached by HTTP: one try is one POST, made by the receiver's type."""

from __future__ import annotations

import asyncio
import ssl
from collections import OrderedDict
from typing import Final

import httpx2

from rankwatch_service.allow_list import AllowList
from rankwatch_service.clock import Clock
from rankwatch_service.notify.address import AddressError, checked_url, resolved
from rankwatch_service.notify.receiver_types.base import ReplyReading, SendContext, Target, WebRequest
from rankwatch_service.notify.receiver_types.message import OutgoingMessage
from rankwatch_service.notify.receiver_types.table import WEB_TYPES
from rankwatch_service.notify.sender import TryOutcome, retry_after_s

TRY_TIMEOUT_S: Final = 15.0
"""Time limit of one try, from the DNS look-up to the head of the response."""


THREADS_MAX: Final = 10_000
"""Conversations whose threads are remembered, 200 bytes each, by the process that delivers."""

ANSWER_BYTES_MAX: Final = 16 * 1024
"""Read of a response's body, where the type of receiver needs it; the rest is not read."""


class HttpSender:
    """Sends messages by HTTP. Use as an async context manager; many tasks may send at once.

    Each message has a connection of its own: if the receiver closed a reused connection at the wrong moment, we would
    not know whether the message arrived. Redirects and proxies of the environment are not followed, since they lead to
    addresses that were not checked.
    """

    def __init__(
        self, clock: Clock, private: AllowList, public_url: str = "", timeout_s: float = TRY_TIMEOUT_S
    ) -> None:
        """Send nothing yet.

        Args:
            clock: stamps and measures tries.
            private: loopback and private addresses that messages may go to.
            public_url: where people reach this service.
            timeout_s: time limit of one try.
        """
        self._clock = clock
        self._private = private
        self._public_url = public_url
        self._timeout_s = timeout_s
        self._threads: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._client = httpx2.AsyncClient(
            trust_env=False,
            follow_redirects=False,
            timeout=None,  # `send` limits the whole try
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
        )

    async def __aenter__(self) -> HttpSender:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._client.aclose()

    async def send(self, url: str, secret: str, message_id: str, body: bytes) -> TryOutcome:
        """See `MessageSender.send`."""
        began_s = self._clock.monotonic_s()
        target = Target.read(url)
        web = WEB_TYPES[target.type]
        status: int | None = None
        retry_s: float | None = None
        try:
            message = OutgoingMessage(message_id, body)
            conversation = (url, message.group_key)
            thread = self._threads.get(conversation, "")
            context = SendContext(target.url, secret, self._clock.unix_ns(), self._public_url, thread)
            request = web.request(message, context)
            async with asyncio.timeout(self._timeout_s):
                status, header, text = await self._post(request, reads_body=web.reads_body)
            retry_s = retry_after_s(header, self._clock.unix_ns() / 1e9)
            reading = web.read(status, text)
            if reading.thread:
                self._keep(conversation, thread or reading.thread)
        except TimeoutError:
            reading = ReplyReading(f"no answer within {self._timeout_s:g} s")
        except AddressError as refused:
            reading = ReplyReading(f"refused: {refused}")
        except ValueError as wrong:
            reading = ReplyReading(f"cannot be sent: {wrong}")
        except (httpx2.HTTPError, OSError) as failed:
            reading = ReplyReading(_reason(failed))
        seconds = self._clock.monotonic_s() - began_s
        return TryOutcome(status, reading.error, seconds, retry_s, is_final=reading.is_final)

    def _keep(self, conversation: tuple[str, str], thread: str) -> None:
        """Remember the thread of a conversation; without it the next message of its group begins another one."""
        self._threads[conversation] = thread
        self._threads.move_to_end(conversation)
        if len(self._threads) > THREADS_MAX:
            self._threads.popitem(last=False)

    async def _post(self, request: WebRequest, *, reads_body: bool) -> tuple[int, str | None, str]:
        host, port = checked_url(request.url)
        addresses = await resolved(host, port, self._private)
        target = httpx2.URL(request.url)
        headers = {
            "host": target.netloc.decode(),
            "user-agent": "rankwatch",
            "accept-encoding": "identity",
            **request.headers,
        }
        for position, address in enumerate(addresses):
            attempt = self._client.build_request(
                "POST",
                target.copy_with(host=address),
                headers=headers,
                content=request.body,
                # We connect to the address, but the certificate must match the name.
                extensions={"sni_hostname": host},
            )
            try:
                response = await self._client.send(attempt, stream=True)
            except httpx2.ConnectError:
                # Nothing has been sent yet, so the next address cannot make it twice.
                if position == len(addresses) - 1:
                    raise
                continue
            try:
                text = await _beginning(response) if reads_body else ""
            finally:
                await response.aclose()
            return response.status_code, response.headers.get("retry-after"), text
        raise OSError(f"{host} has no address")


async def _beginning(response: httpx2.Response) -> str:
    """The first `ANSWER_BYTES_MAX` bytes of a response's body as text."""
    found = b""
    async for chunk in response.aiter_raw():
        found += chunk
        if len(found) >= ANSWER_BYTES_MAX:
            break
    return found[:ANSWER_BYTES_MAX].decode(errors="replace")


def _reason(error: BaseException) -> str:
    """The innermost cause in one short line, because outer errors only say that something failed."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate refused: {error.verify_message}"
    return f"{type(error).__name__}: {error}"[:300]
