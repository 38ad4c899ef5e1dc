"""Orders are read once for all streams of a job, and wake them up only if they differ."""

import asyncio
from collections import Counter
from contextlib import aclosing

import pytest

from rankwatch_service.api.background.change_feed import ChangeFeed
from rankwatch_service.api.background.order_feed import OrderFeed, OrdersUnreadError
from rankwatch_service.store.errors import StoreBusyError

STREAMS = 50


class Database:
    """Its orders, how often they were read, and whether somebody has committed."""

    def __init__(self):
        self.orders_of = {}
        self.reads = Counter()
        self.has_changed = False
        self.fails = False
        self.broken = set()
        """Jobs with something in their rows that nobody expects."""

    def orders(self, job, _generation):
        self.reads[job] += 1
        if self.fails:
            raise StoreBusyError("locked")
        if job in self.broken:
            raise KeyError(job)
        return self.orders_of.get(job, b"{}")

    def changed(self):
        changed, self.has_changed = self.has_changed, False
        return changed

    def close(self):
        pass


class Streams:
    def __init__(self, database):
        self.changes = ChangeFeed(database, lambda: None)
        self.failures = 0
        self.feed = OrderFeed(database, self.changes, self.fail)
        self.reported = Counter()
        self.open = []

    async def __aenter__(self):
        self.changes.start()
        self.feed.start()
        return self

    async def __aexit__(self, *_):
        await self.changes.close()
        await self.feed.close()
        await asyncio.wait_for(asyncio.gather(*self.open, return_exceptions=True), 30)

    def fail(self):
        self.failures += 1

    def follow(self, job, count):
        async def follow():
            async with aclosing(self.feed.of(job)) as reported:
                async for body in reported:
                    self.reported[job, body] += 1

        self.open += [asyncio.create_task(follow()) for _ in range(count)]


async def until(condition):
    deadline_s = asyncio.get_running_loop().time() + 30
    while not condition():
        assert asyncio.get_running_loop().time() < deadline_s
        await asyncio.sleep(0.01)


@pytest.fixture
def database():
    return Database()


def test_all_streams_of_a_job_are_told_what_was_read_once(database):
    async def run():
        async with Streams(database) as streams:
            streams.follow("gpt", STREAMS)
            streams.follow("other", 1)
            await until(lambda: streams.reported["gpt", b"{}"] == STREAMS)
            before = database.reads["gpt"]
            assert before <= 2, "the first stream, and a pass"
            database.orders_of["gpt"], database.has_changed = b"{1}", True
            await until(lambda: streams.reported["gpt", b"{1}"] == STREAMS)
            assert database.reads["gpt"] == before + 1
            assert streams.reported["other", b"{}"] == 1, "its orders have not changed"
            assert streams.reported["gpt", b"{}"] == STREAMS

    asyncio.run(run())


def test_streams_end_where_the_database_fails_and_those_that_come_back_are_reported(database):
    async def run():
        async with Streams(database) as streams:
            streams.follow("gpt", 2)
            await until(lambda: streams.reported["gpt", b"{}"] == 2)
            database.fails = database.has_changed = True
            await until(lambda: all(one.done() for one in streams.open))
            assert all(isinstance(one.exception(), StoreBusyError) for one in streams.open)
            database.fails = False
            streams.follow("gpt", 1)
            await until(lambda: streams.reported["gpt", b"{}"] == 3)

    asyncio.run(run())


def test_one_job_whose_orders_cannot_be_read_ends_no_other_and_is_reported_once_they_can(database):
    async def run():
        async with Streams(database) as streams:
            streams.follow("gpt", 1)
            streams.follow("other", 1)
            await until(lambda: streams.reported["gpt", b"{}"] and streams.reported["other", b"{}"])
            database.broken.add("gpt")
            database.orders_of["other"], database.has_changed = b"{1}", True
            await until(lambda: streams.reported["other", b"{1}"] and streams.open[0].done())
            assert isinstance(streams.open[0].exception(), OrdersUnreadError)
            streams.follow("gpt", 1)
            await until(streams.open[2].done)
            assert isinstance(streams.open[2].exception(), OrdersUnreadError)
            assert streams.failures >= 2
            database.broken.clear()
            streams.follow("gpt", 1)
            database.orders_of["gpt"] = database.orders_of["other"] = b"{2}"
            database.has_changed = True
            await until(lambda: streams.reported["gpt", b"{2}"] and streams.reported["other", b"{2}"])

    asyncio.run(run())


def test_a_job_that_nobody_follows_any_more_is_not_read(database):
    async def run():
        async with Streams(database) as streams:
            streams.follow("gpt", 1)
            await until(lambda: streams.reported["gpt", b"{}"])
            streams.open[0].cancel()
            await asyncio.wait(streams.open)
            before = database.reads["gpt"]
            database.has_changed = True
            await until(lambda: streams.changes.generation)
            streams.follow("other", 1)
            await until(lambda: streams.reported["other", b"{}"])
            assert database.reads["gpt"] == before

    asyncio.run(run())
