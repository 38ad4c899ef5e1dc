"""The gate in front of every request: request id, identity, cross-site check, body limit, security headers.

Only the two health routes, the files of the pages, and the login can be requested without a token.
"""

from __future__ import annotations

import secrets
from http.cookies import CookieError, SimpleCookie
from typing import Final
from urllib.parse import urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as AsgiScope

from rankwatch_service.access.identities import Authenticator, Identity
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

    def __init__(self, app: ASGIApp, authenticator: Authenticator, public_url: str) -> None:
        """Do no I/O.

        Args:
            app: what answers the requests that pass.
            authenticator: finds the identity behind a token.
            public_url: how browsers reach the service, also if a reverse proxy ends TLS before it.
        """
        self._app = app
        self._authenticator = authenticator
        self._public_origin = origin_of(public_url)

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Pass one request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = secrets.token_hex(8)
        scope["request_id"] = request_id

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                if scope["path"].startswith(PROTECTED):
                    headers.setdefault("Cache-Control", "no-store")
            await send(message)

        headers = Headers(scope=scope)
        path, method = scope["path"], scope["method"]
        try:
            # Public paths must work without the database.
            identity = await self._identify(headers) if path.startswith(PROTECTED) else None
        except StoreError:
            await unavailable(request_id)(scope, receive, send_with_headers)
            return
        scope["identity"] = identity
        logs_in = path == LOGIN_PATH and method == "POST"
        if identity is None and path.startswith(PROTECTED) and not logs_in:
            answer = problem(request_id, 401, "a valid token is required", {"WWW-Authenticate": "Bearer"})
            await answer(scope, receive, send_with_headers)
            return
        from_browser = logs_in or (identity is not None and identity.by_cookie)
        if from_browser and method not in SAFE_METHODS and not self._is_same_origin(scope["scheme"], headers):
            answer = problem(
                request_id, 403, "cross-site request refused: a browser may write only from the pages of this service"
            )
            await answer(scope, receive, send_with_headers)
            return
        await self._app(scope, limited(path, headers, receive), send_with_headers)

    async def _identify(self, headers: Headers) -> Identity | None:
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            found = await self._look_up(bearer.strip())
            # A login link may lie in the history of a terminal: it opens one session and is no token for requests.
            return None if found is not None and found.kind == TokenKind.LOGIN else found
        text = session_of(headers)
        found = await self._look_up(text) if text else None
        if found is None:
            return None
        return Identity(found.id, found.kind, found.name, found.scopes, found.job, found.expires_unix_ns, True)

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
