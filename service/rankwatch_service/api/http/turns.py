"""Whose request is worked on next.

An api process has one interpreter, so what one token asks for delays all others. Requests that have come as a whole
therefore take turns: a few are worked on at a time, and once as many are, the next turn is of an account that has none,
in the order in which accounts began to wait. So a token that asks without a pause waits for itself. A turn ends when
the answer begins, when a batch waits to be stored, or after `TURN_S`: what takes long keeps nobody waiting for longer.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from threading import Lock
from typing import Final

from rankwatch_service.access.budgets import Account

TURNS_MAX: Final = 4
"""Requests that are worked on at a time: as many threads share the interpreter without delaying each other by much."""
TURN_S: Final = 0.1


class RequestTurn:
    """A request that is worked on."""

    def __init__(self, turns: Turns, account: Account, loop: asyncio.AbstractEventLoop) -> None:
        self._turns = turns
        self._account = account
        self._over = loop.call_later(TURN_S, self.end)

    def end(self) -> None:
        """Let others work; without effect if this has ended already."""
        if not self._over.cancelled():
            self._over.cancel()
            self._turns.end(self._account)


class Turns:
    """The requests of an api process. Thread-safe, for event loops of several threads."""

    def __init__(self, waited: Callable[[Account], None]) -> None:
        """Do no I/O.

        Args:
            waited: called with the account of each request that had to wait.
        """
        self._waited = waited
        self._working: Counter[Account] = Counter()
        self._free = TURNS_MAX
        self._lock = Lock()
        self._waiting: OrderedDict[Account, deque[asyncio.Future[None]]] = OrderedDict()

    async def begin(self, account: Account) -> RequestTurn:
        """Wait for a turn."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._free:
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

    def end(self, account: Account) -> None:
        """A turn of this account is over: the next begins."""
        with self._lock:
            self._free += 1
            self._working[account] -= 1
            if not self._working[account]:
                del self._working[account]
            if not self._waiting:
                return
            following = next((one for one in self._waiting if one not in self._working), next(iter(self._waiting)))
            self._start(following)
            turn = self._waiting[following].popleft()
            if self._waiting[following]:
                self._waiting.move_to_end(following)
            else:
                del self._waiting[following]
        turn.get_loop().call_soon_threadsafe(self._grant, following, turn)

    def _grant(self, account: Account, turn: asyncio.Future[None]) -> None:
        if turn.cancelled():  # its client has gone away in the meantime
            self.end(account)
        else:
            turn.set_result(None)

    def _start(self, account: Account) -> None:
        self._free -= 1
        self._working[account] += 1

    def _leave(self, account: Account, turn: asyncio.Future[None]) -> None:
        with self._lock:
            waiting = self._waiting.get(account, deque())
            if turn in waiting:
                waiting.remove(turn)
                if not waiting:
                    del self._waiting[account]
