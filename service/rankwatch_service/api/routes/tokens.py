"""Access tokens: create, list and revoke them."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import RowMapping, select

from rankwatch_service.access.grants import Scope
from rankwatch_service.access.identities import Identity
from rankwatch_service.access.tokens import (
    DEFAULT_S,
    TokenState,
    can_approve,
    issue_token,
    revoke_token,
    token_state,
    with_pin,
)
from rankwatch_service.api.dependencies import Ctx, NameOrNone, Require
from rankwatch_service.api.http.paging import Page, Wanted, fetch_page
from rankwatch_service.api.http.problem import RETRY_AFTER_S, ProblemError, not_found
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.certificate import CertificateError, token_pin
from rankwatch_service.names import NAME_CHARS_MAX
from rankwatch_service.orders.approvals import request_change
from rankwatch_service.policy.actions import MAKE_TOKEN
from rankwatch_service.policy.notification import service_links
from rankwatch_service.store import audit_trail
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import Token as TokenRow
from rankwatch_service.store.settings_rows import read_policy

router = APIRouter(prefix="/tokens", tags=["access"])
Admin = Annotated[Identity, Depends(Require(Scope.ADMIN, every_job=True))]

EXPIRES_S_MAX: Final = 400 * 86_400.0
HOSTS_MAX: Final = 131_072
SHOWN_TO_APPROVER: Final = {"name", "scopes", "job", "project", "expires_s"}


class NewToken(BaseModel):
    """A token to create."""

    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, Field(min_length=1, max_length=NAME_CHARS_MAX)]
    scopes: Annotated[list[Scope], Field(min_length=1)]
    job: NameOrNone = ""
    """The only job it may access; empty: every job."""
    project: NameOrNone = ""
    """The project of jobs that begin by it; unless it is for one job, it may access only the jobs of this project."""
    owner: NameOrNone = ""
    """Owner of the jobs that it starts."""
    expires_s: Annotated[float | None, Field(strict=True, ge=1, le=EXPIRES_S_MAX)] = DEFAULT_S
    """Seconds until it expires; null: never. While agents report with it, a token of scope ingest alone is renewed."""
    hosts_max: Annotated[int | None, Field(strict=True, ge=1, le=HOSTS_MAX)] = None
    """How many agents it admits at a time; null: 131,072, of however many hosts."""


class Token(ApiReply):
    """A token, without its secret."""

    id: str
    kind: str
    name: str
    scopes: list[str]
    job: str
    project: str
    owner: str
    created_unix_ns: int
    expires_unix_ns: int | None
    last_used_unix_ns: int | None
    revoked: bool
    state: TokenState
    """valid, expired, revoked, or waiting until a second person approves it."""
    hosts_max: int | None
    loopback: bool
    """Whether it is valid only on the machine of the service."""


class CreatedToken(Token):
    """A new token with its text, which is shown only now."""

    token: str
    approval: str
    """Id of the command that must be approved before it can be used; empty: none."""


@router.get("")
def list_tokens(context: Ctx, window: Wanted, _identity: Admin) -> Page[Token]:
    """All tokens, newest first, revoked and expired ones included."""
    now = context.clock.unix_ns()

    def shown(row: RowMapping) -> Token:
        return Token.model_validate(_with_state(row, now))

    with read(context.engine) as connection:
        order = (TokenRow.created_unix_ns, TokenRow.id)
        query = select(TokenRow.__table__)
        return fetch_page(connection, query, order, window, context.cursors, "tokens", shown)


@router.post("", status_code=201)
def make_token(body: NewToken, context: Ctx, identity: Admin) -> CreatedToken:
    """Create a token. Does not support Idempotency-Key, since the stored reply would contain the secret.

    If the api's certificate signs itself, a token for agents ends with the certificate's SHA-256, by which agents know
    the api. If the policy has `two_people`, one with scope command or admin can be used after another person has
    approved it (`approval`); all receivers are notified of it.
    """
    certificate = context.settings.tls_cert
    try:
        pin = token_pin(certificate) if certificate and set(body.scopes) == {Scope.INGEST} else ""
    except CertificateError as error:
        raise ProblemError(503, str(error), headers={"Retry-After": str(RETRY_AFTER_S)}) from error
    now = context.clock.unix_ns()
    expires = None if body.expires_s is None else now + int(body.expires_s * 1e9)
    approval = ""
    with write(context.engine) as connection:
        waits = read_policy(connection).two_people and can_approve(body.scopes)
        token_id, text = issue_token(
            connection,
            identity.actor,
            body.name,
            body.scopes,
            now,
            makers=(identity.person, *identity.makers),
            job=body.job,
            expires_unix_ns=expires,
            hosts_max=body.hosts_max,
            project=body.project,
            owner=body.owner,
            admitted=not waits,
        )
        if waits:
            approval = request_change(
                connection,
                MAKE_TOKEN,
                body.model_dump(mode="json", include=SHOWN_TO_APPROVER) | {"token": token_id},
                service_links(context.settings.public_url),
                now,
                requested_by=identity.actor,
                requester=identity.person,
            ).id
        row = connection.execute(select(TokenRow.__table__).where(TokenRow.id == token_id)).mappings().one()
    return CreatedToken(**_with_state(row, now), token=with_pin(text, pin), approval=approval)


@router.delete("/{token_id}", status_code=204)
def revoke(token_id: str, context: Ctx, identity: Admin) -> None:
    """Revoke a token and the sessions that it opened, at once."""
    with write(context.engine) as connection:
        if not revoke_token(connection, token_id):
            raise not_found("token", token_id)
        audit_trail.append(connection, context.clock.unix_ns(), identity.actor, "token.revoke", token_id, "ok")
    context.authenticator.clear_cache()


def _with_state(row: RowMapping, now_unix_ns: int) -> dict[str, Any]:
    return {**row, "state": token_state(row["revoked"], row["admitted"], row["expires_unix_ns"], now_unix_ns)}
