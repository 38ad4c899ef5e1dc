"""A browser's session: a token handed in once becomes a cookie that scripts cannot read."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, ConfigDict, Field, SecretStr
from sqlalchemy import select

from rankwatch_service.api.context import Context, Ctx
from rankwatch_service.api.http.access import Identity, Require, Scope, TokenKind, create_token, revoke_token
from rankwatch_service.api.http.gate import COOKIE, SECURE_COOKIE
from rankwatch_service.api.http.problem import ProblemError
from rankwatch_service.store import audit_trail
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Token

router = APIRouter(prefix="/session", tags=["access"])

SESSION_S: Final = 12 * 3_600
"""A shift."""


class Login(BaseModel):
    """The token to log in with."""

    model_config = ConfigDict(extra="forbid")
    token: Annotated[SecretStr, Field(max_length=300)]


class Session(BaseModel):
    """Who is logged in."""

    name: str
    scopes: list[str]
    job: str
    expires_unix_ns: int | None


@router.post("", status_code=201)
def log_in(body: Login, context: Ctx, request: Request, response: Response) -> Session:
    """Exchange a token for a session cookie. A login token does so once."""
    identity = context.authority.identify(body.token.get_secret_value())
    if identity is None or identity.kind == TokenKind.SESSION:
        raise ProblemError(401, "this token is not valid", headers={"WWW-Authenticate": "Bearer"})
    now = context.clock.unix_ns()
    expires = now + SESSION_S * 10**9
    if identity.kind != TokenKind.LOGIN and identity.expires_unix_ns is not None:
        expires = min(expires, identity.expires_unix_ns)
    with write(context.engine) as connection:
        opened = select(Token.id).where(Token.parent == identity.id).limit(1)
        if identity.kind == TokenKind.LOGIN and connection.execute(opened).one_or_none() is not None:
            raise ProblemError(401, "this login link was used already", headers={"WWW-Authenticate": "Bearer"})
        scopes = [Scope(scope) for scope in identity.scopes]
        _, text = create_token(
            connection,
            TokenKind.SESSION,
            identity.name,
            scopes,
            now,
            job=identity.job,
            expires_unix_ns=expires,
            parent=identity.id,
        )
        source = request.client.host if request.client else ""
        audit_trail.append(connection, now, identity.actor, "session.open", identity.id, "ok", source=source)
    _set_cookie(context, response, text, SESSION_S)
    return Session(name=identity.name, scopes=sorted(identity.scopes), job=identity.job, expires_unix_ns=expires)


@router.get("")
async def who_am_i(identity: Annotated[Identity, Depends(Require(Scope.READ))]) -> Session:
    """Who is logged in, and what they may do."""
    return Session(
        name=identity.name,
        scopes=sorted(identity.scopes),
        job=identity.job,
        expires_unix_ns=identity.expires_unix_ns,
    )


@router.delete("", status_code=204)
def log_out(context: Ctx, response: Response, identity: Annotated[Identity, Depends(Require(Scope.READ))]) -> None:
    """End the session; its cookie is worthless from now on."""
    if identity.kind != TokenKind.SESSION:
        raise ProblemError(409, "this is no session; revoke the token instead")
    with write(context.engine) as connection:
        revoke_token(connection, identity.id)
    context.authority.forget()
    _set_cookie(context, response, "", 0)


def _set_cookie(context: Context, response: Response, text: str, max_age_s: int) -> None:
    secure = context.settings.public_url.startswith("https://")
    name = SECURE_COOKIE if secure else COOKIE
    response.set_cookie(name, text, max_age=max_age_s, path="/", secure=secure, httponly=True, samesite="lax")
