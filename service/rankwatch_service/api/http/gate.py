"""The outermost layer: which hosts, clients, bodies and credentials reach the application at all."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from http.cookies import CookieError, SimpleCookie
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final
from urllib.parse import urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as AsgiScope

from rankwatch.wire import BATCH_BYTES_MAX
from rankwatch_service.access.budgets import account_at, account_of
from rankwatch_service.access.identities import Authenticator, Identity
from rankwatch_service.access.oidc_provider import CALLBACK_PATH
from rankwatch_service.access.refusals import Refusal, Refusals
from rankwatch_service.access.sessions import SESSION_S
from rankwatch_service.access.tokens import TokenKind
from rankwatch_service.allow_list import allow_list
from rankwatch_service.api.http.problem import RETRY_AFTER_S, problem, unavailable
from rankwatch_service.api.http.turns import Turns
from rankwatch_service.settings import Settings
from rankwatch_service.store.errors import StoreError

TELEMETRY_PATH: Final = "/api/v1/telemetry"
BODY_BYTES_MAX: Final = 1024 * 1024
"""Limit for all but telemetry: a policy of 200 rules has 60 KB, the view of a host with 1,024 ranks 150 KB."""


LOGIN_BYTES_MAX: Final = 8_192
"""Longest body of a login, which anybody may send."""
BODY_SMALL_BYTES: Final = 65_536
"""Bodies up to here are bounded by the number of connections: 512 MB of them."""


def announced_bytes(headers: Headers) -> int:
    """The length of a body; one byte too many for any limit if it comes in chunks of an unknown number."""
    length = headers.get("content-length", "0")
    return BATCH_BYTES_MAX + 1 if "transfer-encoding" in headers else int(length) if length.isdecimal() else 0


def limited(limit: int, headers: Headers, receive: Receive) -> Receive:
    """Wrap `receive`, so that it raises a 413 for a body that is longer than `limit` bytes."""
    announced = 0 if "transfer-encoding" in headers else announced_bytes(headers)
    received = 0

    async def limited_receive() -> Message:
        nonlocal received
        if announced <= limit:
            message = await receive()
            received += len(message.get("body", b""))
            if received <= limit:
                return message
        raise HTTPException(413, f"the body is longer than {limit} bytes")

    return limited_receive


async def whole(receive: Receive) -> Receive:
    """Wait for all of the body; returns a `receive` that has it, or raises what made it fail."""
    pieces, failure = list[bytes](), None
    message: Message | None = None
    while message is None or message.get("more_body", False):
        try:
            message = await receive()
        except HTTPException as error:
            failure = error
            break
        pieces.append(message.get("body", b""))

    async def received() -> Message:
        nonlocal message
        if failure is not None:
            raise failure
        if message is None:
            return await receive()
        first, message = message, None
        body = b"".join(pieces)
        pieces.clear()
        return first if first["type"] != "http.request" else {"type": "http.request", "body": body}

    return received


_HOST: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9_.-]{1,253}))(?::[0-9]{1,5})?")


def own_names(settings: Settings, machine: str) -> frozenset[str]:
    """All names by which the service may be asked for, in small letters.

    Args:
        settings: of the service.
        machine: the name of the machine it runs on, in full or its first label.
    """
    public = urlsplit(settings.public_url).hostname or ""
    names = {"localhost", settings.host, public, machine, machine.partition(".")[0]} - {""}
    return frozenset(map(str.lower, names)) | allow_list(settings.allowed_hosts).names


def asked_host(values: Sequence[str]) -> str:
    """The host that a request asks for, without its port and in small letters.

    Raises:
        ValueError: there is none, more than one, or it is malformed.
    """
    found = _HOST.fullmatch(values[0]) if len(values) == 1 else None
    if found is None:
        raise ValueError("a request needs exactly one Host header, with a name or an address")
    return (found[1] or found[2]).lower().removesuffix(".")


def is_address(host: str) -> bool:
    """Whether this is an IPv4 or IPv6 address."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


Address = IPv4Address | IPv6Address
_FOR: Final = re.compile(r'(?:^|;)\s*for\s*=\s*"?([^";]*)"?', re.IGNORECASE)


class TrustedProxies:
    """The proxies of the setting `trusted_proxies`; none by default, so that nobody's word counts."""

    def __init__(self, listed: str = "") -> None:
        """Parse the setting.

        Raises:
            ValueError: the list is malformed.
        """
        self._networks = allow_list(listed).networks

    def __contains__(self, address: str) -> bool:
        found = _address(address)
        return found is not None and any(found in network for network in self._networks)

    def client_of(self, peer: str, headers: Headers) -> str:
        """The address that a request comes from.

        It is the peer of the connection, unless that is a trusted proxy. A proxy adds the address of its own peer to
        the right of X-Forwarded-For (else to Forwarded), so what stands left of the first that is no trusted proxy may
        be invented.
        """
        client = peer
        if peer not in self:
            return client
        for named in _named(headers):
            found = _address(named)
            if found is None:
                break
            client = str(found)
            if client not in self:
                break
        return client


def _named(headers: Headers) -> Iterator[str]:
    """The addresses that proxies have added, from right to left."""
    added = headers.getlist("x-forwarded-for")
    if added:
        yield from (one.strip() for one in reversed(",".join(added).split(",")))
        return
    for one in reversed(",".join(headers.getlist("forwarded")).split(",")):
        found = _FOR.search(one)
        yield found.group(1) if found else ""


def _address(text: str) -> Address | None:
    """An address as proxies write it, perhaps with a port; None if it is none."""
    bracketed = re.fullmatch(r"\[([^\]]*)\](?::\d+)?", text)
    bare = bracketed.group(1) if bracketed else text.partition(":")[0] if text.count(":") == 1 else text
    try:
        found = ip_address(bare)
    except ValueError:
        return None
    return (found.ipv4_mapped or found) if isinstance(found, IPv6Address) else found


COOKIE: Final = "rankwatch_session"
SECURE_COOKIE: Final = "__Host-rankwatch_session"
"""Used over https: browsers accept this prefix only for Secure cookies of one host."""

SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
PROTECTED: Final = ("/api/", "/metrics")
"""Paths below these require an identity. All others (pages and their files) contain no data."""

LOGIN_PATH: Final = "/api/v1/session"

OWN: Final = frozenset({"telemetry", "agents", "events", "health", "session", "tokens", "commands"})
"""First parts of paths of the api that are never relayed: what agents ask, streams, what is about this process, and
what changes which tokens are valid, which this process remembers."""

FROM_HERE_ONLY: Final = (
    "this token is for the machine of the service; for agents on other hosts create one with `rankwatch token job JOB`"
)

REFUSED_S: Final = 1.0
"""A guess waits so long for its 429, so that a loop of guesses takes little time from others."""

GUESSES_WAITING_MAX: Final = 64
"""Guesses that wait; further ones are answered at once, so that they hold few connections."""

REFUSED: Final = (401, 403, 421)
"""Statuses that are counted and recorded in the audit trail."""

HTTPS_ONLY_S: Final = 30 * 86_400
"""How long browsers use https alone for the api's host name, on all its ports: a month, should TLS be given up."""

HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "font-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
}


class Gate:
    """ASGI middleware. Adds `identity` (or None), `request_id` and `turn` to the scope of each request."""

    def __init__(
        self,
        app: ASGIApp,
        authenticator: Authenticator,
        refusals: Refusals,
        public_url: str,
        own_names: Collection[str],
        proxies: TrustedProxies,
        turns: Turns,
        relayed_turns: Turns,
    ) -> None:
        """Do no I/O.

        Args:
            app: what answers the requests that pass.
            authenticator: finds the identity behind a token.
            refusals: counts refused requests, and slows down whoever guesses tokens.
            public_url: how browsers reach the service, also if a reverse proxy ends TLS before it.
            own_names: which names requests may ask for in `Host`, besides addresses.
            proxies: whose word about the address of a client counts.
            turns: in which requests are worked on.
            relayed_turns: the same for those of people, which another process works on.
        """
        self._app = app
        self._turns = turns
        self._relayed_turns = relayed_turns
        self._authenticator = authenticator
        self._refusals = refusals
        self._public_origin = origin_of(public_url)
        self._own_names = own_names
        self._proxies = proxies
        self._guesses_waiting = 0
        self._asked: dict[tuple[asyncio.AbstractEventLoop, str], asyncio.Future[Identity | None]] = {}
        """Tokens that are being looked up."""

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Pass one request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["request_id"] = request_id = secrets.token_hex(8)
        scope["identity"] = None
        headers = Headers(scope=scope)
        peer = source_of(scope)
        if peer:
            scope["client"] = (self._proxies.client_of(peer, headers), 0)
        path, method = scope["path"], scope["method"]
        is_protected = path.startswith(PROTECTED)
        logs_in = path == CALLBACK_PATH or (path == LOGIN_PATH and method == "POST")
        # Public paths must work without the database.
        token, by_cookie = presented_token(headers) if is_protected else ("", False)
        answers = self._answering(scope, send, token, logs_in=logs_in)

        async def refuse(status: int, detail: str, **more: str) -> None:
            await problem(request_id, status, detail, more)(scope, receive, answers)

        try:
            host = asked_host(headers.getlist("host"))
        except ValueError as error:
            await refuse(400, str(error))
            return
        if host not in self._own_names and not is_address(host):
            await refuse(421, f"this service does not answer to the name {host}; add it to RANKWATCH_ALLOWED_HOSTS")
            return
        wait_s = self._refusals.wait_s(source_of(scope)) if logs_in or token else 0
        # The token that a login tries is in its body: one that came beside it vouches for nothing.
        if wait_s and (logs_in or not self._authenticator.knows(token)):
            self._refusals.add(Refusal(429, source_of(scope), ""), path, invalid_token=False)
            await self._slow_down()
            detail = "too many requests with an invalid token came from this address"
            await refuse(429, detail, **{"Retry-After": str(wait_s)})
            return
        try:
            identity = await self._identify(token, by_cookie) if token else None
        except StoreError:
            await unavailable(request_id)(scope, receive, answers)
            return
        scope["identity"] = identity
        connection = scope.get("state", {}).get("connection")
        # Without a token the address has been charged as it connected, unless it connected to a proxy.
        account = (
            account_of(identity) if identity else account_at(source_of(scope)) if peer != source_of(scope) else None
        )
        if connection and account and not connection.charge(account):
            detail = "this token or address has its part of the connections"
            await refuse(503, detail, **{"Retry-After": str(RETRY_AFTER_S), "Connection": "close"})
            return
        if identity is None and is_protected and not logs_in:
            detail = self._authenticator.ended(token) or "the service refused the token, or there is none"
            await refuse(401, detail, **{"WWW-Authenticate": "Bearer"})
            return
        if identity is not None and identity.loopback and not is_from_here(scope):
            await refuse(403, FROM_HERE_ONLY)
            return
        from_browser = logs_in or (identity is not None and identity.by_cookie)
        if from_browser and method not in SAFE_METHODS and not self._is_same_origin(scope["scheme"], headers):
            await refuse(403, "cross-site request refused: a browser may write only from the pages of this service")
            return
        limit = BATCH_BYTES_MAX if path == TELEMETRY_PATH else LOGIN_BYTES_MAX if logs_in else BODY_BYTES_MAX
        body, is_awaited = limited(limit, headers, receive), identity is not None or logs_in  # no page takes a body
        is_large = connection is not None and is_awaited and announced_bytes(headers) > BODY_SMALL_BYTES
        if is_large and not connection.receive_large():
            detail = "too many large bodies of this token are being received; try again"
            await refuse(503, detail, **{"Retry-After": str(RETRY_AFTER_S), "Connection": "close"})
            return
        try:
            body = await whole(body) if is_awaited else body
            turns = self._relayed_turns if is_relayed(scope) else self._turns
            scope["turn"] = turn = await turns.begin(account_of(identity) if identity else account_at(source_of(scope)))
        finally:
            if is_large:
                connection.is_received()
        try:
            if connection is None or not connection.is_gone:
                await self._app(scope, body, answers)
        finally:
            turn.end()

    async def _slow_down(self) -> None:
        if self._guesses_waiting < GUESSES_WAITING_MAX:
            self._guesses_waiting += 1
            try:
                await asyncio.sleep(REFUSED_S)
            finally:
                self._guesses_waiting -= 1

    def _answering(self, scope: AsgiScope, send: Send, token: str, *, logs_in: bool) -> Send:
        """`send` that adds the headers of every answer, and counts what was refused."""

        async def answers(message: Message) -> None:
            if message["type"] == "http.response.start":
                if "turn" in scope:
                    scope["turn"].end()
                headers, status = MutableHeaders(scope=message), message["status"]
                headers["X-Request-Id"] = scope["request_id"]
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                if scope["scheme"] == "https":
                    headers["Strict-Transport-Security"] = f"max-age={HTTPS_ONLY_S}"
                if scope["path"].startswith(PROTECTED):
                    headers.setdefault("Cache-Control", "no-store")
                if status in REFUSED:
                    actor = scope["identity"].actor if scope["identity"] else ""
                    refusal = Refusal(status, source_of(scope), actor)
                    # Whoever sends a token that has ended does not guess: an old launch script locks nobody out.
                    guessed = logs_in or (token != "" and not self._authenticator.ended(token))
                    self._refusals.add(refusal, scope["path"], invalid_token=status == 401 and guessed)
            await send(message)

        return answers

    async def _identify(self, token: str, by_cookie: bool) -> Identity | None:
        found = await self._look_up(token)
        if found is None or by_cookie:
            return found and replace(found, by_cookie=True)
        # A login link may lie in the history of a terminal: it opens one session and is no token for requests.
        return None if found.kind == TokenKind.LOGIN else found

    def _is_same_origin(self, scheme: str, headers: Headers) -> bool:
        """Whether the browser reports that the request comes from a page of this service.

        False if the headers do not say: every current browser sends Sec-Fetch-Site or Origin with a write.
        """
        site = headers.get("sec-fetch-site")
        if site is not None:
            return site == "same-origin"
        return headers.get("origin") in (f"{scheme}://{headers.get('host')}", self._public_origin)

    async def _look_up(self, text: str) -> Identity | None:
        found = self._authenticator.cached(text)
        if found is not None or self._authenticator.ended(text):
            return found
        # Requests that come together with one token share a query, so that they do not fill the threads.
        key = asyncio.get_running_loop(), text
        asked = self._asked.get(key)
        if asked is None:
            asked = self._asked[key] = asyncio.ensure_future(run_in_threadpool(self._authenticator.authenticate, text))
            asked.add_done_callback(lambda _: self._asked.pop(key))
        return await asyncio.shield(asked)


def is_relayed(scope: AsgiScope) -> bool:
    """Whether this is a request of people, which the second process answers where there is one."""
    _, api, version, resource, *_ = f"{scope['path']}///".split("/")
    return api == "api" and (version == "v2" or (version == "v1" and resource not in OWN))


def source_of(scope: AsgiScope) -> str:
    """The address that a request comes from; behind a trusted proxy that of the proxy's client."""
    client = scope.get("client")
    return str(client[0]) if client else ""


def is_from_here(scope: AsgiScope) -> bool:
    """Whether a request comes from the machine of the service."""
    source, server = source_of(scope), scope.get("server")
    try:
        return ip_address(source).is_loopback or (server is not None and source == server[0])
    except ValueError:
        return False


def presented_token(headers: Headers) -> tuple[str, bool]:
    """The token that a request is sent with, and whether it is the session in the cookie; empty if there is none."""
    kind, _, bearer = headers.get("authorization", "").partition(" ")
    return (bearer.strip(), False) if kind.lower() == "bearer" else (session_of(headers), True)


def session_of(headers: Headers) -> str:
    """The session token in the cookie; empty if there is none."""
    try:
        cookies = SimpleCookie(headers.get("cookie", ""))
    except CookieError:
        return ""
    cookie = cookies.get(SECURE_COOKIE) or cookies.get(COOKIE)
    return cookie.value if cookie else ""


def session_cookie(settings: Settings, answer: Response, text: str) -> None:
    """Set the cookie with a session's token, which scripts cannot read; an empty text deletes it."""
    secure = settings.public_url.startswith("https://")
    name, max_age_s = SECURE_COOKIE if secure else COOKIE, SESSION_S if text else 0
    answer.set_cookie(name, text, max_age=max_age_s, path="/", secure=secure, httponly=True, samesite="lax")


def origin_of(url: str) -> str:
    """Scheme, host and port of a URL, as browsers send them in Origin."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"
