"""Where routes are configured: for each incident, whom it was sent to, what it waits for, and what mutes it."""

import pytest
from sqlalchemy import insert, update

from rankwatch_service.access.scopes import Scope
from rankwatch_service.clock import SystemClock
from rankwatch_service.notify.lease import Lease
from rankwatch_service.notify.router import MessageRouter
from rankwatch_service.notify.routes_source import RoutesFile, StoredRoutes
from rankwatch_service.policy.control_records import JobProject
from rankwatch_service.policy.routing import outgoing
from rankwatch_service.policy.settings_in_force import SettingsInForce
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Incident, Outbox, Receiver, Silence
from rankwatch_service.store.rows import incident_row as row_of
from rankwatch_service.store.rows import outbox_row
from rankwatch_service.store.upsert import upsert
from tests.support.clock import FakeClock
from tests.support.service.api import running_api
from tests.support.values.incidents import NOON_UNIX_NS, silence_row, transition

ROUTES = """
[route]
receiver = "pager"
group_by = ["job"]
escalations = [{ after = "15m", receiver = "lead" }]
[[route.routes]]
matchers = ['kind="nonfinite"']
receiver = ""
escalations = []
[[route.routes]]
matchers = ['kind="straggler"', 'severity="info"']
receiver = "chat"
mute_time_intervals = ["always"]
escalations = []
[[inhibit_rules]]
source_matchers = ['kind="hang"']
target_matchers = ['kind="straggler"']
equal = ["job"]
[[time_intervals]]
name = "always"
time_intervals = [{}]
"""
GROUPED = SettingsInForce()
GROUPED.is_grouped = True


class Site:
    """An api, and a notifier with the routes that were put by REST, or with those of a file."""

    def __init__(self, api, source=None):
        self.api = api
        for name in ("pager", "lead", "chat", "other"):
            body = {"name": name, "url": f"https://hooks.example/{name}"}
            assert api.post("/api/v1/receivers", body).status_code == 201
        if source is None:
            assert api.ask("PUT", "/api/v1/routes", json={"text": ROUTES}).status_code == 200
            source = StoredRoutes(api.engine)
        lease = Lease(api.engine, "notify", SystemClock(), "this process")
        assert lease.hold()
        self.router = MessageRouter(api.engine, lease, api.controls, api.clock, source)
        self.router.advance()

    def tell(self, incident="inc_1", what="opened", number=1, **fields):
        """Commit a transition as stream does, and let the notifier take it."""
        told = transition(what, number, id=incident, **fields)
        entries = outgoing(told, GROUPED, {}, self.api.clock.now_ns, [], JobProject("gpt-small"), 4)
        with write(self.api.engine) as connection:
            row = row_of(told.incident) | {"number": int(incident[-1])}
            connection.execute(upsert(connection, Incident, row), row)
            connection.execute(insert(Outbox), [outbox_row(entry) for entry in entries])
        self.router.advance()

    def after(self, seconds):
        self.api.clock.advance(seconds)
        self.router.advance()

    def answers(self, incident="inc_1", token=None):
        """(state, why) by receiver."""
        items = self.api.ask("GET", f"/api/v1/incidents/{incident}/receivers", token=token).json()["items"]
        return {one["receiver"]: (one["state"], one["why"]) for one in items}


@pytest.fixture
def site(tmp_path):
    with running_api(tmp_path, FakeClock(NOON_UNIX_NS)) as api:
        yield Site(api)


def test_before_the_first_message_the_answer_is_how_long_the_group_waits(site):
    site.tell()
    found = site.answers()
    assert found["pager"] == (
        "none",
        "not sent; the next message of its group is due at 2025-10-09T08:53:50.000Z (group_wait 30 s) "
        '(route {}, group {job="gpt-small"})',
    )
    assert "escalated 900 s after the first message" in found["lead"][1]
    assert found["other"] == ("none", "not sent: no route that takes the incident names the receiver")
    assert found["chat"] == found["other"]


def test_after_it_the_answer_is_the_message_the_repeat_and_the_time_of_the_escalation(site):
    site.tell()
    site.after(30)
    found = site.answers()
    assert found["pager"][0] == "waiting"
    assert found["pager"][1].startswith(
        "not sent yet: no try has ended; repeated after 2025-10-09T12:53:50.000Z unless"
    )
    with write(site.api.engine) as connection:
        connection.execute(update(Outbox).where(Outbox.receiver == "pager").values(state="delivered"))
    state, why = site.answers()["pager"]
    assert (state, why.partition(";")[0]) == (
        "delivered",
        "sent, in the message of its group at 2025-10-09T08:53:50.000Z",
    )
    assert "escalated at 2025-10-09T09:08:50.000Z, unless it is acknowledged by then" in site.answers()["lead"][1]
    site.after(900)
    assert site.answers()["lead"][0] == "waiting"
    items = site.api.get("/api/v1/incidents/inc_1/receivers").json()["items"]
    (pager,) = [one for one in items if one["receiver"] == "pager"]
    assert (pager["transition"], pager["route"], pager["group"]) == (None, "{}", '{}:{job="gpt-small"}')


def test_what_is_new_in_a_group_waits_for_its_interval(site):
    site.tell()
    site.after(30)
    site.tell("inc_2", scope="rank:4", ranks=(4,))
    assert site.answers("inc_2")["pager"] == (
        "none",
        "not sent; the next message of its group is due at 2025-10-09T08:58:50.000Z (group_interval 300 s) "
        '(route {}, group {job="gpt-small"})',
    )
    site.after(300)
    assert site.answers("inc_2")["pager"][0] == "waiting"


def test_what_is_acknowledged_is_neither_repeated_nor_escalated_and_the_answer_names_who_did(site):
    site.tell()
    site.after(30)
    site.tell("inc_1", "acknowledged", 2, state="acknowledged", acknowledged_by="sam")
    found = site.answers()
    assert "not repeated for it: acknowledged by sam" in found["pager"][1]
    assert "not escalated: acknowledged by sam" in found["lead"][1]


def test_all_that_mutes_an_incident_is_named(site):
    site.tell("inc_2", kind="hang")
    site.tell(severity="info")
    with write(site.api.engine) as connection:
        connection.execute(insert(Silence).values(**silence_row()))
        connection.execute(insert(Silence).values(**silence_row(id="sil_2", kind="hang")))
    assert site.answers()["chat"] == (
        "none",
        "not sent; the route is muted in always; muted by the silence sil_1; inhibited while the incident inc_2 (hang) "
        'is unresolved (route {}/{kind="straggler",severity="info"}, group {job="gpt-small"})',
    )
    site.after(30)
    assert site.answers()["chat"][0] == "none"


def test_a_route_without_a_receiver_is_an_answer(site):
    site.tell(kind="nonfinite")
    state, why = site.answers()[""]
    assert (state, why.partition(" (")[0]) == ("none", "not sent; the route names no receiver")


def test_the_end_is_told_with_the_next_message_and_then_nothing_more_is_due(site):
    site.tell()
    site.after(30)
    site.tell("inc_1", "resolved", 2, state="resolved", resolved_unix_ns=site.api.clock.now_ns)
    assert "it is resolved, and its group is told so at 2025-10-09T08:58:50.000Z" in site.answers()["pager"][1]
    site.after(300)
    state, why = site.answers()["pager"]
    assert (state, "it is resolved (route" in why) == ("waiting", True)


def test_a_receiver_that_is_switched_off_or_missing_is_an_answer(site):
    site.tell()
    with write(site.api.engine) as connection:
        connection.execute(update(Receiver).where(Receiver.name == "pager").values(enabled=False))
    assert site.api.ask("DELETE", "/api/v1/receivers/lead").status_code == 204
    found = site.answers()
    assert "the receiver is disabled" in found["pager"][1]
    assert "there is no receiver of this name" in found["lead"][1]


def test_routes_of_a_file_answer_too(tmp_path):
    file = tmp_path / "routes.toml"
    file.write_text('[route]\nreceiver = "chat"\ngroup_wait = "5s"\n')
    with running_api(tmp_path, FakeClock(NOON_UNIX_NS)) as api:
        site = Site(api, RoutesFile(file))
        site.tell()
        assert "(group_wait 5 s)" in site.answers()["chat"][1]
        assert "no route that takes the incident" in site.answers()["pager"][1]


def test_a_token_of_some_jobs_sees_the_messages_about_its_incident_alone(site):
    site.tell()
    token = site.api.token(Scope.READ, job="gpt-small")
    assert site.answers(token=token) == {}
    site.after(30)
    assert site.answers(token=token) == {"pager": ("waiting", "not sent yet: no try has ended")}
