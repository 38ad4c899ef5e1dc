"""The identity behind a token, and the part of the service that finds it."""

from __future__ import annotations

from dataclasses import dataclass
from hmac import compare_digest
from threading import Lock
from typing import Final

from sqlalchemy import Engine, select, update

from rankwatch_service.access.scopes import Scope
from rankwatch_service.access.tokens import digest, split_token
from rankwatch_service.clock import Clock
from rankwatch_service.store.engine import read, write_aside
from rankwatch_service.store.models import Token

CACHE_S: Final = 1.0
"""How long a valid token stays in the cache. A token revoked by another process is refused at most this much later."""

CACHE_MAX: Final = 4_096
"""Tokens in the cache, about 1 MB. A full cache is emptied; each token then costs one query again."""

LAST_USED_EVERY_NS: Final = 300 * 10**9
"""Resolution of `last_used_unix_ns`: a write for each request would cost more than the request."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who sent a request."""

    id: str
    kind: str
    name: str
    scopes: frozenset[str]
    job: str
    """The only job it may access; empty: every job."""
    expires_unix_ns: int | None
    by_cookie: bool = False

    @property
    def actor(self) -> str:
        """Its name in the audit trail."""
        return f"{self.name} ({self.id})"

    def holds(self, scope: Scope) -> bool:
        """Whether its token grants this scope."""
        return scope in self.scopes or Scope.ADMIN in self.scopes

    def may_see(self, job: str) -> bool:
        """Whether it may access this job."""
        return self.job in ("", job)


class Authenticator:
    """Finds the identity behind a token, with a short-lived cache. Thread-safe."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        """Do no I/O yet.

        Args:
            engine: of a database with this version's tables.
            clock: decides when tokens and cache entries expire.
        """
        self._engine = engine
        self._clock = clock
        self._cache: dict[str, tuple[float, Identity]] = {}
        self._last_used: dict[str, int] = {}
        self._lock = Lock()

    def cached(self, text: str) -> Identity | None:
        """The identity of a token that was valid less than `CACHE_S` ago; does no I/O."""
        # Without the lock: a look-up in a dict is atomic.
        entry = self._cache.get(digest(text))
        if entry is None or self._clock.monotonic_s() - entry[0] > CACHE_S:
            return None
        return entry[1]

    def knows(self, text: str) -> bool:
        """Whether this token was valid some time ago: its holder does not guess. Does no I/O."""
        return digest(text) in self._cache

    def authenticate(self, text: str) -> Identity | None:
        """The identity of a token; None if it is unknown, revoked, expired or malformed. One query."""
        parts = split_token(text)
        if parts is None:
            return None
        with read(self._engine) as connection:
            row = connection.execute(select(Token.__table__).where(Token.id == parts.id)).one_or_none()
        now = self._clock.unix_ns()
        # Compare even without a row, so that the response time does not reveal which ids exist.
        matches = compare_digest(row.secret_sha256 if row else "", digest(parts.secret))
        if row is None or not matches or row.kind != parts.kind or row.revoked:
            return None
        if row.expires_unix_ns is not None and now >= row.expires_unix_ns:
            return None
        identity = Identity(row.id, row.kind, row.name, frozenset(row.scopes), row.job, row.expires_unix_ns)
        with self._lock:
            if len(self._cache) >= CACHE_MAX:
                self._cache.clear()
            self._cache[digest(text)] = (self._clock.monotonic_s(), identity)
            if now - (row.last_used_unix_ns or 0) > LAST_USED_EVERY_NS:
                self._last_used[row.id] = now
        return identity

    def clear_cache(self) -> None:
        """Query every token again; call it after a token was revoked."""
        with self._lock:
            self._cache.clear()

    def store_last_used(self) -> None:
        """Write when tokens were last used, for those whose stored time is older than `LAST_USED_EVERY_NS`."""
        with self._lock:
            last_used, self._last_used = self._last_used, {}
        if last_used:
            with write_aside(self._engine) as connection:
                # In the order of their keys, as `write_aside` requires.
                for token_id, at_unix_ns in sorted(last_used.items()):
                    connection.execute(update(Token).where(Token.id == token_id).values(last_used_unix_ns=at_unix_ns))
