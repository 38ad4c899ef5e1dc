"""Sends webhooks: one try is one signed POST."""

from __future__ import annotations

import asyncio
import ssl
from typing import Final

import httpx2

from rankwatch_service.allow_list import AllowList
from rankwatch_service.clock import Clock
from rankwatch_service.notify.address import AddressError, checked_url, resolved
from rankwatch_service.notify.retry import retry_after_s
from rankwatch_service.notify.sender import TryOutcome
from rankwatch_service.notify.signature import signed_headers

TRY_TIMEOUT_S: Final = 15.0
"""Time limit of one try, from the DNS look-up to the head of the response."""


class WebhookSender:
    """Sends messages to webhooks. Use as an async context manager; many tasks may send at once.

    Each message has a connection of its own: if the receiver closed a reused connection at the wrong moment, we would
    not know whether the message arrived. Redirects and proxies of the environment are not followed, since they lead to
    addresses that were not checked, and only the head of the response is read.
    """

    def __init__(self, clock: Clock, private: AllowList, timeout_s: float = TRY_TIMEOUT_S) -> None:
        self._clock = clock
        self._private = private
        self._timeout_s = timeout_s
        self._client = httpx2.AsyncClient(
            trust_env=False,
            follow_redirects=False,
            timeout=None,  # `send` limits the whole try
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
        )

    async def __aenter__(self) -> WebhookSender:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._client.aclose()

    async def send(self, url: str, secret: str, message_id: str, body: bytes) -> TryOutcome:
        """See `MessageSender.send`."""
        began_s = self._clock.monotonic_s()
        status: int | None = None
        retry_s: float | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                status, header = await self._post(url, secret, message_id, body)
            retry_s = retry_after_s(header, self._clock.unix_ns() / 1e9)
            error = "" if 200 <= status < 300 else f"answered {status}"
        except TimeoutError:
            error = f"no answer within {self._timeout_s:g} s"
        except AddressError as refused:
            error = f"refused: {refused}"
        except ValueError as wrong:
            error = f"cannot be sent: {wrong}"
        except (httpx2.HTTPError, OSError) as failed:
            error = _reason(failed)
        return TryOutcome(status, error, self._clock.monotonic_s() - began_s, retry_s)

    async def _post(self, url: str, secret: str, message_id: str, body: bytes) -> tuple[int, str | None]:
        host, port = checked_url(url)
        addresses = await resolved(host, port, self._private)
        target = httpx2.URL(url)
        headers = {
            "host": target.netloc.decode(),
            "content-type": "application/json",
            "user-agent": "rankwatch",
            **signed_headers(secret, message_id, self._clock.unix_ns() // 1_000_000_000, body),
        }
        for position, address in enumerate(addresses):
            request = self._client.build_request(
                "POST",
                target.copy_with(host=address),
                headers=headers,
                content=body,
                # We connect to the address, but the certificate must match the name.
                extensions={"sni_hostname": host},
            )
            try:
                response = await self._client.send(request, stream=True)
            except httpx2.ConnectError:
                # Nothing has been sent yet, so the next address cannot make it twice.
                if position == len(addresses) - 1:
                    raise
                continue
            await response.aclose()
            return response.status_code, response.headers.get("retry-after")
        raise OSError(f"{host} has no address")


def _reason(error: BaseException) -> str:
    """The innermost cause in one short line, because outer errors only say that something failed."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate refused: {error.verify_message}"
    return f"{type(error).__name__}: {error}"[:300]
