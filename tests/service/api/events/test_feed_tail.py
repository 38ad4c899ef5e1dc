"""Event streams share one reading of the feed, and each shows the jobs that it may show."""

import asyncio
import json

import pytest
from sqlalchemy import event

from rankwatch_service.access.job_filter import JobFilter
from rankwatch_service.api.background import change_feed
from rankwatch_service.api.background.change_feed import FeedFilter, FeedTail
from rankwatch_service.orders.commands import tell
from rankwatch_service.store.engine import write
from tests.support.store.database import new_database

EVERYBODY = FeedFilter(JobFilter())


@pytest.fixture
def engine(tmp_path):
    engine = new_database(tmp_path)
    yield engine
    engine.dispose()


def say(engine, *jobs):
    with write(engine) as connection:
        for job in jobs:
            tell(connection, "incident", job, {}, 1)


def shown(found):
    return [json.loads(one.raw_data)["job"] for one in found.events]


def test_two_hundred_streams_read_the_database_once_for_each_change(engine):
    queries = []

    async def story():
        tail = FeedTail(engine)
        await tail.after(0, 0, EVERYBODY)
        say(engine, "a")
        event.listen(engine, "before_cursor_execute", lambda *told: queries.append(told[2]))
        found = await asyncio.gather(*(tail.after(0, 1, EVERYBODY) for _ in range(200)))
        assert [shown(one) for one in found] == [["a"]] * 200

    asyncio.run(story())
    assert sum("FROM feed" in query for query in queries) == 1


def test_a_stream_shows_the_jobs_that_it_may_and_asked_for_and_what_belongs_to_none(engine):
    async def story():
        tail = FeedTail(engine)
        await tail.after(0, 0, EVERYBODY)
        say(engine, "a", "b", "", "c")
        for read_from in (0, 99):  # from memory, and from the database
            tail._before = read_from
            mine = FeedFilter(JobFilter(("a", "b")), ["b", "c"])
            assert shown(await tail.after(0, 1, mine)) == ["b", ""]
            assert (await tail.after(0, 1, mine)).place == 4

    asyncio.run(story())


def test_what_is_no_longer_in_memory_comes_from_the_database_in_parts(engine, monkeypatch):
    monkeypatch.setattr(change_feed, "READ_MAX", 3)
    monkeypatch.setattr(change_feed, "KEPT_MAX", 2)
    jobs = [f"j{n}" for n in range(8)]

    async def story():
        tail = FeedTail(engine)
        say(engine, *jobs)
        await tail.after(8, 0, EVERYBODY)
        say(engine, "j8")
        place, seen, reads = 0, [], 0
        more = True
        while more:
            found = await tail.after(place, 1, EVERYBODY)
            place, more = found.place, found.more
            seen += shown(found)
            reads += 1
        assert (seen, place) == ([*jobs, "j8"], 9)
        assert reads > 1

    asyncio.run(story())


def test_a_stream_that_shows_nothing_of_what_came_goes_on_from_the_newest(engine):
    async def story():
        tail = FeedTail(engine)
        say(engine, *"aaaa")
        found = await tail.after(0, 0, FeedFilter(JobFilter(("b",))))
        assert (found.events, found.place, found.more) == ([], 4, False)

    asyncio.run(story())
