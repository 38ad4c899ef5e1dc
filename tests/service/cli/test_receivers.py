"""Receivers of other types, tests of them, alerts that wait, and what became of notifications, by the command line."""

import msgspec
import pytest
from sqlalchemy import delete, insert

from rankwatch_service.api.routes.notifications import deliveries
from rankwatch_service.notify.router import SETTING
from rankwatch_service.routing.group import Group, GroupMember
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Incident, IncidentGroup, Setting
from tests.support.service.served_api import served_api
from tests.support.values.incidents import NOON_UNIX_NS, incident_row


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    with served_api(tmp_path_factory.mktemp("api")) as (api, url):
        api.url = url
        yield api


@pytest.fixture
def to(api):
    return ("--url", api.url, "--token", api.admin)


def test_a_receiver_of_another_type_takes_its_secret_from_a_file(terminal, to, tmp_path):
    key = tmp_path / "key"
    key.write_text("0123456789abcdef0123456789ABCDEF\n")
    target = ("https://events.pagerduty.com/v2/enqueue", "--type", "pagerduty", "--secret-file", str(key))
    status, out, err = terminal.run("receivers", "add", "pd", *target, *to)
    assert (status, out, "receivers test pd" in err) == (0, "", True), err
    assert "pagerduty" in terminal.run("receivers", *to)[1]
    status, _, err = terminal.run("receivers", "add", "mail", "mailto:a@example.com", *to)
    assert (status != 0, "RANKWATCH_SMTP_URL" in err) == (True, True)
    assert terminal.run("receivers", "remove", "pd", *to)[0] == 0


def test_a_test_of_a_receiver_says_that_nobody_delivers(terminal, to, monkeypatch):
    monkeypatch.setattr(deliveries, "TRIED_WITHIN_S", 0.0)
    assert terminal.run("receivers", "add", "try", "https://hooks.example/hook", *to)[0] == 0
    status, _, err = terminal.run("receivers", "test", "try", *to)
    assert (status, "does the role notify run" in err) == (1, True)
    status, out, _ = terminal.run("notifications", "--state", "waiting", "--receiver", "try", *to)
    assert (status, "waiting" in out) == (0, True)
    assert terminal.run("receivers", "remove", "try", *to)[0] == 0


def test_alerts_that_wait_are_listed_with_the_reason(terminal, api, to):
    assert "no alert waits" in terminal.run("alerts", *to)[2]
    assert api.post("/api/v2/alerts", [{"labels": {"alertname": "Full", "job_name": "gone"}}]).status_code == 200
    status, out, _ = terminal.run("alerts", *to)
    assert (status, "Full" in out, "is named gone." in " ".join(out.split())) == (0, True, True)


def test_routes_are_put_in_force_and_shown(terminal, api, tmp_path, to):
    assert api.post("/api/v1/receivers", {"name": "routed", "url": "https://hooks.example/x"}).status_code == 201
    file, text = tmp_path / "routes.toml", '[route]\nreceiver = "routed"\n'
    assert terminal.run("routes", "show", *to)[:2] == (0, "")
    for written, status in ((text, 0), (text.replace("routed", "nobody"), 2), ("", 0)):
        file.write_text(written)
        got, _, err = terminal.run("routes", "apply", str(file), *to)
        assert (bool(got), "'nobody'" in err) == (bool(status), bool(status))
        assert terminal.run("routes", "show", *to)[1] == ("" if not written else text)
    assert terminal.run("routes", "apply", str(tmp_path / "none.toml"), *to)[0] == 2


def test_an_incident_says_which_route_sends_it_and_what_it_waits_for(terminal, api, to):
    assert api.post("/api/v1/receivers", {"name": "on-call", "url": "https://hooks.example/x"}).status_code == 201
    value = {"is_grouped": True, "error": "", "is_file": True, "text": '[route]\nreceiver = "on-call"\n'}
    group = Group("{}:{}", "{}", {}, NOON_UNIX_NS, NOON_UNIX_NS, has_flushed=True)
    group.members["inc_1"] = GroupMember("inc_1", {"kind": "straggler"}, {})
    with write(api.engine) as connection:
        connection.execute(insert(Incident).values(**incident_row()))
        connection.execute(insert(Setting).values(name=SETTING, value=value, updated_unix_ns=1))
        connection.execute(insert(IncidentGroup).values(key=group.key, state=msgspec.to_builtins(group)))
    status, out, err = terminal.run("incidents", "show", "inc_1", *to)
    with write(api.engine) as connection:
        for rows in (Incident, Setting, IncidentGroup):
            connection.execute(delete(rows))
    told = " ".join(out.split())
    assert status == 0, err
    assert "to on-call not sent; the next message of its group is due at 2025-10-09T08:53:20.000Z" in told
    assert "(group_interval 300 s) (route {}, group {})" in told


def test_routes_are_checked_against_the_receivers_of_the_service(terminal, to, tmp_path):
    path = tmp_path / "routes.toml"
    path.write_text('[route]\nreceiver = "pager"\n')
    status, _, err = terminal.run("routes", "check", str(path), "--receivers", *to)
    assert (status, "the service has no receiver 'pager'" in err) == (2, True)
    assert terminal.run("receivers", "add", "pager", "https://hooks.example/hook", *to)[0] == 0
    status, _, err = terminal.run("routes", "check", str(path), "--receivers", *to)
    assert (status, err) == (0, f"{path}: 1 route to pager\n")
