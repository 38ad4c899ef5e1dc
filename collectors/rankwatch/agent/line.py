"""A line to the service: a channel that looks up the service's address and token again after each failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from rankwatch.agent.channel import Channel, Reply, Unconfigured, Unreachable
from rankwatch.agent.endpoint import Endpoint

MSGPACK: Final = "application/msgpack"
FOR_A_PERSON: Final = frozenset((401, 403, 404, 421))
"""Statuses that a person must fix; waiting alone does not help."""

FindEndpoint = Callable[[], Endpoint | None]


class Line:
    """A channel to the service; after each failure it looks up the service's address and token again."""

    def __init__(self, find: FindEndpoint, timeout_s: float | None = None) -> None:
        self._find = find
        self._timeout_s = timeout_s
        self._channel: Channel | None = None
        self._endpoint: Endpoint | None = None
        self.url = ""
        """Base URL of the service that was called last."""
        self.enrolment_key = b""
        """That its token has; empty if it has none."""

    def post(self, path: str, body: bytes, content_type: str = MSGPACK) -> Reply:
        """POST a body.

        Raises:
            Unreachable: no service is configured, it did not prove itself, or it did not answer.
        """
        try:
            answer = self._open().post(path, body, content_type)
        except Unreachable:
            self.close()
            raise
        if answer.status in FOR_A_PERSON:
            self.close()  # the next request reads address and token anew: a person may have changed them
        return answer

    def stream(self, path: str) -> Iterator[tuple[str, str]]:
        """GET an event stream.

        Raises:
            Unreachable: no service is configured, it did not prove itself, or it did not answer or fell silent.
        """
        try:
            yield from self._open().stream(path)
        finally:
            self.close()

    def is_as_before(self) -> bool:
        """Whether the service's address and the token are still those of the last request."""
        try:
            return self._find() == self._endpoint
        except (ValueError, OSError):
            return False

    def close(self) -> None:
        """Close the channel."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _open(self) -> Channel:
        if self._channel is None:
            try:
                endpoint = self._find()
                if endpoint is None:
                    raise Unconfigured("no service is configured: start `rankwatch up` here, or set RANKWATCH_URL")
                self._channel = Channel(endpoint) if self._timeout_s is None else Channel(endpoint, self._timeout_s)
            except (ValueError, OSError) as error:
                raise Unconfigured(str(error)) from error
            self._endpoint = endpoint
            self.url, self.enrolment_key = endpoint.url, endpoint.trust.enrolment_key
        return self._channel


def detail(answer: Reply) -> str:
    """The `detail` of a problem response."""
    try:
        return str(msgspec.json.decode(answer.body)["detail"])
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError, KeyError):
        return "no reason given"
