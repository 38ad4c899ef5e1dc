"""Access tokens: how they are made, stored and revoked.

A token is the text `rankwatch_KIND_ID_SECRET`. Only the SHA-256 of the secret is stored. The secret is 256 random bits,
so a slow password hash would add nothing. The prefix lets secret scanners find tokens that were committed by mistake.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable
from enum import StrEnum
from hashlib import sha256
from typing import Final, NamedTuple

from sqlalchemy import Connection, insert, update

from rankwatch_service.access.scopes import Scope
from rankwatch_service.store import audit_trail
from rankwatch_service.store.models import Token

PREFIX: Final = "rankwatch"
ID_BYTES: Final = 6
SECRET_BYTES: Final = 32


class TokenKind(StrEnum):
    """What a token was made for. The kind is part of the token's text."""

    API = "api"
    INGEST = "ingest"
    LOCAL = "local"
    """For commands on the machine of `rankwatch up`, which keeps it in a file."""
    LOGIN = "login"
    """Opens one browser session; printed by `rankwatch up`."""
    SESSION = "session"
    """A browser session; the cookie holds it."""


class TokenParts(NamedTuple):
    """The parts of a token's text."""

    kind: str
    id: str
    secret: str


def split_token(text: str) -> TokenParts | None:
    """Split a token's text into its parts; None if it does not have the form of a token."""
    # At most 3 splits, since the secret may contain underscores.
    parts = text.split("_", 3)
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

    Returns:
        Its id and its text. The text cannot be read again later.
    """
    token_id, secret = secrets.token_hex(ID_BYTES), secrets.token_urlsafe(SECRET_BYTES)
    connection.execute(
        insert(Token).values(
            id=token_id,
            kind=kind,
            parent=parent,
            name=name,
            scopes=sorted(scopes),
            job=job,
            secret_sha256=digest(secret),
            created_unix_ns=now_unix_ns,
            expires_unix_ns=expires_unix_ns,
            last_used_unix_ns=None,
            revoked=False,
        )
    )
    return token_id, f"{PREFIX}_{kind}_{token_id}_{secret}"


def issue_token(
    connection: Connection,
    actor: str,
    name: str,
    scopes: Collection[Scope],
    now_unix_ns: int,
    *,
    job: str = "",
    expires_unix_ns: int | None = None,
) -> tuple[str, str]:
    """Create a token that a person asked for, and record it in the audit trail.

    Args:
        connection: of a write transaction.
        actor: who asked for it, as the audit trail names people.
        name: its owner or purpose.
        scopes: what it may be used for; `ingest` alone makes an ingest token.
        now_unix_ns: the time.
        job: the only job it may access; empty: every job.
        expires_unix_ns: when it expires; None: never.

    Returns:
        Its id and its text.
    """
    granted = set(scopes)
    kind = TokenKind.INGEST if granted == {Scope.INGEST} else TokenKind.API
    token_id, text = create_token(
        connection, kind, name, granted, now_unix_ns, job=job, expires_unix_ns=expires_unix_ns
    )
    fields = {"name": name, "scopes": sorted(granted), "job": job}
    audit_trail.append(connection, now_unix_ns, actor, "token.make", token_id, "ok", fields=fields)
    return token_id, text


def revoke_token(connection: Connection, token_id: str) -> bool:
    """Revoke a token and the sessions that it opened; False if there is no such token."""
    these = (Token.id == token_id) | (Token.parent == token_id)
    return connection.execute(update(Token).where(these).values(revoked=True)).rowcount > 0
