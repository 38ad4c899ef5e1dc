"""The lease of the notifier: one of several processes delivers, and another takes over when it is gone.

The holder renews the lease; a process that finds it expired takes it over and raises its epoch. Results are written
only in a transaction that checks the epoch (`confirm`), so a former holder that was suspended and wakes up changes
nothing. Times are those of a database server if there is one, so the hosts' clocks need not agree.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, Engine, select, text, update

from rankwatch_service.clock import Clock
from rankwatch_service.store.engine import upsert, write_aside
from rankwatch_service.store.models import Lease as Row

LEASE_S: Final = 6.0
"""Without a renewal for this long the holder counts as gone. Three times `RENEW_S`, so one renewal may fail."""

LEASE_NS: Final = int(LEASE_S * 1e9)
RENEW_S: Final = 2.0

_DATABASE_TIME: Final = text("SELECT CAST(extract(epoch FROM clock_timestamp()) * 1000000000 AS BIGINT)")


class LeaseLostError(Exception):
    """Another process has taken the lease over: nothing may be written under the old epoch."""


class Lease:
    """One process's claim to a lease. Not thread-safe; `valid` may be read from any thread."""

    def __init__(self, engine: Engine, name: str, clock: Clock, holder: str = "") -> None:
        """Nothing is claimed before `hold`.

        Args:
            engine: the store.
            name: of the lease.
            clock: this machine's.
            holder: identifies this process; the default lets others on this machine see whether it still runs.
        """
        self._engine = engine
        self._name = name
        self._clock = clock
        self._holder = holder or this_process()
        self._epoch = 0
        self._until_s = float("-inf")

    @property
    def valid(self) -> bool:
        """Whether no other process can hold the lease now, by this process's own clock."""
        return self._clock.monotonic_s() < self._until_s

    @property
    def epoch(self) -> int:
        """Counts how often the lease was taken over, as of this process's last claim; 0 before the first."""
        return self._epoch

    def hold(self) -> bool:
        """Renew the lease, or take it if it is free; returns whether this process holds it for the next `LEASE_S`.

        Raises:
            StoreBusyError: the store is busy; a lease that was held stays valid until it expires.
        """
        # Before the transaction, which may wait: our end of the lease must not be later than the database's.
        asked_s = self._clock.monotonic_s()
        with write_aside(self._engine) as connection:
            ours = self._renewed(connection) or self._taken(connection)
        self._until_s = asked_s + LEASE_S if ours else float("-inf")
        return ours

    def confirm(self, connection: Connection) -> None:
        """Make sure, in a write transaction, that this process holds the lease until the transaction commits.

        Raises:
            LeaseLostError: it does not; abort the transaction.
        """
        # An UPDATE and not a SELECT: it locks the row, so nobody can take the lease over before the commit.
        mine = update(Row).where(Row.name == self._name, Row.epoch == self._epoch).values(holder=self._holder)
        if connection.execute(mine).rowcount != 1:
            self._until_s = float("-inf")
            raise LeaseLostError(f"the lease {self._name!r} has another holder now")

    def release(self) -> None:
        """Release the lease, so that another process can acquire it at once."""
        self._until_s = float("-inf")
        with write_aside(self._engine) as connection:
            connection.execute(
                update(Row).where(Row.name == self._name, Row.epoch == self._epoch).values(expires_unix_ns=0)
            )

    def _renewed(self, connection: Connection) -> bool:
        mine = update(Row).where(Row.name == self._name, Row.epoch == self._epoch)
        return connection.execute(mine.values(expires_unix_ns=self._now(connection) + LEASE_NS)).rowcount == 1

    def _taken(self, connection: Connection) -> bool:
        now = self._now(connection)
        claim = {"holder": self._holder, "expires_unix_ns": now + LEASE_NS}
        row = connection.execute(select(Row.__table__).where(Row.name == self._name)).one_or_none()
        if row is None:
            epoch = 1
            done = connection.execute(upsert(connection, Row).values(name=self._name, epoch=epoch, **claim))
        elif row.expires_unix_ns > now and not has_ended(row.holder):
            return False
        else:
            # Compare and set: of two processes that saw the same row, only the first matches it.
            epoch = row.epoch + 1
            seen = (Row.name == self._name, Row.epoch == row.epoch, Row.expires_unix_ns == row.expires_unix_ns)
            done = connection.execute(update(Row).where(*seen).values(epoch=epoch, **claim))
        if done.rowcount != 1:
            return False
        self._epoch = epoch
        return True

    def _now(self, connection: Connection) -> int:
        if connection.dialect.name == "postgresql":
            return int(connection.execute(_DATABASE_TIME).scalar_one())
        return self._clock.unix_ns()


def this_process() -> str:
    """Identifies this process for `has_ended`: host name, its boot, PID namespace, pid, start time."""
    return f"{_machine()} {os.getpid()} {_started(os.getpid())}"


def has_ended(holder: str) -> bool:
    """Whether a process has certainly ended; False if it ran on another machine or in another PID namespace."""
    machine, _, process = holder.rpartition(" ")[0].rpartition(" ")
    started = holder.rpartition(" ")[2]
    return machine == _machine() and process.isdecimal() and _started(int(process)) != started


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"


def _started(pid: int) -> str:
    """When a process started, in clock ticks since boot; "gone" if it does not run. A pid alone may be used again."""
    try:
        # The process name in parentheses may contain spaces, so fields are counted from behind it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "gone"
    return "gone" if fields[0] == "Z" else fields[19]
