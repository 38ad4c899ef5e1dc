"""One HTTP connection to the service: requests with a kept connection, and the command stream.

Every wait has a time-out and every answer a size limit. A channel belongs to one thread.
"""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from rankwatch.agent.endpoint import Endpoint
from rankwatch.trust import doubt

REQUEST_TIMEOUT_S: Final = 10.0
"""How long a request waits for a service that accepts connections and never answers; the spool fills meanwhile."""
STREAM_SILENCE_S: Final = 25.0
"""The api sends something at least every 10 s; after two and a half times that the stream counts as dead."""
ANSWER_BYTES_MAX: Final = 1024 * 1024
"""Largest answer: the orders of one job, about 300 bytes each, and a job has few at once."""
LINE_BYTES_MAX: Final = ANSWER_BYTES_MAX


class Unreachable(Exception):  # noqa: N818 - a fact about the network, not a mistake
    """The service did not answer, or its answer cannot be read. Always worth a retry."""


class Unconfigured(Unreachable):
    """No service is configured, its configuration is invalid, or what answers is not the service."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The service's answer to one request."""

    status: int
    body: bytes
    retry_after_s: float | None


class Channel:
    """A connection to the service, opened when first needed and again after a failure."""

    def __init__(self, endpoint: Endpoint, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        """Connect with the first request.

        Raises:
            ValueError: the file of trusted authorities cannot be used.
        """
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._connection: http.client.HTTPConnection | None = None
        parts = urlsplit(endpoint.url)
        self._path = parts.path
        self._tls = endpoint.trust.context() if parts.scheme == "https" else None

    def post(self, path: str, body: bytes, content_type: str) -> Reply:
        """POST one body and read the answer.

        Raises:
            Unreachable: the service did not answer, or its answer cannot be read.
            Unconfigured: the service did not prove itself, and was sent nothing.
        """
        reused = self._connection is not None
        try:
            return self._post(path, body, content_type)
        except ssl.SSLCertVerificationError as error:
            self.close()
            raise Unconfigured(doubt(self._endpoint.url, error)) from error
        except (ConnectionError, http.client.RemoteDisconnected) as error:
            self.close()
            if not reused:
                raise Unreachable(str(error)) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            raise Unreachable(f"{type(error).__name__}: {error}") from error
        # The server may close an idle connection at any time, so one failure on a reused one is no failure of the
        # service: try again on a new one. A repeat is harmless, since every message has a number.
        return self.post(path, body, content_type)

    def stream(self, path: str) -> Iterator[tuple[str, str]]:
        """GET a server-sent event stream and yield (event, data) until it ends.

        Raises:
            Unreachable: the service did not answer, or sent nothing for `STREAM_SILENCE_S`.
            Unconfigured: the service did not prove itself, and was sent nothing.
        """
        self.close()
        connection = self._open(STREAM_SILENCE_S)
        try:
            connection.request("GET", self._path + path, headers=self._headers({"Accept": "text/event-stream"}))
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise Unreachable(f"status {response.status}")
            yield from _events(response)
        except ssl.SSLCertVerificationError as error:
            raise Unconfigured(doubt(self._endpoint.url, error)) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unreachable(f"{type(error).__name__}: {error}") from error
        finally:
            self.close()

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _post(self, path: str, body: bytes, content_type: str) -> Reply:
        connection = self._connection or self._open(self._timeout_s)
        connection.request("POST", self._path + path, body, self._headers({"Content-Type": content_type}))
        response = connection.getresponse()
        answer = response.read(ANSWER_BYTES_MAX + 1)
        if len(answer) > ANSWER_BYTES_MAX:
            raise http.client.HTTPException(f"an answer of more than {ANSWER_BYTES_MAX} bytes")
        if response.length:
            raise http.client.IncompleteRead(answer, response.length)
        if response.will_close:
            self.close()
        return Reply(response.status, answer, _seconds(response.headers.get("Retry-After")))

    def _open(self, timeout_s: float) -> http.client.HTTPConnection:
        parts = urlsplit(self._endpoint.url)
        host = parts.hostname or ""
        if self._tls is None:
            self._connection = http.client.HTTPConnection(host, parts.port, timeout=timeout_s)
        else:
            self._connection = http.client.HTTPSConnection(host, parts.port, timeout=timeout_s, context=self._tls)
        return self._connection

    def _headers(self, more: dict[str, str]) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._endpoint.token}", **more}


def _events(response: http.client.HTTPResponse) -> Iterator[tuple[str, str]]:
    event, data = "message", list[str]()
    size = 0
    while line := response.readline(LINE_BYTES_MAX + 1):
        size += len(line)
        if size > LINE_BYTES_MAX:
            raise http.client.HTTPException(f"an event of more than {LINE_BYTES_MAX} bytes")
        text = line.decode("utf-8").rstrip("\r\n")
        if not text:
            if data:
                yield event, "\n".join(data)
            event, data, size = "message", [], 0
        elif text.startswith("event:"):
            event = text[6:].strip()
        elif text.startswith("data:"):
            data.append(text[5:].removeprefix(" "))


def _seconds(retry_after: str | None) -> float | None:
    """Seconds of a Retry-After header; a date counts as absent, since the service never sends one."""
    return float(retry_after) if retry_after is not None and retry_after.isdecimal() else None
