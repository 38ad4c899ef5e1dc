"""Sends a synthetic job's batches over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import httpx2

from rankwatch.trust import Trust, doubt, split_token
from rankwatch_service.simulate.live.send import NotYetError, RefusedError

TIMEOUT_S: Final = 30.0
NEVER_TAKEN: Final = frozenset((400, 401, 403, 404, 413, 415, 422))
"""Statuses that no retry changes while URL and token stay the same."""


class HttpConnection:
    """`POST /api/v1/telemetry`, over one persistent connection."""

    def __init__(self, url: str, token: str, trust: Trust) -> None:
        """Connect with the first batch.

        Args:
            url: of the service.
            token: as it was issued.
            trust: what the service has to prove before anything is sent.

        Raises:
            ValueError: no batch can be sent to this URL, or with this token.
        """
        try:
            httpx2.URL(url)
        except httpx2.InvalidURL as error:
            raise ValueError(f"{url!r} is not the URL of a service: {error}") from error
        trust.check(url)
        token = split_token(token).token
        if not (token.isascii() and token.isprintable()):
            raise ValueError("the token is not valid: it has characters that are not printable ASCII")
        headers = {"Content-Type": "application/msgpack"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._url = url
        verify = trust.context() if url.startswith("https:") else True
        self._client = httpx2.Client(base_url=url, headers=headers, timeout=TIMEOUT_S, verify=verify, trust_env=False)

    def send(self, job: str, bodies: Sequence[bytes]) -> None:  # noqa: ARG002 - a batch names its job
        """Send batches one after the other; see `send.ServiceConnection`."""
        for body in bodies:
            self._post(body)

    def _post(self, body: bytes) -> None:
        try:
            answer = self._client.post("/api/v1/telemetry", content=body)
        except httpx2.TransportError as error:
            if why := doubt(self._url, error):
                raise RefusedError(why) from error
            raise NotYetError(f"{self._client.base_url}: {type(error).__name__}: {error}") from error
        if answer.is_success:
            return
        message = f"{answer.url}: {answer.status_code} {answer.text[:300]}"
        if answer.status_code in NEVER_TAKEN:
            raise RefusedError(message)
        after = answer.headers.get("Retry-After", "")
        raise NotYetError(message, float(after) if after.isdecimal() else 0.0)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()
