"""Tokens that are kept in files on the machine of the service: one for agents, one for commands on this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from sqlalchemy import Engine

from rankwatch_service.access.grants import Scope
from rankwatch_service.access.identities import Authenticator
from rankwatch_service.access.tokens import LOCAL_NAME, TokenKind, create_token
from rankwatch_service.clock import Clock
from rankwatch_service.policy.control_records import JobOwnership
from rankwatch_service.store import audit_trail
from rankwatch_service.store.engine import write

FILE_TOKENS: Final[Mapping[TokenKind, tuple[str, Scope]]] = {
    TokenKind.INGEST: ("collectors", Scope.INGEST),
    TokenKind.LOCAL: (LOCAL_NAME, Scope.ADMIN),
}
"""Name and scope of each kind. Whoever can read the local token's file can also read the database next to it."""


def ensure_token_file(engine: Engine, path: Path, clock: Clock, kind: TokenKind) -> str:
    """Read the token in a file; if it is missing or no longer valid, create one and write it there.

    It is good on this machine only; one that is good everywhere is replaced.

    Args:
        engine: of a database with this version's tables.
        path: of the file; only its owner can read it afterwards.
        clock: for the token's creation time.
        kind: `INGEST` (agents) or `LOCAL` (commands on this machine).

    Returns:
        The token's text.

    Raises:
        OSError: the file cannot be read or written.
    """
    stored = path.read_text().strip() if path.exists() else ""
    if stored and (found := Authenticator(engine, clock).authenticate(stored)) is not None and found.loopback:
        return stored
    now = clock.unix_ns()
    name, scope = FILE_TOKENS[kind]
    with write(engine) as connection:
        token_id, text = create_token(connection, kind, name, [scope], now, loopback=True)
        audit_trail.append(connection, now, "up", "token.make", token_id, "ok", fields={"kind": kind})
    write_secret(path, text + "\n")
    return text


def is_lasting_token_of(engine: Engine, path: Path, clock: Clock, whose: JobOwnership, pin: str, left_ns: int) -> bool:
    """Whether a file holds a valid token of the agents of this job, with this pin, that is good for longer than this.

    It must also pass on the same project and owner.

    Raises:
        OSError: the file cannot be read.
    """
    text = path.read_text().strip() if path.exists() else ""
    found = Authenticator(engine, clock).authenticate(text)
    end = text.partition(".")[2]
    return (
        found is not None
        and JobOwnership(found.jobs.only, found.project, found.owner) == whose
        and (end == pin if pin else end == f"k{found.enrolment_key.hex()}")
        and (found.expires_unix_ns is None or found.expires_unix_ns - clock.unix_ns() > left_ns)
    )


def write_secret(path: Path, content: str) -> None:
    """Replace a file atomically; only its owner can read it."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    # Created with its final mode, so that others cannot read it even for a moment.
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(content)
    fresh.replace(path)
