"""Whose request is worked on next.

An api process has one interpreter, so what one token asks for delays all others. Requests that have come as a whole
therefore take turns: a few are worked on at a time, and once as many are, the next turn is of an account that has none,
and of those of whoever was worked for least lately. So a token that asks without a pause, or for what takes long, waits
for itself. A turn ends when the answer begins, when a request waits for others, or after `TURN_S`. What takes longer is
late: it lets others work, and an account with `LATE_MAX` late requests has no further turn before one of them is
answered, so that none fills the threads, or takes the interpreter from all others by many of them at once. Accounts
that are busy all the time have a part of the turns of agents together; the rest is for those that ask little.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from threading import Lock
from typing import Final

from rankwatch_service.access.budgets import Account
from rankwatch_service.clock import Clock

TURNS_MAX: Final = 4
"""Requests that are worked on at a time: as many threads share the interpreter without delaying each other by much."""
TURN_S: Final = 0.1
SWITCH_S: Final = 0.0002
"""How long a thread may keep the interpreter while others wait: the event loop and each short request need it many
times, and would wait Python's 5 ms each time while a long request computes."""
BUSY_S: Final = 4.0
"""An account for which this much was done lately is busy: with `USE_S`, one that has a tenth of all turns."""
BUSY_TURNS_MAX: Final = 1
"""Turns of all busy accounts together, so that who asks little never waits for who asks a lot. One is enough to use the
interpreter, since a turn is over while a request waits for the store."""
LATE_MAX: Final = 2
"""Requests of an account of which one is late: each delays all others by as much as one that is worked on."""
USE_S: Final = 10.0
"""After this time what was done for an account counts for a third as much."""
USE_FORGOTTEN_S: Final = 60.0


class RequestTurn:
    """A request that is worked on."""

    def __init__(self, turns: Turns, account: Account, loop: asyncio.AbstractEventLoop) -> None:
        self._turns = turns
        self._account = account
        self._clock = turns.clock
        self._since_s = self._clock.monotonic_s()
        self._is_late = self._has_ended = False
        self._over = loop.call_later(TURN_S, self._let_others)

    def end(self) -> None:
        """The request is answered, or takes no thread any more; without effect if this has ended already."""
        if not self._has_ended:
            self._has_ended = True
            self._over.cancel()
            self._turns.end(self._account, self._took_s(), was_late=self._is_late)

    def _let_others(self) -> None:
        self._is_late = True
        self._turns.be_late(self._account, self._took_s())

    def _took_s(self) -> float:
        """Since the last call, or the beginning of the turn."""
        before_s, self._since_s = self._since_s, self._clock.monotonic_s()
        return self._since_s - before_s


class Turns:
    """The requests of an api process. Thread-safe, for event loops of several threads."""

    def __init__(self, clock: Clock, waited: Callable[[Account], None], busy_most: int = TURNS_MAX) -> None:
        """Do no I/O.

        Args:
            clock: measures how long requests take.
            waited: called with the account of each request that had to wait.
            busy_most: turns of all busy accounts together.
        """
        self.clock = clock
        self._waited = waited
        self._busy_most = busy_most
        self._used: OrderedDict[Account, tuple[float, float]] = OrderedDict()
        """Seconds for which an account was worked for, and as of when; in the order of the last use."""
        self._working: Counter[Account] = Counter()
        self._late: Counter[Account] = Counter()
        self._free = TURNS_MAX
        self._lock = Lock()
        self._waiting: OrderedDict[Account, deque[asyncio.Future[None]]] = OrderedDict()

    async def begin(self, account: Account) -> RequestTurn:
        """Wait for a turn."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._free and self._may_work(account):
                self._start(account)
                return RequestTurn(self, account, loop)
            turn = loop.create_future()
            self._waiting.setdefault(account, deque()).append(turn)
        self._waited(account)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.end(account)
            else:
                self._leave(account, turn)
            raise
        return RequestTurn(self, account, loop)

    def be_late(self, account: Account, took_s: float) -> None:
        """A turn of this account is over, and its request is not answered."""
        with self._lock:
            self._charge(account, took_s)
            self._late[account] += 1
            self._stop(account)
            following = list(self._following())
        self._grant_all(following)

    def end(self, account: Account, took_s: float = 0.0, *, was_late: bool = False) -> None:
        """A request of this account is answered."""
        with self._lock:
            self._charge(account, took_s)
            if was_late:
                self._late[account] -= 1
                if not self._late[account]:
                    del self._late[account]
            else:
                self._stop(account)
            following = list(self._following())
        self._grant_all(following)

    def _following(self) -> Iterator[tuple[Account, asyncio.Future[None]]]:
        while self._free:
            may = [one for one in self._waiting if self._may_work(one)]
            account = min(may, key=lambda one: (self._working[one], self._use_s(one)), default=None)
            if account is None:
                return
            self._start(account)
            turn = self._waiting[account].popleft()
            if self._waiting[account]:
                self._waiting.move_to_end(account)
            else:
                del self._waiting[account]
            yield account, turn

    def _grant_all(self, following: list[tuple[Account, asyncio.Future[None]]]) -> None:
        for account, turn in following:
            turn.get_loop().call_soon_threadsafe(self._grant, account, turn)

    def _grant(self, account: Account, turn: asyncio.Future[None]) -> None:
        if turn.cancelled():  # its client has gone away in the meantime
            self.end(account)
        else:
            turn.set_result(None)

    def _may_work(self, account: Account) -> bool:
        late = self._late[account]
        if late and late + self._working[account] >= LATE_MAX:
            return False
        busy = sum(turns for one, turns in self._working.items() if self._is_busy(one))
        return busy < self._busy_most or not self._is_busy(account)

    def _is_busy(self, account: Account) -> bool:
        return self._use_s(account) >= BUSY_S

    def _use_s(self, account: Account) -> float:
        used_s, at_s = self._used.get(account, (0.0, 0.0))
        return used_s * math.exp((at_s - self.clock.monotonic_s()) / USE_S)

    def _charge(self, account: Account, took_s: float) -> None:
        now_s = self.clock.monotonic_s()
        while self._used and now_s - next(iter(self._used.values()))[1] > USE_FORGOTTEN_S:
            self._used.popitem(last=False)
        self._used[account] = self._use_s(account) + took_s, now_s
        self._used.move_to_end(account)

    def _start(self, account: Account) -> None:
        self._free -= 1
        self._working[account] += 1

    def _stop(self, account: Account) -> None:
        self._free += 1
        self._working[account] -= 1
        if not self._working[account]:
            del self._working[account]

    def _leave(self, account: Account, turn: asyncio.Future[None]) -> None:
        with self._lock:
            waiting = self._waiting.get(account, deque())
            if turn in waiting:
                waiting.remove(turn)
                if not waiting:
                    del self._waiting[account]
