"""What runs beside the requests: waiting for changes, the feed's tail, shared reads, and the removal of what is old."""

import asyncio
import gc
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import event, func, select

from rankwatch_service.access.job_filter import JobFilter
from rankwatch_service.api import garbage
from rankwatch_service.api.background import change_feed, housekeeping
from rankwatch_service.api.background.change_feed import ChangeFeed, FeedFilter, FeedTail
from rankwatch_service.api.background.housekeeping import HISTORY_NS, RECORD_NS, remove_expired
from rankwatch_service.api.dependencies import SingleFlight
from rankwatch_service.orders.commands import publish
from rankwatch_service.store.engine import open_engine, read, write
from rankwatch_service.store.models import Delivery, Feed, HostRecord, Incident, IncidentTransition, Outbox
from tests.support.clock import FakeClock
from tests.support.store.database import add
from tests.support.values.incidents import incident_row

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


EVERYBODY = FeedFilter(JobFilter())


def say(engine, *jobs):
    with write(engine) as connection:
        for job in jobs:
            publish(connection, "incident", job, {}, 1)


def shown(found):
    return [json.loads(one.raw_data)["job"] for one in found.events]


def test_two_hundred_streams_read_the_database_once_for_each_change(engine):
    queries = []

    async def story():
        tail = FeedTail(engine)
        await tail.after(0, 0, EVERYBODY)
        say(engine, "a")
        event.listen(engine, "before_cursor_execute", lambda *reported: queries.append(reported[2]))
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
            assert (await tail.after(0, 1, mine)).position == 4

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
        position, seen, reads = 0, [], 0
        more = True
        while more:
            found = await tail.after(position, 1, EVERYBODY)
            position, more = found.position, found.more
            seen += shown(found)
            reads += 1
        assert (seen, position) == ([*jobs, "j8"], 9)
        assert reads > 1

    asyncio.run(story())


def test_a_stream_that_shows_nothing_of_what_came_goes_on_from_the_newest(engine):
    async def story():
        tail = FeedTail(engine)
        say(engine, *"aaaa")
        found = await tail.after(0, 0, FeedFilter(JobFilter(("b",))))
        assert (found.events, found.position, found.more) == ([], 4, False)

    asyncio.run(story())


WAITING = 8


class Key:
    """Counts how often it is looked up: twice by each request that has come."""

    def __init__(self) -> None:
        self.looked_up = 0

    def __hash__(self) -> int:
        self.looked_up += 1
        return 1


def test_requests_that_come_during_a_read_share_the_next_one():
    shared, key, reads = SingleFlight(), Key(), []
    begun, may_end = threading.Event(), threading.Event()

    def read() -> int:
        reads.append(len(reads))
        begun.set()
        assert may_end.wait(10)
        return reads[-1]

    with ThreadPoolExecutor(WAITING + 1) as pool:
        first = pool.submit(shared.read, key, read)
        assert begun.wait(10)
        seen = key.looked_up
        later = [pool.submit(shared.read, key, read) for _ in range(WAITING)]
        while key.looked_up < seen + 2 * WAITING:
            time.sleep(0.001)
        may_end.set()
        assert [first.result(10), *(one.result(10) for one in later)] == [0] + [1] * WAITING
    assert reads == [0, 1]


def test_a_later_request_reads_anew_and_other_keys_read_for_themselves():
    shared, values = SingleFlight(), iter(range(3))
    found = [shared.read(key, lambda: next(values)) for key in ("all", "all", "gpt")]
    assert found == [0, 1, 2]


def test_an_error_is_raised_to_all_who_share_the_read_and_to_nobody_after():
    shared = SingleFlight()
    with pytest.raises(KeyError):
        shared.read("all", lambda: {}["x"])
    assert shared.read("all", lambda: 5) == 5


NOW_NS = 2_000_000_000 * 10**9


def count(engine, table, *where):
    with read(engine) as connection:
        return connection.scalar(select(func.count()).select_from(table).where(*where))


def feed(engine, rows):
    add(engine, Feed, *([{"topic": "job", "job": "j", "data": {}, "at_unix_ns": 1}] * rows))


def outbox_row(name, state, at_unix_ns):
    row = {"id": name, "receiver": "pager", "incident_id": "inc", "transition": 1, "body": b"{}", "state": state}
    return row | {"next_try_unix_ns": 0, "created_unix_ns": at_unix_ns}


@pytest.fixture
def little(monkeypatch):
    """Chunks of five rows, two of them at a time, and a feed of ten rows."""
    monkeypatch.setattr(housekeeping, "CHUNK_ROWS", 5)
    monkeypatch.setattr(housekeeping, "CHUNKS_MAX", 2)
    monkeypatch.setattr(housekeeping, "FEED_ROWS_MAX", 10)


def test_the_feed_keeps_its_newest_rows_and_the_others_are_removed_in_chunks(engine, little):
    feed(engine, 33)
    assert [remove_expired(engine, NOW_NS) for _ in range(4)] == [10, 10, 3, 0]
    with read(engine) as connection:
        assert connection.execute(select(Feed.id).order_by(Feed.id)).scalars().all() == list(range(24, 34))


def test_settled_notifications_are_removed_with_their_deliveries_and_waiting_ones_stay(engine):
    old, new = NOW_NS - HISTORY_NS - 1, NOW_NS - HISTORY_NS + 1
    rows = [
        outbox_row("old-done", "delivered", old),
        outbox_row("old-waiting", "waiting", old),
        outbox_row("new-done", "delivered", new),
    ]
    add(engine, Outbox, *rows)
    tries = [{"outbox_id": row["id"], "at_unix_ns": 1, "error": "", "seconds": 0.1} for row in rows for _ in "ab"]
    add(engine, Delivery, *tries)
    remove_expired(engine, NOW_NS)
    with read(engine) as connection:
        kept = set(connection.scalars(select(Outbox.id)))
        tried = set(connection.scalars(select(Delivery.outbox_id)))
    assert kept == tried == {"old-waiting", "new-done"}


def test_old_resolved_incidents_lose_their_transitions_and_stay(engine):
    ancient = incident_row(id="ancient", state="resolved", resolved_unix_ns=NOW_NS - RECORD_NS - 1)
    recent = incident_row(id="recent", state="resolved", resolved_unix_ns=NOW_NS - RECORD_NS + 1)
    still = incident_row(id="open", resolved_unix_ns=None)
    record = {"host": "h", "device_uuid": "", "incident_id": "x", "job": "j", "kind": "hang", "severity": "critical"}
    for row in (ancient, recent, still):
        add(engine, Incident, row)
        line = {"what": "opened", "actor": "", "text": "", "fields": {}, "at_unix_ns": 1}
        add(engine, IncidentTransition, incident_id=row["id"], number=1, **line)
    add(engine, HostRecord, id="old", at_unix_ns=NOW_NS - RECORD_NS - 1, **record)
    add(engine, HostRecord, id="new", at_unix_ns=NOW_NS, **record)
    remove_expired(engine, NOW_NS)
    assert count(engine, Incident) == 3
    assert count(engine, IncidentTransition) == 2
    assert count(engine, IncidentTransition, IncidentTransition.incident_id == "ancient") == 0
    assert count(engine, HostRecord) == 1


def test_several_processes_may_remove_expired_rows_at_once(database_url, engine, little):
    feed(engine, 110)

    def work(_number):
        own = open_engine(database_url)
        for _ in range(10):
            remove_expired(own, NOW_NS)
        own.dispose()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    assert count(engine, Feed) == 10


class EndedError(Exception):
    """The story is over."""


class Looks(FakeClock):
    """Does one thing after the other between two looks at how many objects there are."""

    def __init__(self, *happens: Callable[[], None]) -> None:
        super().__init__()
        self._happens = iter(happens)
        self._due_s = self.monotonic_s() + garbage.LOOK_S

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if self.monotonic_s() < self._due_s:
            return
        self._due_s += garbage.LOOK_S
        step = next(self._happens, None)
        if step is None:
            raise EndedError
        step()


@pytest.mark.parametrize("blocks", [0, sys.maxsize], ids=["enough", "few"])
def test_all_objects_are_looked_through_once_they_have_doubled_and_are_many_more(monkeypatch, blocks):
    monkeypatch.setattr(garbage, "GROWN_BLOCKS", blocks)
    kept: list[object] = []
    looked: Counter[int] = Counter()
    full: list[int] = []

    def collected(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            looked[info["generation"]] += 1
        if phase == "stop" and info["generation"] == 2:
            full.append(len(kept))

    def grow(part: float) -> Callable[[], None]:
        return lambda: kept.extend(object() for _ in range(int(before * part)))

    def shrink() -> None:
        kept.clear()

    gc.collect()
    gc.disable()
    gc.callbacks.append(collected)
    before = sys.getallocatedblocks()
    try:
        with pytest.raises(EndedError):
            garbage._keep_looking(
                Looks(lambda: None, grow(0.6), grow(0.6), lambda: None, shrink, grow(0.6), grow(0.6), lambda: None)
            )
    finally:
        gc.callbacks.remove(collected)
        gc.enable()
    assert full == ([] if blocks else [2 * int(before * 0.6), 2 * int(before * 0.6)])
    assert looked[1] >= 8 * (garbage.LOOK_S / garbage.YOUNG_S - 1)
