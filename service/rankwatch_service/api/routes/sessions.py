"""Sessions of browsers: a token is exchanged for a cookie that scripts cannot read, or a person logs in with OIDC."""

from __future__ import annotations

import re
from http.cookies import CookieError, SimpleCookie
from typing import Annotated, Final

import msgspec
import structlog
from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field, SecretStr
from starlette.responses import RedirectResponse

from rankwatch_service.access.grants import Scope
from rankwatch_service.access.identities import Identity
from rankwatch_service.access.oidc_provider import (
    BEGIN_PATH,
    CALLBACK_PATH,
    Attempt,
    LoginRefusedError,
    OidcProvider,
    ProviderAwayError,
)
from rankwatch_service.access.sessions import (
    LOGIN_S,
    LoginUsedError,
    NoGroupError,
    SenderTokenError,
    grants_of,
    open_session,
    open_session_of,
    record_refusal,
    shown_name,
)
from rankwatch_service.access.tokens import TokenKind, revoke_token
from rankwatch_service.api.dependencies import Context, Ctx, Require
from rankwatch_service.api.http.gate import session_cookie, source_of
from rankwatch_service.api.http.problem import ProblemError
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.dashboard import LoginPage
from rankwatch_service.store.engine import write
from rankwatch_service.store.errors import StoreError

router = APIRouter(prefix="/session", tags=["access"])


class NewSession(BaseModel):
    """The token to log in with."""

    model_config = ConfigDict(extra="forbid")
    token: Annotated[SecretStr, Field(max_length=300)]


class Session(ApiReply):
    """Who is logged in."""

    name: str
    person: str
    """The person, whatever token they use: they approve no command whose `requester` is this."""
    scopes: list[str]
    job: str
    """The only job that they may access; empty: those of `jobs`."""
    jobs: list[str]
    """Patterns of the names of the jobs that they may access; empty: every job."""
    expires_unix_ns: int | None
    links: dict[str, str]
    """URL templates of the installation's own tools by name, with {job}, {rank} or {host} in them."""


@router.post("", status_code=201)
def log_in(body: NewSession, context: Ctx, request: Request, response: Response) -> Session:
    """Exchange a token for a session cookie. A login token can be used once."""
    identity = context.authenticator.authenticate(body.token.get_secret_value())
    if identity is None or identity.kind == TokenKind.SESSION:
        why = context.authenticator.ended(body.token.get_secret_value()) or "this token is not valid"
        raise ProblemError(401, why, headers={"WWW-Authenticate": "Bearer"})
    source = request.client.host if request.client else ""
    try:
        with write(context.engine) as connection:
            text, expires = open_session(connection, identity, context.clock.unix_ns(), source)
    except LoginUsedError as error:
        raise ProblemError(
            401, "this login link has already been used", headers={"WWW-Authenticate": "Bearer"}
        ) from error
    except SenderTokenError as error:
        raise ProblemError(403, "a token that can only send telemetry or alerts opens no session") from error
    session_cookie(context.settings, response, text)
    return _session(identity, expires, context)


@router.get("")
async def who_am_i(context: Ctx, identity: Annotated[Identity, Depends(Require(Scope.READ))]) -> Session:
    """Who is logged in, with which scopes."""
    return _session(identity, identity.expires_unix_ns, context)


@router.delete("", status_code=204)
def log_out(context: Ctx, response: Response, identity: Annotated[Identity, Depends(Require(Scope.READ))]) -> None:
    """End the session; its cookie is no longer valid."""
    if identity.kind != TokenKind.SESSION:
        raise ProblemError(409, "the request was sent with a token, not with a session; revoke the token instead")
    with write(context.engine) as connection:
        revoke_token(connection, identity.id)
    context.authenticator.clear_cache()
    session_cookie(context.settings, response, "")


def _session(identity: Identity, expires_unix_ns: int | None, context: Context) -> Session:
    return Session(
        name=identity.name,
        person=identity.person,
        scopes=sorted(identity.scopes),
        job=identity.jobs.only,
        jobs=list(identity.jobs.patterns),
        expires_unix_ns=expires_unix_ns,
        links=context.settings.links,
    )


COOKIE: Final = "rankwatch_login"
SECURE_COOKIE: Final = "__Host-rankwatch_login"
"""Used over https, as for sessions."""

LOGINS_MAX: Final = 8
"""People who are logged in by the provider at the same moment. Each takes a thread while the provider answers."""

_OWN_PAGE: Final = re.compile(r"/(?![/\\])[!-\[\]-~]*")
"""A path of this service: neither //HOST nor /\\HOST, and no character that browsers leave out."""

_log = structlog.get_logger(__name__)


class LoginRoutes:
    """The two pages. They answer with a redirect, or with the login page and what went wrong."""

    def __init__(self, context: Context, provider: OidcProvider, page: LoginPage) -> None:
        """Do nothing yet.

        Args:
            context: of the api.
            provider: by which people log in.
            page: the login page.
        """
        self._context = context
        self._provider = provider
        self._page = page
        self._turns = CapacityLimiter(LOGINS_MAX)

    def mount(self, app: FastAPI) -> None:
        """Add the pages to an application. Like all pages they need no token."""
        app.add_route(BEGIN_PATH, self.begin, include_in_schema=False)
        app.add_route(CALLBACK_PATH, self.come_back, include_in_schema=False)

    async def begin(self, request: Request) -> Response:
        """Send the browser to the provider."""
        return await to_thread.run_sync(self._begin, request, limiter=self._turns)

    async def come_back(self, request: Request) -> Response:
        """Open a session for whom the provider vouches, and show the page that was wanted."""
        return await to_thread.run_sync(self._come_back, request, limiter=self._turns)

    def _begin(self, request: Request) -> Response:
        try:
            attempt, url = self._provider.begin(own_page(request.query_params.get("next", "/")))
        except ProviderAwayError as error:
            return self._away(error)
        answer = _redirect(url)
        kept = self._context.secret_key.encrypt(msgspec.json.encode(attempt).decode())
        self._keep(answer, kept, LOGIN_S)
        return answer

    def _come_back(self, request: Request) -> Response:
        answer = self._logged_in(request)
        self._keep(answer, "", 0)
        return answer

    def _logged_in(self, request: Request) -> Response:
        attempt = self._attempt(request)
        if attempt is None or request.query_params.get("state") != attempt.state:
            return self._problem(401, "This login was not begun in this browser, or took too long. Try again.")
        code = request.query_params.get("code")
        if not code:
            return self._problem(401, f"{self._provider.name} did not log you in. Try again.")
        context, now, source = self._context, self._context.clock.unix_ns(), source_of(request.scope)
        try:
            person = self._provider.redeem(attempt, code)
            try:
                grants = grants_of(person, context.settings.oidc_groups)
            except NoGroupError:
                with write(context.engine) as connection:
                    record_refusal(connection, person, now, source)
                return self._problem(403, f"{shown_name(person)} is in no group that may use this service.")
            with write(context.engine) as connection:
                text = open_session_of(connection, person, grants, now, source)
        except ProviderAwayError as error:
            return self._away(error)
        except LoginRefusedError as error:
            _log.warning("oidc_login_refused", provider=self._provider.name, reason=str(error), source=source)
            return self._problem(401, f"The answer of {self._provider.name} was refused; the log of the api says why.")
        except StoreError:
            return self._problem(503, "The database does not answer. Try again.")
        answer = _redirect(attempt.next)
        session_cookie(context.settings, answer, text)
        return answer

    def _attempt(self, request: Request) -> Attempt | None:
        try:
            cookies = SimpleCookie(request.headers.get("cookie", ""))
            kept = cookies[SECURE_COOKIE if self._secure else COOKIE].value
            attempt = msgspec.json.decode(self._context.secret_key.decrypt(kept), type=Attempt)
        except (CookieError, KeyError, ValueError):
            return None
        age_ns = self._context.clock.unix_ns() - attempt.began_unix_ns
        return attempt if age_ns < LOGIN_S * 10**9 else None

    @property
    def _secure(self) -> bool:
        return self._context.settings.public_url.startswith("https://")

    def _keep(self, answer: Response, text: str, max_age_s: int) -> None:
        name = SECURE_COOKIE if self._secure else COOKIE
        answer.set_cookie(name, text, max_age=max_age_s, path="/", secure=self._secure, httponly=True, samesite="lax")

    def _away(self, error: ProviderAwayError) -> Response:
        _log.warning("oidc_provider_away", provider=self._provider.name, reason=str(error))
        return self._problem(502, f"{self._provider.name} does not answer. Log in with a token, or try again later.")

    def _problem(self, status: int, text: str) -> Response:
        return self._page.response(status, text)


def own_page(wanted: str) -> str:
    """The path that a browser wants to go to after the login, if it is one of this service; else the start page."""
    return wanted if _OWN_PAGE.fullmatch(wanted) else "/"


def _redirect(url: str) -> Response:
    return RedirectResponse(url, 303, headers={"Cache-Control": "no-store"})
