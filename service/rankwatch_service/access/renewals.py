"""Renews the tokens of agents while enrolled agents report with them. A token that nobody uses expires."""

from __future__ import annotations

from threading import Lock
from typing import Final

import structlog
from sqlalchemy import Engine

from rankwatch_service.access.identities import Authenticator, Identity
from rankwatch_service.access.tokens import renew_token
from rankwatch_service.clock import Clock
from rankwatch_service.store.engine import write
from rankwatch_service.store.errors import StoreError

PAUSE_S: Final = 60.0
"""Time between two tries to renew one token: all its agents ask for it at the same moment."""

TRIED_MAX: Final = 4_096
"""Tokens of which the last try is remembered: as many as the authenticator remembers."""

_log = structlog.get_logger(__name__)


class Renewals:
    """The renewals of this process. Thread-safe."""

    def __init__(self, engine: Engine, authenticator: Authenticator, clock: Clock) -> None:
        """Do no I/O yet.

        Args:
            engine: of a database with this version's tables.
            authenticator: remembers when tokens expire.
            clock: decides what is due.
        """
        self._engine = engine
        self._authenticator = authenticator
        self._clock = clock
        self._tried_s: dict[str, float] = {}
        self._lock = Lock()

    def reported(self, identity: Identity) -> None:
        """Renew the token with which an enrolled agent has just reported, if less than half its lifetime is left.

        A failure of the database is logged: the agent's message does not depend on this, and the next one tries again.
        """
        if identity.lasts_ns is None or identity.expires_unix_ns is None:
            return
        now = self._clock.unix_ns()
        if 2 * (identity.expires_unix_ns - now) >= identity.lasts_ns or not self._may_try(identity.id):
            return
        try:
            with write(self._engine) as connection:
                renewed = renew_token(connection, identity.id, identity.actor, identity.expires_unix_ns, now)
        except StoreError as error:
            _log.warning("token_not_renewed", token=identity.id, reason=str(error))
            return
        if renewed:
            self._authenticator.clear_cache()

    def _may_try(self, token_id: str) -> bool:
        now_s = self._clock.monotonic_s()
        with self._lock:
            last_s = self._tried_s.get(token_id)
            if last_s is not None and now_s - last_s < PAUSE_S:
                return False
            if len(self._tried_s) >= TRIED_MAX:
                self._tried_s.clear()
            self._tried_s[token_id] = now_s
            return True
