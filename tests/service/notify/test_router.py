"""Transitions become messages: in groups where routes are configured, whoever holds the lease and whenever it moves."""

import contextlib
import json

import pytest
from sqlalchemy import delete, insert, select

from rankwatch_service.clock import SystemClock
from rankwatch_service.log.control_log import ControlLog
from rankwatch_service.notify.lease import Lease, LeaseLostError
from rankwatch_service.notify.outbox import OutboxTable
from rankwatch_service.notify.router import DELETED_POLL_S, RELOAD_POLL_S, SETTING, MessageRouter
from rankwatch_service.notify.routes_source import SETTING as STORED
from rankwatch_service.notify.routes_source import RoutesError, RoutesFile, StoredRoutes
from rankwatch_service.policy.control_records import JobProject, RoutingSet, decode_control
from rankwatch_service.policy.notification import BODY_BYTES_MAX
from rankwatch_service.policy.routing import outgoing
from rankwatch_service.policy.settings_in_force import SettingsInForce
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import Incident, IncidentGroup, Outbox, Receiver, Setting, Silence
from rankwatch_service.store.rows import outbox_row
from rankwatch_service.store.upsert import upsert
from tests.support.clock import FakeClock
from tests.support.store.database import new_database
from tests.support.values.incidents import (
    NOON_UNIX_NS,
    incident_row,
    receiver_row,
    silence_row,
    transition,
)

ROUTES = '[route]\nreceiver = "pager"\ngroup_by = ["job"]\n'
WRONG = ROUTES.replace("job", "jbo")
GROUPED = SettingsInForce()
GROUPED.is_grouped = True


class Site:
    """A database with the receiver `pager`, a file of routes, and notifiers that take the lease from each other."""

    def __init__(self, engine, folder):
        self.engine = engine
        self.clock = FakeClock(NOON_UNIX_NS)
        self.file = folder / "routes.toml"
        self.leases = 0
        self.controls = ControlLog(engine, self.clock)
        with write(engine) as connection:
            connection.execute(insert(Receiver).values(**receiver_row("pager")))

    def router(self, routes=ROUTES, source=None):
        """A router of a process that has just taken the lease; with routes None, without a file."""
        lease = Lease(self.engine, "notify", SystemClock(), f"process {self.leases}")
        self.leases += 1
        with write(self.engine) as connection:
            connection.exec_driver_sql("UPDATE lease SET expires_unix_ns = 0")
        assert lease.hold()
        if routes is not None:
            self.file.write_text(routes)
            source = RoutesFile(self.file)
        return MessageRouter(self.engine, lease, self.controls, self.clock, source)

    def tell(self, incident, what="opened", number=1, **fields):
        """Commit a transition as stream does where routes are configured."""
        told = transition(what, number, id=incident, **fields)
        entries = outgoing(told, GROUPED, {}, self.clock.now_ns, [], JobProject("gpt-small"), 4)
        with write(self.engine) as connection:
            connection.execute(upsert(connection, Incident), incident_row(id=incident))
            connection.execute(insert(Outbox), [outbox_row(entry) for entry in entries])

    def delete(self, *incidents):
        """Delete incidents with their jobs."""
        with write(self.engine) as connection:
            connection.execute(delete(Incident).where(Incident.id.in_(incidents)))

    def messages(self):
        """What the outbox has for receivers, oldest first: (receiver, state, id, body)."""
        query = select(Outbox.receiver, Outbox.state, Outbox.id, Outbox.body).where(Outbox.receiver != "")
        with read(self.engine) as connection:
            rows = connection.execute(query.order_by(Outbox.created_unix_ns, Outbox.transition, Outbox.receiver))
            return [(receiver, state, id_, json.loads(body)) for receiver, state, id_, body in rows]

    def announced(self):
        records = [decode_control(control.value) for control in self.controls.read(0, 100)]
        return [record.is_grouped for record in records if isinstance(record, RoutingSet)]

    def error(self):
        with read(self.engine) as connection:
            return connection.scalar(select(Setting.value).where(Setting.name == SETTING))["error"]


@pytest.fixture
def site(engine, tmp_path):
    return Site(engine, tmp_path)


def test_a_transition_waits_for_its_group_and_is_then_one_message(site):
    router = site.router()
    site.tell("inc_1")
    site.tell("inc_2", kind="hang")
    assert router.advance() == 0
    site.clock.advance(29)
    assert router.advance() == 0
    site.clock.advance(1)
    assert router.advance() == 1
    ((receiver, state, _, body),) = site.messages()
    assert (receiver, state, body["type"]) == ("pager", "waiting", "group.firing")
    data = body["data"]
    assert (data["job"], data["reason"], data["flush"]) == ("gpt-small", "first notification", 1)
    assert data["group_labels"] == {"job": "gpt-small"}
    assert data["common_labels"].keys() >= {"job", "severity", "host"}
    assert sorted((one["id"], one["kind"], one["state"]) for one in data["incidents"]) == [
        ("inc_1", "straggler", "open"),
        ("inc_2", "hang", "open"),
    ]
    with read(site.engine) as connection:
        assert set(connection.scalars(select(Outbox.state).where(Outbox.receiver == ""))) == {"grouped"}


def told_of(site, routers):
    """What a story has led to, with the router that `routers` gives for each moment."""
    steps = [("inc_1", "opened", 1, "open"), ("inc_2", "opened", 1, "open"), ("inc_1", "resolved", 2, "resolved")]
    for incident, what, number, state in steps:
        site.tell(incident, what, number, state=state)
        for _ in range(7):
            routers()
            site.clock.advance(60)
    return [(id_, body) for _, _, id_, body in site.messages()]


def test_a_moved_lease_neither_loses_nor_doubles_a_message(engine, tmp_path):
    (tmp_path / "moved").mkdir()
    calm = Site(engine, tmp_path)
    router = calm.router()
    expected = told_of(calm, router.advance)
    assert [body["data"]["reason"] for _, body in expected] == [
        "first notification",
        "new incidents in group",
        "new resolved incidents",
    ]

    moved = Site(new_database(tmp_path / "moved"), tmp_path)
    former = []

    def one_takes_over_from_the_other():
        new = moved.router()
        for old in former:
            with contextlib.suppress(LeaseLostError):
                assert old.advance() == 0
        new.advance()
        former[:] = [new]

    assert told_of(moved, one_takes_over_from_the_other) == expected
    moved.engine.dispose()


def test_what_a_lost_lease_refused_is_done_by_the_next(site):
    first = site.router()
    first.advance()
    site.tell("inc_1")
    second = site.router()
    site.clock.advance(60)
    with pytest.raises(LeaseLostError):
        first.advance()
    assert site.messages() == []
    second.advance()
    site.clock.advance(30)
    second.advance()
    assert len(site.messages()) == 1


def test_messages_of_a_group_are_sent_in_order(site):
    router = site.router(ROUTES + 'group_wait = "0s"\ngroup_interval = "1s"\n')
    for number, incident in enumerate(("inc_1", "inc_2", "inc_3")):
        site.tell(incident, job="gpt-small", number=number + 1)
        router.advance()
        site.clock.advance(2)
    router.advance()
    sent = [id_ for _, _, id_, _ in site.messages()]
    assert len(sent) == 3
    due = OutboxTable(site.engine, None).due(site.clock.now_ns, {})
    assert [message.id for message in due] == sent[:1]


def test_stream_is_told_once_that_routes_are_configured_and_once_that_they_are_not(site):
    for routes in (None, ROUTES, ROUTES, None, None):
        site.router(routes).advance()
    assert site.announced() == [True, False]


def test_without_routes_what_is_left_goes_to_who_subscribes(site):
    with write(site.engine) as connection:
        connection.execute(insert(Receiver).values(**receiver_row("hangs", kinds=["hang"])))
        connection.execute(insert(Receiver).values(**receiver_row("off", enabled=False)))
        connection.execute(insert(Silence).values(**silence_row(matchers=['kind=~"non.*"'])))
    grouped = site.router()
    site.tell("inc_0")
    grouped.advance()
    plain = site.router(None)
    site.tell("inc_1")
    site.tell("inc_2", kind="nonfinite")
    site.tell("inc_3", "acknowledged", 2, state="acknowledged")
    assert plain.advance() == 2
    told = [(receiver, state, body["data"]["id"], body["type"]) for receiver, state, _, body in site.messages()]
    assert sorted(told) == [
        ("pager", "silenced", "inc_2", "incident.opened"),
        ("pager", "waiting", "inc_1", "incident.opened"),
    ]
    assert plain.advance() == 0
    with read(site.engine) as connection:
        assert connection.scalars(select(IncidentGroup.key)).all() == []


def test_a_silence_holds_a_message_back_until_it_ends(site):
    router = site.router()
    with write(site.engine) as connection:
        connection.execute(insert(Silence).values(**silence_row(job="gpt-small", scope="host:node-a")))
    site.tell("inc_1")
    for _ in range(2):
        site.clock.advance(30)
        router.advance()
    assert site.messages() == []
    site.clock.advance(300)
    router.advance()
    assert len(site.messages()) == 1


def test_a_changed_file_takes_effect_and_a_wrong_one_leaves_the_old_routes_in_force(site):
    router = site.router()
    router.advance()
    site.file.write_text(WRONG)
    site.clock.advance(RELOAD_POLL_S)
    router.advance()
    assert "route.group_by: incidents have no label 'jbo'" in site.error()
    site.tell("inc_1")
    router.advance()
    site.clock.advance(30)
    router.advance()
    assert len(site.messages()) == 1
    site.file.write_text('[route]\nreceiver = "phone"\n')
    site.clock.advance(RELOAD_POLL_S)
    router.advance()
    assert site.error() == ""
    site.clock.advance(30)
    router.advance()
    assert [receiver for receiver, _, _, _ in site.messages()] == ["pager", "phone"]


def test_a_file_that_becomes_as_it_was_is_no_error_any_more(tmp_path):
    path = tmp_path / "routes.toml"
    path.write_text(ROUTES)
    file = RoutesFile(path)
    before = file.routing
    path.unlink()
    assert not file.changed()
    assert "routes.toml" in file.error
    path.write_text(ROUTES)
    assert not file.changed()
    assert (file.error, file.routing) == ("", before)


def test_a_notifier_does_not_start_with_wrong_routes(tmp_path):
    path = tmp_path / "routes.toml"
    path.write_text(WRONG)
    with pytest.raises(RoutesError, match=r"routes.toml: route.group_by: incidents have no label 'jbo'"):
        RoutesFile(path)


def test_incidents_of_a_deleted_job_leave_their_groups(site):
    router = site.router()
    site.tell("inc_1")
    site.tell("inc_gone")
    router.advance()
    site.delete("inc_gone")
    site.clock.advance(DELETED_POLL_S)
    router.advance()
    assert [one["id"] for _, _, _, body in site.messages() for one in body["data"]["incidents"]] == ["inc_1"]
    site.delete("inc_1")
    site.clock.advance(300)
    router.advance()
    site.clock.advance(300)
    router.advance()
    assert len(site.messages()) == 1


def test_the_message_of_a_large_group_stays_small_and_says_how_many_there_are(site):
    router = site.router()
    for number in range(60):
        site.tell(f"inc_{number}", summary="x" * 2_000)
    router.advance()
    site.clock.advance(30)
    router.advance()
    ((_, _, _, body),) = site.messages()
    assert body["data"]["incident_count"] == body["data"]["open_count"] == 60
    assert 0 < len(body["data"]["incidents"]) < 60
    assert len(json.dumps(body, separators=(",", ":"))) <= BODY_BYTES_MAX


def put(site, text):
    """Store routes as the api does."""
    row = {"name": STORED, "value": {"text": text, "actor": "ann"}, "updated_unix_ns": site.clock.now_ns}
    with write(site.engine) as connection:
        connection.execute(upsert(connection, Setting, row), row)


def status(site):
    with read(site.engine) as connection:
        stored = connection.scalar(select(Setting.value).where(Setting.name == SETTING))
    return stored or {"is_grouped": False, "is_file": False, "error": ""}


def test_routes_that_people_put_are_in_force_within_seconds_and_again_not(site):
    router = site.router(None, StoredRoutes(site.engine))
    for text, grouped in (("", False), (ROUTES, True), (WRONG, True), ("", False)):
        put(site, text)
        site.clock.advance(RELOAD_POLL_S)
        router.advance()
        assert status(site)["is_grouped"] is grouped
        assert status(site)["is_file"] is False
        assert ("jbo" in status(site)["error"]) is (text == WRONG)
    assert site.announced() == [True, False]


def test_a_process_that_takes_over_goes_on_with_the_stored_routes(site):
    put(site, ROUTES)
    site.router(None, StoredRoutes(site.engine)).advance()
    site.tell("inc_1")
    site.clock.advance(1)
    taken = site.router(None, StoredRoutes(site.engine))
    assert taken.advance() == 0
    site.clock.advance(30)
    assert taken.advance() == 1
    assert site.announced() == [True]
