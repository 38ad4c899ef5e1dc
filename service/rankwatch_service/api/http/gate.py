"""The gate in front of every request: request id, identity, cross-site check, body limit, security headers.

Only the two health routes, the files of the pages, and the login can be requested without a token.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from http.cookies import CookieError, SimpleCookie
from typing import Final
from urllib.parse import urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as AsgiScope

from rankwatch_service.access.identities import Authenticator, Identity
from rankwatch_service.access.refusals import Refusal, Refusals
from rankwatch_service.access.tokens import TokenKind
from rankwatch_service.api.http.body import limited
from rankwatch_service.api.http.problem import problem, unavailable
from rankwatch_service.store.errors import StoreError

COOKIE: Final = "rankwatch_session"
SECURE_COOKIE: Final = "__Host-rankwatch_session"
"""Used over https: browsers accept this prefix only for Secure cookies of one host."""

SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
PROTECTED: Final = ("/api/", "/metrics")
"""Paths below these require an identity. All others (pages and their files) contain no data."""

LOGIN_PATH: Final = "/api/v1/session"

REFUSED: Final = (401, 403)
"""Statuses that are counted and recorded in the audit trail."""

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
    """ASGI middleware. Adds `identity` (or None) and `request_id` to the scope of each request."""

    def __init__(self, app: ASGIApp, authenticator: Authenticator, refusals: Refusals, public_url: str) -> None:
        """Do no I/O.

        Args:
            app: what answers the requests that pass.
            authenticator: finds the identity behind a token.
            refusals: counts refused requests, and slows down whoever guesses tokens.
            public_url: how browsers reach the service, also if a reverse proxy ends TLS before it.
        """
        self._app = app
        self._authenticator = authenticator
        self._refusals = refusals
        self._public_origin = origin_of(public_url)

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Pass one request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["request_id"] = request_id = secrets.token_hex(8)
        scope["identity"] = None
        headers = Headers(scope=scope)
        path, method = scope["path"], scope["method"]
        is_protected, logs_in = path.startswith(PROTECTED), path == LOGIN_PATH and method == "POST"
        # Public paths must work without the database.
        token, by_cookie = presented_token(headers) if is_protected else ("", False)
        answers = self._answering(scope, send, has_token=logs_in or bool(token))

        async def refuse(status: int, detail: str, **more: str) -> None:
            await problem(request_id, status, detail, more)(scope, receive, answers)

        wait_s = self._refusals.wait_s(source_of(scope)) if logs_in or token else 0
        if wait_s and not self._authenticator.knows(token):
            self._refusals.add(Refusal(429, source_of(scope), ""), path, invalid_token=False)
            detail = "too many requests with an invalid token came from this address"
            await refuse(429, detail, **{"Retry-After": str(wait_s)})
            return
        try:
            identity = await self._identify(token, by_cookie) if token else None
        except StoreError:
            await unavailable(request_id)(scope, receive, answers)
            return
        scope["identity"] = identity
        if identity is not None and (connection := scope.get("state", {}).get("connection")):
            connection.authenticated()
        if identity is None and is_protected and not logs_in:
            await refuse(401, "a valid token is required", **{"WWW-Authenticate": "Bearer"})
            return
        from_browser = logs_in or (identity is not None and identity.by_cookie)
        if from_browser and method not in SAFE_METHODS and not self._is_same_origin(scope["scheme"], headers):
            await refuse(403, "cross-site request refused: a browser may write only from the pages of this service")
            return
        await self._app(scope, limited(path, headers, receive), answers)

    def _answering(self, scope: AsgiScope, send: Send, *, has_token: bool) -> Send:
        """`send` that adds the headers of every answer, and counts what was refused."""

        async def answers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers, status = MutableHeaders(scope=message), message["status"]
                headers["X-Request-Id"] = scope["request_id"]
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                if scope["path"].startswith(PROTECTED):
                    headers.setdefault("Cache-Control", "no-store")
                if status in REFUSED:
                    actor = scope["identity"].actor if scope["identity"] else ""
                    refusal = Refusal(status, source_of(scope), actor)
                    self._refusals.add(refusal, scope["path"], invalid_token=status == 401 and has_token)
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
        return found if found is not None else await run_in_threadpool(self._authenticator.authenticate, text)


def source_of(scope: AsgiScope) -> str:
    """The address that a request comes from."""
    client = scope.get("client")
    return str(client[0]) if client else ""


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


def origin_of(url: str) -> str:
    """Scheme, host and port of a URL, as browsers send them in Origin."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"
