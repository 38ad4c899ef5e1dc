import threading

import pytest
from sqlalchemy import func, insert, select

from rankwatch_service.api.background import housekeeping
from rankwatch_service.api.background.housekeeping import HISTORY_NS, RECORD_NS, remove_expired
from rankwatch_service.store.engine import open_engine, read, write
from rankwatch_service.store.models import (
    Delivery,
    Feed,
    HostRecord,
    Incident,
    IncidentTransition,
    Outbox,
)
from tests.support.values.incidents import incident_row

NOW_NS = 2_000_000_000 * 10**9


def count(engine, table, *where):
    with read(engine) as connection:
        return connection.scalar(select(func.count()).select_from(table).where(*where))


def feed(engine, rows):
    with write(engine) as connection:
        connection.execute(insert(Feed), [{"topic": "job", "job": "j", "data": {}, "at_unix_ns": 1}] * rows)


def outbox_row(name, state, at_unix_ns):
    return {
        "id": name,
        "receiver": "pager",
        "incident_id": "inc",
        "transition": 1,
        "body": b"{}",
        "state": state,
        "next_try_unix_ns": 0,
        "created_unix_ns": at_unix_ns,
    }


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
    with write(engine) as connection:
        connection.execute(insert(Outbox), rows)
        tries = [{"outbox_id": row["id"], "at_unix_ns": 1, "error": "", "seconds": 0.1} for row in rows for _ in "ab"]
        connection.execute(insert(Delivery), tries)
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
    with write(engine) as connection:
        for row in (ancient, recent, still):
            connection.execute(insert(Incident).values(row))
            line = {"what": "opened", "actor": "", "text": "", "fields": {}, "at_unix_ns": 1}
            connection.execute(insert(IncidentTransition).values(incident_id=row["id"], number=1, **line))
        connection.execute(insert(HostRecord).values(id="old", at_unix_ns=NOW_NS - RECORD_NS - 1, **record))
        connection.execute(insert(HostRecord).values(id="new", at_unix_ns=NOW_NS, **record))
    remove_expired(engine, NOW_NS)
    assert count(engine, Incident) == 3
    assert count(engine, IncidentTransition) == 2
    assert count(engine, IncidentTransition, IncidentTransition.incident_id == "ancient") == 0
    assert count(engine, HostRecord) == 1


def test_several_processes_may_remove_expired_rows_at_once(database_url, engine, little):
    feed(engine, 110)
    failures = []

    def work():
        own = open_engine(database_url)
        try:
            for _ in range(10):
                remove_expired(own, NOW_NS)
        except BaseException as error:
            failures.append(error)
        finally:
            own.dispose()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert count(engine, Feed) == 10
