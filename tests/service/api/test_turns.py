"""Requests of an api process take turns by account."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rankwatch_service.access.budgets import Account, Whose
from rankwatch_service.api.http.turns import BUSY_S, BUSY_TURNS_MAX, LATE_MAX, TURN_S, TURNS_MAX, RequestTurn, Turns
from tests.support.clock import FakeClock

GREEDY, HONEST, OTHER = (Account(Whose.AGENT, name) for name in ("greedy", "honest", "other"))


class Work:
    """Requests, in the order in which their turns began."""

    def __init__(self) -> None:
        self.waited: list[Account] = []
        self.began: list[Account] = []
        self.clock = FakeClock()
        self.turns = Turns(self.clock, self.waited.append, BUSY_TURNS_MAX)
        self.open: list[RequestTurn] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def ask(self, account: Account, times: int = 1) -> None:
        async def one() -> None:
            self.open.append(await self.turns.begin(account))
            self.began.append(account)

        self.tasks += [asyncio.create_task(one()) for _ in range(times)]
        await asyncio.sleep(0)

    async def end(self) -> None:
        """The turn that began first is over."""
        self.open.pop(0).end()
        await asyncio.sleep(0)
        await asyncio.sleep(0)


def played(story: Callable[[Work], Awaitable[None]]) -> Work:
    async def play() -> Work:
        work = Work()
        await story(work)
        for task in work.tasks:
            task.cancel()
        return work

    return asyncio.run(play())


def test_who_asks_without_a_pause_waits_for_itself_and_others_are_next() -> None:
    async def story(work: Work) -> None:
        await work.ask(GREEDY, TURNS_MAX + 100)
        await work.ask(HONEST, 2)
        await work.ask(OTHER)
        for _ in range(4):
            await work.end()

    work = played(story)
    assert work.began == [GREEDY] * TURNS_MAX + [HONEST, OTHER, HONEST, GREEDY] or work.began == [
        GREEDY
    ] * TURNS_MAX + [HONEST, OTHER, GREEDY, HONEST]
    assert work.waited == [GREEDY] * 100 + [HONEST] * 2 + [OTHER]


def test_while_nobody_else_asks_an_account_has_every_turn() -> None:
    async def story(work: Work) -> None:
        await work.ask(GREEDY, TURNS_MAX + 6)
        for _ in range(6):
            await work.end()

    assert played(story).began == [GREEDY] * (TURNS_MAX + 6)


def test_busy_accounts_leave_turns_to_those_that_ask_little() -> None:
    async def story(work: Work) -> None:
        await work.ask(GREEDY)
        await work.ask(OTHER)
        work.clock.advance(BUSY_S)
        for _ in (GREEDY, OTHER):
            await work.end()
        await work.ask(GREEDY, 100)
        await work.ask(OTHER, 100)
        await work.ask(HONEST, TURNS_MAX - BUSY_TURNS_MAX)

    work = played(story)
    assert work.began[2:] == [GREEDY] * BUSY_TURNS_MAX + [HONEST] * (TURNS_MAX - BUSY_TURNS_MAX)
    assert HONEST not in work.waited


def test_an_account_is_busy_no_more_when_it_has_asked_little_for_a_while() -> None:
    async def story(work: Work) -> None:
        await work.ask(GREEDY)
        work.clock.advance(BUSY_S + 1.0)
        await work.end()
        work.clock.advance(60.0)
        await work.ask(GREEDY, TURNS_MAX)

    assert played(story).began == [GREEDY] * (1 + TURNS_MAX)


def test_a_turn_is_over_after_a_while_by_itself_and_only_once() -> None:
    async def story(work: Work) -> None:
        await work.ask(GREEDY, TURNS_MAX)
        await work.ask(HONEST, TURNS_MAX)
        await asyncio.sleep(3 * TURN_S)
        for turn in work.open[:TURNS_MAX]:
            turn.end()
        await work.ask(OTHER, TURNS_MAX)

    work = played(story)
    assert work.began == [GREEDY] * TURNS_MAX + [HONEST] * TURNS_MAX + [OTHER] * TURNS_MAX


def test_who_has_late_requests_waits_for_their_answers_while_others_go_on() -> None:
    async def story(work: Work) -> None:
        await work.ask(GREEDY, TURNS_MAX + 5)
        await asyncio.sleep(4 * TURN_S)
        assert work.began == [GREEDY] * TURNS_MAX
        await work.ask(HONEST, TURNS_MAX)
        assert work.began == [GREEDY] * TURNS_MAX + [HONEST] * TURNS_MAX
        await asyncio.sleep(2 * TURN_S)
        for _ in range(TURNS_MAX - LATE_MAX):
            await work.end()
        assert len(work.began) == 2 * TURNS_MAX
        await work.end()

    assert played(story).began == [GREEDY] * TURNS_MAX + [HONEST] * TURNS_MAX + [GREEDY]


def test_the_next_turn_is_of_whoever_was_worked_for_least_lately() -> None:
    async def story(work: Work) -> None:
        for account, took_s in ((GREEDY, 2.0), (HONEST, 0.1)):
            await work.ask(account)
            work.clock.advance(took_s)
            await work.end()
        work.began.clear()
        await work.ask(OTHER, TURNS_MAX)
        await work.ask(GREEDY)
        await work.ask(HONEST)
        await work.end()
        await work.end()

    assert played(story).began == [OTHER] * TURNS_MAX + [HONEST, GREEDY]


@pytest.mark.parametrize("granted", [False, True])
def test_a_client_that_goes_away_while_it_waits_takes_no_turn_with_it(granted: bool) -> None:
    async def story(work: Work) -> None:
        await work.ask(GREEDY, TURNS_MAX)
        await work.ask(HONEST)
        if granted:
            work.open.pop(0).end()
        work.tasks[-1].cancel()
        await asyncio.sleep(0)
        for _ in range(TURNS_MAX - granted):
            await work.end()
        await work.ask(OTHER, TURNS_MAX)

    assert played(story).began == [GREEDY] * TURNS_MAX + [OTHER] * TURNS_MAX
