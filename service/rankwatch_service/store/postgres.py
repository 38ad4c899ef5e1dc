"""What only PostgreSQL needs: limits, time-outs, turns of writers, and which errors are temporary."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import URL, Connection, text
from sqlalchemy.exc import DBAPIError

CONNECTIONS_MAX: Final = 16
"""Connections of one process: five processes use 80 of the 100 that a server accepts by default."""

CONNECTIONS_KEPT: Final = 4
"""Connections that stay open while they are unused."""

POOL_WAIT_S: Final = 5.0
"""Longest wait for a free connection."""

CONNECT_TIMEOUT_S: Final = 5
STATEMENT_TIMEOUT_S: Final = 30
"""Longest statement; the longest known one, a month's series, takes a second."""

IDLE_TIMEOUT_S: Final = 10
"""A process that stands still within a transaction (SIGSTOP, swapping) loses it after this time, and its turn."""

LOCK_TIMEOUT_S: Final = 15
"""Longest wait for a turn: longer than a process that stands still can hold it."""

ANSWER_TIMEOUT_S: Final = 45
"""Longest silence of a server. A server that works has answered by then, if only with one of the time-outs above."""

KEEPALIVE_S: Final = 5
"""A server that disappeared (power, network) is noticed after four times this."""

CHANNEL: Final = "rankwatch"
"""Where writes are announced. Channels belong to one database each."""

READ_ONLY: Final = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
"""Options of reading transactions: all queries of a block see one state."""

_TURN: Final = 0x72616E6B
"""Key of the advisory lock that writers take one after the other: "rank" in ASCII."""

# One statement for both: each would cost a round trip.
_TAKE_TURN: Final = text("SELECT pg_advisory_xact_lock(:key), pg_notify(:channel, '')")

_PASSING: Final = frozenset(
    {
        "25006",  # read-only: the server is a standby now, the address will lead to the new primary
        "25P03",  # idle for too long within a transaction
        "40001",  # could not be serialised
        "40P01",  # deadlock
        "53300",  # too many connections
        "55P03",  # lock not available in time
        "57014",  # statement took too long
    }
)
"""SQLSTATEs of temporary errors, besides those that psycopg raises as OperationalError."""


def connect_arguments(url: URL, role: str) -> dict[str, Any]:
    """The arguments for psycopg to connect: a name and time-outs. `options` in the URL come last and so win.

    Args:
        url: of the database.
        role: shown in pg_stat_activity.
    """
    limits = {
        "statement_timeout": STATEMENT_TIMEOUT_S,
        "idle_in_transaction_session_timeout": IDLE_TIMEOUT_S,
        "lock_timeout": LOCK_TIMEOUT_S,
    }
    ours = " ".join(f"-c {name}={seconds}s" for name, seconds in limits.items())
    return {
        "application_name": f"rankwatch {role}".strip(),
        "connect_timeout": CONNECT_TIMEOUT_S,
        "keepalives_idle": KEEPALIVE_S,
        "keepalives_interval": KEEPALIVE_S,
        "keepalives_count": 3,
        "tcp_user_timeout": 4_000 * KEEPALIVE_S,  # milliseconds
        "options": f"{ours} {url.query.get('options', '')}".strip(),
    }


def take_turn(connection: Connection) -> None:
    """Wait for the turn to write, keep it to the end of the transaction, and announce the write when it commits."""
    connection.execute(_TAKE_TURN, {"key": _TURN, "channel": CHANNEL})


def lift_limits(connection: Connection) -> None:
    """Lift the time limits of this transaction: a migration may rewrite tables."""
    driver: Any = connection.connection.driver_connection
    driver.answer_within_s = float("inf")
    for name in ("statement_timeout", "idle_in_transaction_session_timeout"):
        connection.execute(text(f"SET LOCAL {name} = 0"))


def may_pass(error: DBAPIError) -> bool:
    """Whether an error of the server is temporary, so that trying again may help."""
    return getattr(error.orig, "sqlstate", None) in _PASSING
