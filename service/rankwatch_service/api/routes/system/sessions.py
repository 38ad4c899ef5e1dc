"""Browser sessions: a token is exchanged for a cookie that scripts cannot read."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from rankwatch_service.access.identities import Identity
from rankwatch_service.access.scopes import Scope
from rankwatch_service.access.sessions import LoginUsedError, SenderTokenError, open_session
from rankwatch_service.access.tokens import TokenKind, revoke_token
from rankwatch_service.api.dependencies.context import Ctx
from rankwatch_service.api.http.authorization import Require
from rankwatch_service.api.http.gate import session_cookie
from rankwatch_service.api.http.problem import ProblemError
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.store.engine import write

router = APIRouter(prefix="/session", tags=["access"])


class NewSession(BaseModel):
    """The token to log in with."""

    model_config = ConfigDict(extra="forbid")
    token: Annotated[SecretStr, Field(max_length=300)]


class Session(ApiReply):
    """Who is logged in."""

    name: str
    person: str
    """Who it is, whatever token they use: they approve no command whose `requester` is this."""
    scopes: list[str]
    job: str
    """The only job that they may access; empty: those of `jobs`."""
    jobs: list[str]
    """Patterns of the names of the jobs that they may access; empty: every job."""
    expires_unix_ns: int | None


@router.post("", status_code=201)
def log_in(body: NewSession, context: Ctx, request: Request, response: Response) -> Session:
    """Exchange a token for a session cookie. A login token can be used once."""
    identity = context.authenticator.authenticate(body.token.get_secret_value())
    if identity is None or identity.kind == TokenKind.SESSION:
        raise ProblemError(401, "this token is not valid", headers={"WWW-Authenticate": "Bearer"})
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
    return _session(identity, expires)


@router.get("")
async def who_am_i(identity: Annotated[Identity, Depends(Require(Scope.READ))]) -> Session:
    """Who is logged in, with which scopes."""
    return _session(identity, identity.expires_unix_ns)


@router.delete("", status_code=204)
def log_out(context: Ctx, response: Response, identity: Annotated[Identity, Depends(Require(Scope.READ))]) -> None:
    """End the session; its cookie is no longer valid."""
    if identity.kind != TokenKind.SESSION:
        raise ProblemError(409, "the request was sent with a token, not with a session; revoke the token instead")
    with write(context.engine) as connection:
        revoke_token(connection, identity.id)
    context.authenticator.clear_cache()
    session_cookie(context.settings, response, "")


def _session(identity: Identity, expires_unix_ns: int | None) -> Session:
    return Session(
        name=identity.name,
        person=identity.person,
        scopes=sorted(identity.scopes),
        job=identity.jobs.only,
        jobs=list(identity.jobs.patterns),
        expires_unix_ns=expires_unix_ns,
    )
