"""Requests to the REST API over the standard library's HTTP client.

Which service to use, and with which token.

Arguments come before the environment, before the file of `rankwatch login`, before the file of `rankwatch up`.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPMessage, HTTPResponse, HTTPSConnection, IncompleteRead
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from rankwatch.agent.endpoint import configuration_path
from rankwatch.trust import Trust, explain_tls_error, split_token, trust_of

URL_DEFAULT: Final = "http://127.0.0.1:8770"

CONFIG_NAME: Final = "client.json"
"""In the user's configuration folder: {"url": …, "token": …}, mode 0600, written by `rankwatch login`."""


@dataclass(frozen=True, slots=True)
class ServiceEndpoint:
    """A service, its token, and what it has to prove before it gets the token; an empty text means none."""

    url: str
    token: str
    """As it was issued: it may end with a pin."""
    trust: Trust = field(default_factory=Trust)


@dataclass(frozen=True, slots=True)
class Places:
    """The files that may name a service; they need not exist."""

    login: Path
    """Written by `rankwatch login`."""
    local: Path
    """Written by `rankwatch up`, with its database."""


def user_places(environment: Mapping[str, str]) -> Places:
    """The files of this user."""
    anywhere = {name: value for name, value in environment.items() if name != "RANKWATCH_INGEST_CONFIG"}
    login = configuration_path(anywhere).with_name(CONFIG_NAME)
    return Places(login, configuration_path(environment).with_name("local.json"))


def find_endpoint(
    url: str | None, token: str | None, environment: Mapping[str, str], places: Places
) -> ServiceEndpoint:
    """Choose the service and the token.

    A token is used only with the URL from the same source, or if that source has no URL: the token of one service is
    never sent to another.

    Raises:
        ValueError: a file cannot be read or is malformed, or the token ends with something that is no pin.
    """
    sources: tuple[Mapping[str, Any], ...] = (
        {"url": url or "", "token": token or ""},
        {"url": environment.get("RANKWATCH_URL", ""), "token": environment.get("RANKWATCH_TOKEN", "")},
        stored(places.login, "login"),
        stored(places.local, "up"),
    )
    chosen_url = next((one["url"] for one in sources if one.get("url")), URL_DEFAULT).rstrip("/")
    theirs = (one for one in sources if one.get("token") and one["url"].rstrip("/") in ("", chosen_url))
    chosen = next(theirs, {"token": ""})
    certificate, insecure = str(chosen.get("certificate", "")), chosen.get("insecure") is True
    trust = trust_of(chosen["token"], environment, certificate, insecure=insecure)
    return ServiceEndpoint(chosen_url, chosen["token"], trust)


def stored(config: Path, writer: str) -> dict[str, Any]:
    """The content of a file that names a service; empty if it does not exist.

    Raises:
        ValueError: it cannot be read or is malformed.
    """
    try:
        content = json.loads(config.read_text())
        return {**content, "url": str(content["url"]), "token": str(content["token"])}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{config} cannot be read ({error}); run `rankwatch {writer}` to write it again") from error


TIMEOUT_S: Final = 15.0
LONG_S: Final = 330.0
"""For an export or a preview: the service gives up on these before."""

SILENT_S: Final = 45.0
"""After so long without an event or a comment, which comes every 15 s, a stream of events is taken for broken."""

TRIES: Final = 3
"""Tries of a request whose connection is lost before the reply."""

RETRY_S: Final = 1.0
"""Pause before a request whose connection was lost is sent again."""

RECONNECT_S: Final = 2.0
"""Pause before a stream of events that ended is opened again."""

CHUNK: Final = 65_536


class RestError(Exception):
    """The service refuses a request, or does not answer."""

    def __init__(self, status: int, title: str, detail: str, remedy: str = "") -> None:
        """Arguments are kept as attributes.

        Args:
            status: HTTP status; 0 if there was no reply.
            title: of the problem, the same for each problem of its type.
            detail: what is wrong with this request, and mostly what to do.
            remedy: what to do next, where `detail` does not say it.
        """
        text = f"{detail} ({status})" if status else detail
        super().__init__(f"{text}; {remedy}" if remedy else text)
        self.status = status
        self.title = title
        self.detail = detail
        self.remedy = remedy


class RestReply(NamedTuple):
    """What the service answered."""

    status: int
    reason: str
    headers: HTTPMessage
    """By name; upper and lower case are equal."""
    content: bytes

    def json(self, url: str) -> dict[str, Any]:
        """The content; empty if there is none.

        Raises:
            RestError: it is no JSON object, so that another program answers at this URL.
        """
        try:
            return msgspec.json.decode(self.content or b"{}", type=dict[str, Any])
        except msgspec.MsgspecError:
            raise RestError(0, "not rankwatch", f"what answers at {url} is not rankwatch: name another URL") from None


class ServiceEvent(NamedTuple):
    """One event of the feed of changes."""

    topic: str
    """What has changed; `hello` at the start of a stream, `reset` if changes have been missed."""
    id: int
    """The id after which to resume."""
    data: dict[str, Any]


class RestConnection:
    """Requests to one service with one token.

    Scripts send few requests, so connections are not kept, and there is nothing to close. Threads may share it.
    """

    def __init__(self, endpoint: ServiceEndpoint, timeout_s: float = TIMEOUT_S) -> None:
        """Connect with the first request.

        Args:
            endpoint: the service and the token.
            timeout_s: longest wait for a connection, and for the next part of a reply unless a request names another.

        Raises:
            ValueError: the URL, the token or the file of trusted authorities cannot be used, or the URL is not safe
                enough.
        """
        endpoint.trust.check(endpoint.url)
        self.url = endpoint.url
        self._timeout_s = timeout_s
        token = split_token(endpoint.token).token
        if not token.isascii() or any(character.isspace() for character in token):
            raise ValueError("the token must be ASCII without spaces")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._parts = urlsplit(endpoint.url)
        self._port = self._parts.port or (443 if self._parts.scheme == "https" else 80)
        self._tls = endpoint.trust.context() if self._parts.scheme == "https" else None

    def request(self, method: str, path: str, **how: Any) -> RestReply:
        """Send a request; arguments are those of `answer`.

        Raises:
            RestError: the service refuses it or does not answer.
        """
        reply = self.answer(method, path, **how)
        if not 200 <= reply.status < 300:
            raise _refusal(reply)
        return reply

    def answer(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        if_match: str = "",
        timeout_s: float | None = None,
    ) -> RestReply:
        """Send a request, and give the reply of whatever status.

        A POST is sent with an `Idempotency-Key`. If the connection is lost before the reply, what may be sent twice
        is sent again.

        Args:
            method: of HTTP.
            path: below the URL of the service; what may not stand in a URL is escaped.
            query: parameters; None is omitted, and those of a list are repeated.
            body: is sent as JSON; None: nothing.
            if_match: ETag of what was read; empty: whatever has changed since.
            timeout_s: longest wait for the next part of the reply; None: that of this connection.

        Raises:
            RestError: the service does not answer.
        """
        headers = {"Idempotency-Key": uuid.uuid4().hex} if method == "POST" else {}
        headers |= {"If-Match": if_match} if if_match else {}
        left = TRIES if method in ("GET", "POST") else 1
        while True:
            left -= 1
            connection = self._connected(timeout_s or self._timeout_s)
            try:
                reply = self._sent(connection, method, path, query, body, headers)
                return RestReply(reply.status, reply.reason, reply.headers, reply.read())
            except (OSError, HTTPException) as error:
                if not left or not isinstance(error, ConnectionError | IncompleteRead):
                    raise self._silence(error) from error
            finally:
                connection.close()
            time.sleep(RETRY_S)

    def chunks(self, path: str, query: Mapping[str, Any] | None = None) -> Iterator[bytes]:
        """The content of a large resource, as it comes.

        Raises:
            RestError: the service refuses it, or the connection breaks.
        """
        connection = self._connected(LONG_S)
        try:
            reply = self._opened(connection, path, query)
            while chunk := reply.read(CHUNK):
                yield chunk
            if reply.length:
                raise IncompleteRead(b"", reply.length)
        except (OSError, HTTPException) as error:
            raise self._silence(error) from error
        finally:
            connection.close()

    def events(self, after: int | None = None, job: str | Sequence[str] | None = None) -> Iterator[ServiceEvent]:
        """Changes as they happen, from now on or since an id, until the service ends the stream.

        Raises:
            RestError: the connection could not be opened, or broke. Call again with the newest id.
        """
        connection = self._connected(SILENT_S)
        try:
            reply = self._opened(connection, "/api/v1/events", {"after": after, "job": job})
            fields: dict[str, str] = {}
            while line := reply.readline():
                name, _, value = line.decode().rstrip("\r\n").partition(":")
                if name:
                    fields[name] = value.removeprefix(" ")
                elif "data" in fields:
                    yield ServiceEvent(fields.get("event", ""), int(fields["id"]), json.loads(fields["data"]))
                    fields = {}
        except (OSError, HTTPException) as error:
            raise self._silence(error) from error
        finally:
            connection.close()

    def changes(
        self, on_break: Callable[[RestError], None], job: str | Sequence[str] | None = None
    ) -> Iterator[ServiceEvent]:
        """Events without end: after a connection that broke, those that were missed follow.

        Args:
            on_break: receives the reason for which a connection broke, or the service is unreachable.
            job: only changes of this job or these jobs; None: of all.

        Raises:
            RestError: the service refuses it, or the first connection could not be opened.
        """
        after: int | None = None
        while True:
            try:
                for event in self.events(after, job):
                    after = event.id
                    yield event
            except RestError as error:
                if 0 < error.status < 500 or after is None:
                    raise
                on_break(error)
            time.sleep(RECONNECT_S)

    def _connected(self, timeout_s: float) -> HTTPConnection:
        host = self._parts.hostname or ""
        connection = (
            HTTPSConnection(host, self._port, timeout=self._timeout_s, context=self._tls)
            if self._tls
            else HTTPConnection(host, self._port, timeout=self._timeout_s)
        )
        try:
            connection.connect()
        except OSError as error:
            connection.close()
            remedy = "start a service with `rankwatch up`, or name another (--url, RANKWATCH_URL, `rankwatch login`)"
            raise self._silence(error, remedy) from error
        connection.sock.settimeout(timeout_s)
        return connection

    def _sent(
        self,
        connection: HTTPConnection,
        method: str,
        path: str,
        query: Mapping[str, Any] | None,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> HTTPResponse:
        target = self._parts.path.rstrip("/") + quote(path, safe="/%:@!$&'()*+,;=~")
        pairs = urlencode(_pairs(query or {}))
        content = None if body is None else json.dumps(body).encode()
        form = {} if content is None else {"Content-Type": "application/json"}
        shown = {**self._headers, "Connection": "close", **form, **(headers or {})}
        connection.request(method, f"{target}?{pairs}" if pairs else target, content, shown)
        return connection.getresponse()

    def _opened(self, connection: HTTPConnection, path: str, query: Mapping[str, Any] | None) -> HTTPResponse:
        reply = self._sent(connection, "GET", path, query)
        if reply.status != 200:
            raise _refusal(RestReply(reply.status, reply.reason, reply.headers, reply.read()))
        return reply

    def _silence(self, error: Exception, remedy: str = "") -> RestError:
        """A refused connection mostly means that no service runs there."""
        if why := explain_tls_error(self.url, error):
            return RestError(0, "not trusted", why)
        return RestError(0, "no answer", f"{self.url} does not answer: {_reason(error)}", remedy)


def _reason(error: Exception) -> str:
    """Why there is no reply, in a few words."""
    if isinstance(error, TimeoutError):
        return "it took too long"
    if isinstance(error, IncompleteRead):
        return "the reply was cut short"
    if isinstance(error, OSError):
        return error.strerror or "the connection was lost before the reply"
    return "what is there does not speak HTTP"


def _pairs(query: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Parameters as they are sent."""
    lists = {name: one if isinstance(one, list | tuple | set | frozenset) else (one,) for name, one in query.items()}
    pairs = ((name, one) for name, several in lists.items() for one in several if one is not None)
    return [(name, str(one).lower() if isinstance(one, bool) else str(one)) for name, one in pairs]


class _Problem(msgspec.Struct):
    """A refusal as RFC 9457 has it."""

    title: str = ""
    detail: str = ""
    errors: list[dict[str, Any]] = []


def _place(loc: str) -> str:
    """The path of the invalid value, as its writer knows it; empty: the whole body."""
    first, _, rest = loc.partition(".")
    name = rest if first in ("query", "body", "path") else loc
    return f"{name.removesuffix('.0')}: " if name else ""


def _refusal(reply: RestReply) -> RestError:
    try:
        problem = msgspec.json.decode(reply.content, type=_Problem)
    except msgspec.MsgspecError:
        problem = _Problem("", "what answers there is not rankwatch" if reply.status == 404 else "")
    title = problem.title or reply.reason or "refused"
    errors = [f"{_place(str(one.get('loc', one.get('field', ''))))}{one.get('msg', one)}" for one in problem.errors]
    return RestError(reply.status, title, "; ".join([problem.detail or title, *errors]))
