"""One connection to the service: requests over a persistent connection, and the command stream.

Every wait has a time-out and every answer a size limit. After each failure the service's address and token are looked
up again. A connection belongs to one thread.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from rankwatch.agent.endpoint import Endpoint
from rankwatch.trust import explain_tls_error

REQUEST_TIMEOUT_S: Final = 10.0
"""How long a request waits for a service that accepts connections and never answers; the spool fills meanwhile."""
STREAM_SILENCE_S: Final = 25.0
"""The api sends something at least every 10 s; after two and a half times that the stream counts as dead."""
ANSWER_BYTES_MAX: Final = 1024 * 1024
"""Largest answer: the orders of one job, about 300 bytes each, and a job has few at once."""
LINE_BYTES_MAX: Final = ANSWER_BYTES_MAX
MSGPACK: Final = "application/msgpack"
FOR_A_PERSON: Final = frozenset((401, 403, 404, 421))
"""Statuses that a person must fix; waiting alone does not help."""

FindEndpoint = Callable[[], Endpoint | None]


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


class ServiceConnection:
    """A connection to the service, opened when first needed and again after a failure."""

    def __init__(self, find: FindEndpoint, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        """Connect with the first request.

        Args:
            find: looks up the service's address and token; called before the first request and after each failure.
            timeout_s: how long a request waits for an answer.
        """
        self._find = find
        self._timeout_s = timeout_s
        self._endpoint: Endpoint | None = None
        """The endpoint of the last request."""
        self._is_found = False
        """Whether nothing has failed since the endpoint was looked up."""
        self._tls: ssl.SSLContext | None = None
        self._connection: http.client.HTTPConnection | None = None

    @property
    def url(self) -> str:
        """Base URL of the service that was called last."""
        return self._endpoint.url if self._endpoint is not None else ""

    @property
    def enrolment_key(self) -> bytes:
        """The enrolment key in its token; empty if it has none."""
        return self._endpoint.trust.enrolment_key if self._endpoint is not None else b""

    def is_provable(self) -> bool:
        """Whether the service can prove to be the one that issued the token: by its certificate or the enrolment key.

        Raises:
            Unreachable: no service is configured.
        """
        endpoint = self._found()
        return endpoint.url.startswith("https:") or bool(endpoint.trust.enrolment_key)

    def post(self, path: str, body: bytes, content_type: str = MSGPACK) -> Reply:
        """POST one body and read the answer.

        Raises:
            Unreachable: the service did not answer, or its answer cannot be read.
            Unconfigured: no service is configured, or it did not prove itself, and was sent nothing.
        """
        endpoint = self._found()
        reused = self._connection is not None
        try:
            reply = self._post(endpoint, path, body, content_type)
        except ConnectionError as error:
            if not reused:
                self.close()
                raise Unreachable(str(error)) from error
            # The server may close an idle connection at any time, so one failure on a reused one is no failure of the
            # service: try again on a new one. A repeat is harmless, since every message has a number.
            self._hang_up()
            return self.post(path, body, content_type)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            raise _reason(endpoint, error) from error
        if reply.status in FOR_A_PERSON:
            self.close()  # the next request reads address and token anew: a person may have changed them
        return reply

    def stream(self, path: str) -> Iterator[tuple[str, str]]:
        """GET a server-sent event stream and yield (event, data) until it ends.

        Raises:
            Unreachable: the service did not answer, or sent nothing for `STREAM_SILENCE_S`.
            Unconfigured: no service is configured, or it did not prove itself, and was sent nothing.
        """
        endpoint = self._found()
        self._hang_up()
        try:
            connection = self._open(endpoint, STREAM_SILENCE_S)
            headers = _headers(endpoint, {"Accept": "text/event-stream"})
            connection.request("GET", urlsplit(endpoint.url).path + path, headers=headers)
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise Unreachable(f"status {response.status}")
            yield from _events(response)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _reason(endpoint, error) from error
        finally:
            self.close()

    def is_as_before(self) -> bool:
        """Whether the service's address and the token are still those of the last request."""
        try:
            return self._find() == self._endpoint
        except (ValueError, OSError):
            return False

    def close(self) -> None:
        """Close the connection; the next request looks up the service and opens a new one."""
        self._hang_up()
        self._is_found = False

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _found(self) -> Endpoint:
        if self._is_found and self._endpoint is not None:
            return self._endpoint
        try:
            endpoint = self._find()
            if endpoint is None:
                raise Unconfigured("no service is configured: start `rankwatch up` here, or set RANKWATCH_URL")
            self._tls = endpoint.trust.context() if urlsplit(endpoint.url).scheme == "https" else None
        except (ValueError, OSError) as error:
            raise Unconfigured(str(error)) from error
        self._endpoint, self._is_found = endpoint, True
        return endpoint

    def _post(self, endpoint: Endpoint, path: str, body: bytes, content_type: str) -> Reply:
        connection = self._connection or self._open(endpoint, self._timeout_s)
        headers = _headers(endpoint, {"Content-Type": content_type})
        connection.request("POST", urlsplit(endpoint.url).path + path, body, headers)
        response = connection.getresponse()
        answer = response.read(ANSWER_BYTES_MAX + 1)
        if len(answer) > ANSWER_BYTES_MAX:
            raise http.client.HTTPException(f"an answer of more than {ANSWER_BYTES_MAX} bytes")
        if response.length:
            raise http.client.IncompleteRead(answer, response.length)
        if response.will_close:
            self._hang_up()
        return Reply(response.status, answer, _seconds(response.headers.get("Retry-After")))

    def _open(self, endpoint: Endpoint, timeout_s: float) -> http.client.HTTPConnection:
        parts = urlsplit(endpoint.url)
        host = parts.hostname or ""
        if self._tls is None:
            self._connection = http.client.HTTPConnection(host, parts.port, timeout=timeout_s)
        else:
            self._connection = http.client.HTTPSConnection(host, parts.port, timeout=timeout_s, context=self._tls)
        return self._connection


def detail(answer: Reply) -> str:
    """The `detail` of a problem response."""
    try:
        return str(json.loads(answer.body)["detail"])
    except (ValueError, TypeError, KeyError):
        return "no reason given"


def _reason(endpoint: Endpoint, error: Exception) -> Unreachable:
    if isinstance(error, ssl.SSLCertVerificationError):
        return Unconfigured(explain_tls_error(endpoint.url, error))
    return Unreachable(f"{type(error).__name__}: {error}")


def _headers(endpoint: Endpoint, more: dict[str, str]) -> dict[str, str]:
    return {"Authorization": f"Bearer {endpoint.token}", **more}


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
