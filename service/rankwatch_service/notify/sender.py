"""One try: POSTs one signed message to one receiver and says how that ended. Never raises for what a receiver does."""

from __future__ import annotations

import asyncio
import ssl
from typing import Final

import httpx2

from rankwatch_service.clock import Clock
from rankwatch_service.notify.address import AddressError, checked_url, resolved
from rankwatch_service.notify.schedule import Outcome, retry_after_s
from rankwatch_service.notify.sign import signed_headers

TRY_TIMEOUT_S: Final = 15.0
"""One try, from the name look-up to the answer's head."""


class Sender:
    """Sends messages. Use as an async context manager; may be used by many tasks at once.

    A connection serves one message: a kept one that the receiver closes at the wrong moment would leave it unknown
    whether the message arrived. Redirects are not followed, proxies of the environment are not used, and of the answer
    only the head is read.
    """

    def __init__(self, clock: Clock, allow_private: bool, timeout_s: float = TRY_TIMEOUT_S) -> None:
        self._clock = clock
        self._allow_private = allow_private
        self._timeout_s = timeout_s
        self._client = httpx2.AsyncClient(
            trust_env=False,
            follow_redirects=False,
            timeout=None,
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
        )

    async def __aenter__(self) -> Sender:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._client.aclose()

    async def send(self, url: str, secret: str, message_id: str, body: bytes) -> Outcome:
        """Try once to deliver a message."""
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
        return Outcome(status, error, self._clock.monotonic_s() - began_s, retry_s)

    async def _post(self, url: str, secret: str, message_id: str, body: bytes) -> tuple[int, str | None]:
        host, port = checked_url(url)
        addresses = await resolved(host, port, self._allow_private)
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
                # The certificate is checked against the name, though we connect to the address.
                extensions={"sni_hostname": host},
            )
            try:
                response = await self._client.send(request, stream=True)
            except httpx2.ConnectError:
                # Nothing was sent yet, so the name's next address may be tried.
                if position == len(addresses) - 1:
                    raise
                continue
            await response.aclose()
            return response.status_code, response.headers.get("retry-after")
        raise OSError(f"{host} has no address")


def _reason(error: BaseException) -> str:
    """The innermost cause, as one short line: the outer ones only say that something failed."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate refused: {error.verify_message}"
    return f"{type(error).__name__}: {error}"[:300]
