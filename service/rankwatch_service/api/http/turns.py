"""Whose request is worked on next.

An api process has one interpreter, so what one token asks for delays all others. Requests that have come as a whole
therefore take turns: a few are worked on at a time, and once as many are, the next turn is of an account that has none,
in the order in which accounts began to wait. So a token that asks without a pause waits for itself. A turn ends when
the answer begins, when a batch waits to be stored, or after `TURN_S`. What takes longer is late: it lets others work,
and an account with `LATE_MAX` late requests has no further turn before one of them is answered, so that none fills the
threads in which requests wait for the database.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from threading import Lock
from typing import Final

from rankwatch_service.access.budgets import Account

TURNS_MAX: Final = 4
"""Requests that are worked on at a time: as many threads share the interpreter without delaying each other by much."""
TURN_S: Final = 0.1
LATE_MAX: Final = 8
"""Requests of an account that are late or worked on, of the 40 threads that all have."""


class RequestTurn:
    """A request that is worked on."""

    def __init__(self, turns: Turns, account: Account, loop: asyncio.AbstractEventLoop) -> None:
        self._turns = turns
        self._account = account
        self._is_late = self._has_ended = False
        self._over = loop.call_later(TURN_S, self._let_others)

    def end(self) -> None:
        """The request is answered, or takes no thread any more; without effect if this has ended already."""
        if not self._has_ended:
            self._has_ended = True
            self._over.cancel()
            self._turns.end(self._account, was_late=self._is_late)

    def _let_others(self) -> None:
        self._is_late = True
        self._turns.be_late(self._account)


class Turns:
    """The requests of an api process. Thread-safe, for event loops of several threads."""

    def __init__(self, waited: Callable[[Account], None]) -> None:
        """Do no I/O.

        Args:
            waited: called with the account of each request that had to wait.
        """
        self._waited = waited
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

    def be_late(self, account: Account) -> None:
        """A turn of this account is over, and its request is not answered."""
        with self._lock:
            self._late[account] += 1
            self._stop(account)
            following = list(self._following())
        self._grant_all(following)

    def end(self, account: Account, *, was_late: bool = False) -> None:
        """A request of this account is answered."""
        with self._lock:
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
            may = [one for one in self._waiting if self._may_work(one)] if self._late else self._waiting
            account = next((one for one in may if one not in self._working), next(iter(may), None))
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
        return self._late[account] + self._working[account] < LATE_MAX

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
