"""Access tokens: create, list and revoke them."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import select

from rankwatch_service.access.identities import Identity
from rankwatch_service.access.scopes import Scope
from rankwatch_service.access.tokens import issue_token, revoke_token
from rankwatch_service.api.dependencies.context import Ctx
from rankwatch_service.api.http.authorization import Require
from rankwatch_service.api.http.paging import Page, Wanted, fetch_page
from rankwatch_service.api.http.problem import not_found
from rankwatch_service.names import NAME_CHARS_MAX
from rankwatch_service.store import audit_trail
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import Token as TokenRow

router = APIRouter(prefix="/tokens", tags=["access"])
Admin = Annotated[Identity, Depends(Require(Scope.ADMIN, every_job=True))]

EXPIRES_S_MAX: Final = 400 * 86_400.0


class NewToken(BaseModel):
    """A token to create."""

    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, Field(min_length=1, max_length=NAME_CHARS_MAX)]
    scopes: Annotated[list[Scope], Field(min_length=1)]
    job: Annotated[str, Field(max_length=NAME_CHARS_MAX)] = ""
    """The only job it may access; empty: every job."""
    expires_s: Annotated[float | None, Field(gt=0, le=EXPIRES_S_MAX)] = None
    """Seconds until it expires; null: never."""


class Token(BaseModel):
    """A token, without its secret."""

    id: str
    kind: str
    name: str
    scopes: list[str]
    job: str
    created_unix_ns: int
    expires_unix_ns: int | None
    last_used_unix_ns: int | None
    revoked: bool


class CreatedToken(Token):
    """A new token with its text, which is shown only now."""

    token: str


@router.get("")
def list_tokens(context: Ctx, window: Wanted, _identity: Admin) -> Page[Token]:
    """All tokens, newest first, revoked and expired ones included."""
    with read(context.engine) as connection:
        order = (TokenRow.created_unix_ns, TokenRow.id)
        query = select(TokenRow.__table__)
        return fetch_page(connection, query, order, window, context.cursors, "tokens", Token.model_validate)


@router.post("", status_code=201)
def make_token(body: NewToken, context: Ctx, identity: Admin) -> CreatedToken:
    """Create a token. Does not support Idempotency-Key, since the stored reply would contain the secret."""
    now = context.clock.unix_ns()
    expires = None if body.expires_s is None else now + int(body.expires_s * 1e9)
    with write(context.engine) as connection:
        token_id, text = issue_token(
            connection, identity.actor, body.name, body.scopes, now, job=body.job, expires_unix_ns=expires
        )
        row = connection.execute(select(TokenRow.__table__).where(TokenRow.id == token_id)).mappings().one()
    return CreatedToken(**row, token=text)


@router.delete("/{token_id}", status_code=204)
def revoke(token_id: str, context: Ctx, identity: Admin) -> None:
    """Revoke a token and the sessions that it opened, at once."""
    with write(context.engine) as connection:
        if not revoke_token(connection, token_id):
            raise not_found("token", token_id)
        audit_trail.append(connection, context.clock.unix_ns(), identity.actor, "token.revoke", token_id, "ok")
    context.authenticator.clear_cache()
