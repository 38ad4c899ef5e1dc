"""Access tokens: how they are made, stored and revoked.

A token is the text `rankwatch_KIND_ID_SECRET`. Only the SHA-256 of the secret is stored. The secret is 256 random bits,
so a slow password hash would add nothing. The prefix lets secret scanners find tokens that were committed by mistake.

Those of agents end with `.kKEY`: the enrolment key, which agents never send, and by which the service proves to them
that it has issued the token. A token that names the service's certificate ends with `.PIN` instead.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum
from hashlib import sha256
from typing import Final, Literal, NamedTuple

from sqlalchemy import Connection, insert, select, update

from rankwatch_service.access.grants import GroupGrant, Scope
from rankwatch_service.store import audit_trail
from rankwatch_service.store.models import Token

PREFIX: Final = "rankwatch"
LOCAL_NAME: Final = "commands on this machine"
LOGIN_NAME: Final = "first login"
DEFAULT_S: Final = 90 * 86_400
"""Lifetime of a token for which nobody asked for another: a quarter, as of most providers' tokens of people."""

RENEWED_MIN_S: Final = 7_200
"""Shortest lifetime of a token that agents renew. As it moves on by its lifetime when less than half of that is left,
this is at most once an hour."""

ID_BYTES: Final = 6
SECRET_BYTES: Final = 32
ENROLMENT_KEY_BYTES: Final = 16


class TokenKind(StrEnum):
    """What a token was made for. The kind is part of the token's text."""

    API = "api"
    INGEST = "ingest"
    JOB = "job"
    """For the agents of one job, of a stated number of hosts."""
    LOCAL = "local"
    """For commands on the machine of `rankwatch up`, which keeps it in a file."""
    LOGIN = "login"
    """Opens one browser session; printed by `rankwatch up`."""
    SESSION = "session"
    """A browser session; the cookie holds it."""


OF_AGENTS: Final = frozenset((TokenKind.INGEST, TokenKind.JOB))


class TokenParts(NamedTuple):
    """The parts of a token's text."""

    kind: str
    id: str
    secret: str


def split_token(text: str) -> TokenParts | None:
    """Split a token's text, without what follows its dot, into its parts; None if it does not have this form."""
    # At most 3 splits, since the secret may contain underscores.
    parts = text.partition(".")[0].split("_", 3)
    return TokenParts(*parts[1:]) if len(parts) == 4 and parts[0] == PREFIX else None


def digest(text: str) -> str:
    """The SHA-256 of a secret or a token, in hexadecimal."""
    return sha256(text.encode()).hexdigest()


def create_token(
    connection: Connection,
    kind: TokenKind,
    name: str,
    scopes: Iterable[Scope],
    now_unix_ns: int,
    *,
    job: str = "",
    expires_unix_ns: int | None = None,
    parent: str = "",
    hosts_max: int | None = None,
    loopback: bool = False,
    lasts_ns: int | None = None,
    person: str = "",
    grants: Sequence[GroupGrant] = (),
    project: str = "",
    owner: str = "",
    makers: Sequence[str] = (),
    admitted: bool = True,
) -> tuple[str, str]:
    """Add a token in a write transaction.

    Args:
        connection: of a write transaction.
        kind: what it is for.
        name: its owner or purpose, for people.
        scopes: what it may be used for.
        now_unix_ns: the time.
        job: the only job it may access; empty: every job.
        expires_unix_ns: when it expires; None: never.
        parent: id of the token that opened this session; revoking the parent revokes the session.
        hosts_max: how many agents it admits at a time; None: `AGENTS_MAX`.
        loopback: whether it is good on the machine of the service only.
        lasts_ns: by how much its expiry moves on while enrolled agents report with it; None: it does not.
        person: who has logged in with the OIDC provider, for their session.
        grants: what this person's groups allow.
        project: of the jobs that begin by it; unless it is for one job, the only ones that it may access. Empty: none.
        owner: of the jobs that begin by it; empty: nobody.
        makers: who has made it, who has made the token that they used, and so on.
        admitted: it can be used; False: after `admit_token` has admitted it.

    Returns:
        Its id and its text. The text cannot be read again later.
    """
    token_id, secret = secrets.token_hex(ID_BYTES), secrets.token_urlsafe(SECRET_BYTES)
    granted = frozenset(scopes)
    enrols = kind in OF_AGENTS or (kind is TokenKind.API and not granted.isdisjoint((Scope.INGEST, Scope.ADMIN)))
    enrolment_key = secrets.token_hex(ENROLMENT_KEY_BYTES) if enrols else ""
    connection.execute(
        insert(Token).values(
            id=token_id,
            kind=kind,
            parent=parent,
            name=name,
            scopes=sorted(granted),
            job=job,
            secret_sha256=digest(secret),
            enrolment_key=enrolment_key,
            created_unix_ns=now_unix_ns,
            expires_unix_ns=expires_unix_ns,
            last_used_unix_ns=None,
            revoked=False,
            hosts_max=hosts_max,
            loopback=loopback,
            lasts_ns=lasts_ns,
            person=person,
            grants=[grant.stored() for grant in grants],
            project=project,
            owner=owner,
            makers=list(dict.fromkeys(makers)),
            admitted=admitted,
        )
    )
    text = f"{PREFIX}_{kind}_{token_id}_{secret}"
    return token_id, f"{text}.k{enrolment_key}" if enrolment_key else text


def with_pin(text: str, pin: str) -> str:
    """A token's text that names the service's certificate, which then proves the service; as it is without a pin."""
    return f"{text.partition('.')[0]}.{pin}" if pin else text


def issue_token(
    connection: Connection,
    actor: str,
    name: str,
    scopes: Collection[Scope],
    now_unix_ns: int,
    *,
    makers: Sequence[str],
    job: str = "",
    expires_unix_ns: int | None = None,
    hosts_max: int | None = None,
    project: str = "",
    owner: str = "",
    admitted: bool = True,
) -> tuple[str, str]:
    """Create a token that a person asked for, and record it in the audit trail.

    Args:
        connection: of a write transaction.
        actor: who asked for it, as the audit trail names people.
        name: its owner or purpose.
        scopes: what it may be used for; `ingest` alone makes an ingest token, or for one job the token of that job.
        now_unix_ns: the time.
        makers: as of `create_token`, whoever asked for it first.
        job: the only job it may access; empty: every job.
        expires_unix_ns: when it expires; None: never.
        hosts_max: how many agents it admits at a time; None: `AGENTS_MAX`.
        project: of the jobs that begin by it; unless it is for one job, the only ones that it may access. Empty: none.
        owner: of the jobs that begin by it; empty: nobody.
        admitted: as of `create_token`.

    Returns:
        Its id and its text.
    """
    granted = set(scopes)
    of_agents = TokenKind.JOB if job else TokenKind.INGEST
    kind = of_agents if granted == {Scope.INGEST} else TokenKind.API
    lasts_ns = None if expires_unix_ns is None or kind not in OF_AGENTS else expires_unix_ns - now_unix_ns
    token_id, text = create_token(
        connection,
        kind,
        name,
        granted,
        now_unix_ns,
        job=job,
        expires_unix_ns=expires_unix_ns,
        hosts_max=hosts_max,
        lasts_ns=lasts_ns if lasts_ns is not None and lasts_ns >= RENEWED_MIN_S * 10**9 else None,
        project=project,
        owner=owner,
        makers=makers,
        admitted=admitted,
    )
    fields = {
        "name": name,
        "scopes": sorted(granted),
        "job": job,
        "hosts_max": hosts_max,
        "expires_unix_ns": expires_unix_ns,
    }
    fields |= {name: text for name, text in (("project", project), ("owner", owner)) if text}
    audit_trail.append(connection, now_unix_ns, actor, "token.make", token_id, "ok", fields=fields)
    return token_id, text


def makers_of(connection: Connection, actor: str) -> Sequence[str]:
    """The actor that made the token of an actor, and so on; empty if the actor used no token.

    Args:
        connection: of any transaction.
        actor: as the audit trail names it, NAME (ID).
    """
    token_id = actor.rpartition(" (")[2].removesuffix(")")
    return connection.scalar(select(Token.makers).where(Token.id == token_id)) or ()


def can_approve(scopes: Collection[str]) -> bool:
    """Whether who holds these scopes can approve commands, or make a token that can."""
    return not {Scope.COMMAND, Scope.ADMIN}.isdisjoint(scopes)


def admit_token(connection: Connection, token_id: str) -> bool:
    """Make a token valid, in a write transaction; False if it was revoked or removed."""
    waiting = update(Token).where((Token.id == token_id) & ~Token.revoked).values(admitted=True)
    return connection.execute(waiting).rowcount == 1


TokenState = Literal["valid", "waiting", "expired", "revoked"]


def token_state(revoked: bool, admitted: bool, expires_unix_ns: int | None, now_unix_ns: int) -> TokenState:
    """valid, waiting (for an approval), revoked or expired."""
    if revoked:
        return "revoked"
    if expires_unix_ns is not None and now_unix_ns >= expires_unix_ns:
        return "expired"
    return "valid" if admitted else "waiting"


def renew_token(connection: Connection, token_id: str, actor: str, expires_unix_ns: int, now_unix_ns: int) -> bool:
    """Move the expiry of a token on by its lifetime, and record it in the audit trail.

    Args:
        connection: of a write transaction.
        token_id: of the token.
        actor: its name in the audit trail.
        expires_unix_ns: when it expires now. If somebody else has changed this meanwhile, nothing is done.
        now_unix_ns: the time.

    Returns:
        False if it was revoked, has expired, or was renewed meanwhile.
    """
    unchanged = (Token.id == token_id) & (Token.expires_unix_ns == expires_unix_ns) & ~Token.revoked
    renewed = update(Token).where(unchanged & Token.lasts_ns.is_not(None) & (Token.expires_unix_ns > now_unix_ns))
    renewed = renewed.values(expires_unix_ns=Token.expires_unix_ns + Token.lasts_ns)
    moved_unix_ns = connection.scalar(renewed.returning(Token.expires_unix_ns))
    if moved_unix_ns is None:
        return False
    fields = {"expires_unix_ns": moved_unix_ns}
    audit_trail.append(connection, now_unix_ns, actor, "token.renew", token_id, "ok", fields=fields)
    return True


def revoke_token(connection: Connection, token_id: str) -> bool:
    """Revoke a token and the sessions that it opened; False if there is no such token."""
    these = (Token.id == token_id) | (Token.parent == token_id)
    return connection.execute(update(Token).where(these).values(revoked=True)).rowcount > 0
