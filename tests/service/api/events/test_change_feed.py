"""Requests wait for changes of the database without polling it themselves."""

import asyncio
from collections.abc import Callable

import pytest

from rankwatch_service.api.background.change_feed import ChangeFeed

LONG_S = 60.0
"""Far longer than any of these tests takes: a test that reaches it fails by its own timeout."""


class FakeChanges:
    """A database that changes when the test says so."""

    def __init__(self) -> None:
        self.pending = False
        self.closed = False

    def changed(self) -> bool:
        changed, self.pending = self.pending, False
        return changed

    def close(self) -> None:
        self.closed = True


def with_feed(story: Callable[[ChangeFeed, FakeChanges], object]) -> list[None]:
    """Run an asynchronous story over a running feed; return its calls of `on_change`."""
    calls: list[None] = []

    async def run() -> None:
        changes = FakeChanges()
        feed = ChangeFeed(changes, lambda: calls.append(None))
        feed.start()
        try:
            await story(feed, changes)
        finally:
            await feed.close()
        assert changes.closed

    asyncio.run(run())
    return calls


def test_a_change_wakes_everybody_who_waits_and_the_driver():
    async def story(feed, changes):
        waiting = [asyncio.create_task(feed.wait(feed.generation, LONG_S)) for _ in range(3)]
        await asyncio.sleep(0)
        changes.pending = True
        await asyncio.gather(*waiting)
        assert feed.generation == 1

    assert len(with_feed(story)) == 2  # the change, and the end


def test_a_change_between_look_and_wait_is_not_missed():
    async def story(feed, changes):
        seen = feed.generation
        changes.pending = True
        await feed.wait(seen, LONG_S)
        await feed.wait(seen, LONG_S)  # returns at once

    with_feed(story)


def test_waiting_ends_when_the_feed_stops():
    async def story(feed, _changes):
        waiting = asyncio.create_task(feed.wait(feed.generation, LONG_S))
        await asyncio.sleep(0)
        feed.stop()
        await waiting

    with_feed(story)


def test_a_value_is_read_again_after_each_change_and_only_then():
    async def story(feed, changes):
        reads = []

        def read() -> int:
            reads.append(feed.generation)
            changes.pending = True
            return len(reads)

        assert await feed.read_until(read, lambda value: value == 3, LONG_S) == (3, True)
        assert reads == [0, 1, 2]

    with_feed(story)


def test_a_value_that_is_accepted_at_once_is_read_once():
    async def story(feed, _changes):
        assert await feed.read_until(lambda: 7, lambda value: value == 7, 0.0) == (7, True)

    with_feed(story)


def test_reading_ends_with_the_last_value_when_the_time_is_up_or_the_feed_stops():
    async def story(feed, _changes):
        assert await feed.read_until(lambda: 1, lambda _: False, 0.05) == (1, False)
        feed.stop()
        assert await feed.read_until(lambda: 2, lambda _: False, LONG_S) == (2, False)

    with_feed(story)


def test_an_error_of_the_read_is_raised_to_the_caller():
    async def story(feed, _changes):
        def broken() -> int:
            raise ValueError("broken")

        with pytest.raises(ValueError, match="broken"):
            await feed.read_until(broken, lambda _: True, LONG_S)

    with_feed(story)
