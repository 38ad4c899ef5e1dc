"""Who may do what: tokens, scopes, and the identity of a request.

A token is `rankwatch_KIND_ID_SECRET`. Only the SHA-256 of the secret is stored: it has 256 bits, so that a slow hash
would protect nothing. The prefix lets scanners find tokens that were committed by mistake.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from hmac import compare_digest
from threading import Lock
from typing import Final

from fastapi import Request
from sqlalchemy import Connection, Engine, insert, select, update

from rankwatch_service.api.http.problem import ProblemError
from rankwatch_service.clock import Clock
from rankwatch_service.store.engine import read, write_aside
from rankwatch_service.store.models import Token

PREFIX: Final = "rankwatch"
ID_BYTES: Final = 6
SECRET_BYTES: Final = 32

CACHE_S: Final = 1.0
"""How long a token that was found valid is taken to be: a revocation elsewhere counts a second later."""

CACHE_MAX: Final = 4_096
"""Tokens in that cache, about 1 MB; then it is emptied, and each costs a look-up again."""

USED_EVERY_NS: Final = 300 * 10**9
"""How exactly `last_used` is kept: a write for each request would cost more than the request."""


class Scope(StrEnum):
    """What a token is good for. `admin` includes all others."""

    INGEST = "ingest"
    READ = "read"
    OPERATE = "operate"
    """Acknowledge, resolve, comment, silence."""
    COMMAND = "command"
    ADMIN = "admin"


class TokenKind(StrEnum):
    """How a token came to be. The kind is part of the token's text."""

    API = "api"
    INGEST = "ingest"
    LOCAL = "local"
    """For commands on the machine of `up`, which keeps it."""
    LOGIN = "login"
    """Good for one browser login; printed by `up`."""
    SESSION = "session"
    """A browser's."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who sent a request."""

    id: str
    kind: str
    name: str
    scopes: frozenset[str]
    job: str
    """The only job it may touch; empty: every job."""
    expires_unix_ns: int | None
    by_cookie: bool = False

    @property
    def actor(self) -> str:
        """As it stands in the audit trail."""
        return f"{self.name} ({self.id})"

    def holds(self, scope: Scope) -> bool:
        """Whether it has this scope."""
        return scope in self.scopes or Scope.ADMIN in self.scopes

    def may_see(self, job: str) -> bool:
        """Whether it may touch this job at all."""
        return self.job in ("", job)


class Authority:
    """Recognises tokens. Thread-safe."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._known: dict[str, tuple[float, Identity]] = {}
        self._used: dict[str, int] = {}
        self._lock = Lock()

    def recall(self, text: str) -> Identity | None:
        """The identity behind a token that was looked up a moment ago; does no I/O."""
        found = self._known.get(_digest(text))
        if found is None or self._clock.monotonic_s() - found[0] > CACHE_S:
            return None
        return found[1]

    def identify(self, text: str) -> Identity | None:
        """The identity behind a token; None for one that is unknown, revoked, expired or no token at all."""
        parts = text.split("_", 3)
        if len(parts) != 4 or parts[0] != PREFIX:
            return None
        _, kind, token_id, secret = parts
        with read(self._engine) as connection:
            row = connection.execute(select(Token.__table__).where(Token.id == token_id)).one_or_none()
        now = self._clock.unix_ns()
        # Compared even where no row was found, so that the time taken does not tell which ids exist.
        matches = compare_digest(row.secret_sha256 if row else "", _digest(secret))
        if row is None or not matches or row.kind != kind or row.revoked:
            return None
        if row.expires_unix_ns is not None and now >= row.expires_unix_ns:
            return None
        identity = Identity(row.id, row.kind, row.name, frozenset(row.scopes), row.job, row.expires_unix_ns)
        with self._lock:
            if len(self._known) >= CACHE_MAX:
                self._known.clear()
            self._known[_digest(text)] = (self._clock.monotonic_s(), identity)
            if now - (row.last_used_unix_ns or 0) > USED_EVERY_NS:
                self._used[row.id] = now
        return identity

    def forget(self) -> None:
        """Look every token up again: one was revoked."""
        with self._lock:
            self._known.clear()

    def store_last_used(self) -> None:
        """Write when tokens were last used, those for which it changed enough."""
        with self._lock:
            used, self._used = self._used, {}
        if used:
            with write_aside(self._engine) as connection:
                for token_id, at_unix_ns in sorted(used.items()):
                    connection.execute(update(Token).where(Token.id == token_id).values(last_used_unix_ns=at_unix_ns))


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
    """Make a token in a writing transaction; return its id and its text, which nobody can read again later."""
    token_id, secret = secrets.token_hex(ID_BYTES), secrets.token_urlsafe(SECRET_BYTES)
    connection.execute(
        insert(Token).values(
            id=token_id,
            kind=kind,
            parent=parent,
            name=name,
            scopes=sorted(scopes),
            job=job,
            secret_sha256=_digest(secret),
            created_unix_ns=now_unix_ns,
            expires_unix_ns=expires_unix_ns,
            last_used_unix_ns=None,
            revoked=False,
        )
    )
    return token_id, f"{PREFIX}_{kind}_{token_id}_{secret}"


def revoke_token(connection: Connection, token_id: str) -> bool:
    """Make a token and the sessions it opened worthless; False if there is none such."""
    these = (Token.id == token_id) | (Token.parent == token_id)
    return connection.execute(update(Token).where(these).values(revoked=True)).rowcount > 0


class Require:
    """Dependency of a route: the request's identity, which must hold a scope.

    With `every_job` it must not be restricted to one job, since what the route touches belongs to none.
    """

    def __init__(self, scope: Scope, *, every_job: bool = False) -> None:
        self.scope = scope
        self.every_job = every_job

    def __call__(self, request: Request) -> Identity:
        """The identity, or the problem with it."""
        identity: Identity | None = request.scope.get("identity")
        if identity is None:
            raise ProblemError(401, "a token is needed", headers={"WWW-Authenticate": "Bearer"})
        if not identity.holds(self.scope):
            raise ProblemError(403, f"this needs a token with scope {self.scope}")
        if self.every_job and identity.job:
            raise ProblemError(403, f"this token is for job {identity.job!r} only")
        job = request.path_params.get("job")
        if job is not None and not identity.may_see(job):
            raise ProblemError(404, f"there is no job {job!r}")
        return identity


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()
