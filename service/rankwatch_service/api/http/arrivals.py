"""Connections that were accepted and have not begun, and the pace at which they do.

To begin a connection, read its first request and look up its token costs a thousand times what it costs a client to
connect. So connections that come to nothing have a pace: `BEGUN_AT_ONCE_MAX`, as after a restart, and then
`BEGUN_PER_S`. A client that connects again whenever it is closed takes a part of a core that is known. One for whose
token there was room gives its place back, so that a proxy may connect anew for each request. While they wait,
addresses take turns, and of an address the newest is first, whose client is most likely to wait still.
"""

from __future__ import annotations

import socket
from collections import OrderedDict, deque
from typing import Final, NamedTuple

from rankwatch_service.access.budgets import CONNECTIONS_MAX, Account, account_at
from rankwatch_service.clock import Clock

BEGUN_AT_ONCE_MAX: Final = CONNECTIONS_MAX
BEGUN_PER_S: Final = 128.0
"""How many begin each second once `BEGUN_AT_ONCE_MAX` have; what is not used is saved up to there."""
WAITING_MAX: Final = 1_024
"""Connections that wait to begin, or fewer where there are few descriptors. Beyond, the oldest of the address with most
of them is closed."""


class AcceptedSocket(NamedTuple):
    """A connection that was accepted."""

    accepted: socket.socket
    address: str

    def is_gone(self) -> bool:
        """Whether its client has left."""
        try:
            return not self.accepted.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True


class Arrivals:
    """Those of an api process. For the thread of the event loop only."""

    def __init__(self, clock: Clock, most: int) -> None:
        """Do no I/O.

        Args:
            clock: by which they begin.
            most: connections that wait at a time.
        """
        self._clock = clock
        self._most = most
        self._left, self._at_s = float(BEGUN_AT_ONCE_MAX), clock.monotonic_s()
        self._waiting: OrderedDict[Account, deque[AcceptedSocket]] = OrderedDict()
        """Newest last; whose turn it is first."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, arrival: AcceptedSocket) -> AcceptedSocket | None:
        """Let a connection wait; returns one that makes room for it, for its caller to close."""
        self._waiting.setdefault(account_at(arrival.address), deque()).append(arrival)
        self._count += 1
        if self._count <= self._most:
            return None
        most = max(self._waiting, key=lambda account: len(self._waiting[account]))
        return self._take(most, self._waiting[most].popleft())

    def next(self) -> AcceptedSocket | None:
        """The one that begins now; None if none waits, or none may begin before `wait_s`."""
        if not self._count or self.wait_s():
            return None
        account, waiting = next(iter(self._waiting.items()))
        arrival = self._take(account, waiting.pop())
        if account in self._waiting:
            self._waiting.move_to_end(account)
        return arrival

    def begin(self) -> None:
        """Note that one has begun."""
        self._left -= 1.0

    def give_back(self) -> None:
        """Note that one that has begun has come to something."""
        self._left += 1.0

    def wait_s(self) -> float:
        """Time until the next one may begin; 0.0: now."""
        now_s = self._clock.monotonic_s()
        self._left = min(BEGUN_AT_ONCE_MAX, self._left + (now_s - self._at_s) * BEGUN_PER_S)
        self._at_s = now_s
        return max(0.0, 1.0 - self._left) / BEGUN_PER_S

    def close(self) -> None:
        """Close all that wait."""
        for waiting in self._waiting.values():
            for arrival in waiting:
                arrival.accepted.close()
        self._waiting.clear()
        self._count = 0

    def _take(self, account: Account, arrival: AcceptedSocket) -> AcceptedSocket:
        self._count -= 1
        if not self._waiting[account]:
            del self._waiting[account]
        return arrival
