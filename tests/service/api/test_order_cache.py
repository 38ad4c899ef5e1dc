"""Orders are read again when the feed reports a change of them, not after every commit."""

import json

import pytest
from sqlalchemy import insert, update

from rankwatch_service.api.background import order_cache
from rankwatch_service.api.background.order_cache import KEPT_NS, OrderCache
from rankwatch_service.orders import commands
from rankwatch_service.orders.order import CommandOutcome
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Checkpoint, Command, Feed, Job
from tests.support.clock import FakeClock
from tests.support.store.database import add, checkpoint_row, command_row, job_row

ON_BOTH_DATABASES = True
TRACE = {"action": "trace", "params": {"ranks": [0], "steps": 3}, "state": "requested"}


class Reader:
    """Asks for the orders of job j, and knows how often they were read."""

    def __init__(self, engine, monkeypatch):
        self.engine, self.clock, self.reads, self.generation = engine, FakeClock(), 0, 0
        self.cache = OrderCache(engine, self.clock)
        orders_of = order_cache.orders_of

        def counted(*what):
            self.reads += 1
            return orders_of(*what)

        monkeypatch.setattr(order_cache, "orders_of", counted)

    def commit(self, topic="", job="j", **data):
        """A commit, with a row of the feed if it has a topic."""
        if topic:
            add(self.engine, Feed, topic=topic, job=job, data=data, at_unix_ns=1)
        self.generation += 1

    def ask(self):
        return json.loads(self.cache.orders("j", self.generation))


@pytest.fixture
def reader(engine, monkeypatch):
    add(engine, Job, job_row())
    reader = Reader(engine, monkeypatch)
    reader.ask()
    reader.commit("job", attempt="l.0", state="running")
    reader.ask()
    reader.reads = 0
    return reader


def test_commits_that_change_no_orders_cost_no_reading(reader):
    for step in range(20):
        reader.commit()
        reader.commit("job", attempt="l.0", state="running", step=step)
        reader.commit("incident", id="inc_1")
        reader.commit("command", job="other")
        reader.ask()
    assert reader.reads == 0


@pytest.mark.parametrize(
    ("topic", "data"),
    [
        ("command", {"id": "cmd_1", "state": "sent"}),
        ("checkpoint", {"id": "local:l.0:4", "verdict": "good"}),
        ("job", {"attempt": "l.1", "state": "running"}),
        ("job", {"state": "deleted"}),
    ],
)
def test_what_the_feed_tells_of_is_read_once(reader, topic, data):
    reader.commit(topic, **data)
    for _ in range(3):
        reader.ask()
        reader.commit()
    assert reader.reads == 1


def test_a_checkpoint_that_becomes_good_is_the_advice_at_once(reader):
    assert reader.ask()["resume"].get("step", -1) == -1
    add(reader.engine, Checkpoint, checkpoint_row(step=4))
    reader.commit("checkpoint", id="local:l.0:4")
    assert reader.ask()["resume"]["step"] == 4


def test_while_something_is_asked_of_the_job_its_orders_are_read_after_every_commit(reader):
    add(reader.engine, Command, command_row(**TRACE))
    with write(reader.engine) as connection:
        commands.set_state(connection, "cmd_1", CommandOutcome("sent"), "driver", 1)
    reader.commit()
    assert [one["request"] for one in reader.ask()["traces"]] == ["cmd_1"]
    for _ in range(3):
        reader.commit()
        reader.ask()
    assert reader.reads == 4
    with write(reader.engine) as connection:  # as a renewed lease, without a row of the feed
        connection.execute(update(Command).values(state="applied"))
    reader.commit()
    assert reader.ask()["traces"] == []


def test_orders_are_not_kept_for_long(reader):
    reader.clock.advance(KEPT_NS / 1e9)
    reader.commit()
    reader.ask()
    assert reader.reads == 1


def test_a_change_is_read_also_where_more_jobs_changed_than_are_remembered(reader, monkeypatch):
    monkeypatch.setattr(order_cache, "JOBS_MAX", 3)
    reader.commit("checkpoint", id="local:l.0:4")
    for job in "abcd":
        reader.commit("checkpoint", job=job, id="local:l.0:4")
    add(reader.engine, Checkpoint, checkpoint_row(step=4))
    assert reader.ask()["resume"]["step"] == 4


def test_what_is_committed_during_a_reading_is_read_next(reader, monkeypatch):
    orders_of = order_cache.orders_of

    def committed_meanwhile(connection, *what):
        found = orders_of(connection, *what)
        monkeypatch.setattr(order_cache, "orders_of", orders_of)
        with write(reader.engine) as other:
            other.execute(insert(Checkpoint).values(**checkpoint_row(step=4)))
        reader.commit("checkpoint", id="local:l.0:4")
        reader.cache.orders("other", reader.generation)  # another thread has followed the feed by now
        return found

    monkeypatch.setattr(order_cache, "orders_of", committed_meanwhile)
    reader.commit("command", id="cmd_1")
    reader.ask()
    assert reader.ask()["resume"]["step"] == 4
