"""Routes by REST: shown, replaced as a whole, tried before, and read-only where a file has them."""

import pytest
from sqlalchemy import insert

from rankwatch_service.access.scopes import Scope
from rankwatch_service.notify.router import SETTING
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Setting

PATH = "/api/v1/routes"
TEXT = (
    '[route]\nreceiver = "pager"\ngroup_by = ["job"]\n[[route.routes]]\nmatchers = ["kind=hang"]\ngroup_wait = "1s"\n'
)


@pytest.fixture
def pager(api):
    assert api.post("/api/v1/receivers", {"name": "pager", "url": "https://hooks.example/x"}).status_code == 201
    return api


def test_there_are_none_until_somebody_puts_some(pager):
    empty = pager.get(PATH)
    assert empty.json() == {"text": "", "tree": None, "is_read_only": False, "error": "", "updated_by": ""}
    put = pager.ask("PUT", PATH, json={"text": TEXT})
    assert (put.status_code, put.json()["text"]) == (200, TEXT)
    assert pager.get(PATH).json() == put.json()
    assert pager.get("/api/v1/audit?action=routes.set").json()["items"]
    stale = pager.ask("PUT", PATH, json={"text": ""}, headers={"if-match": empty.headers["etag"]})
    assert stale.status_code == 412
    again = pager.ask("PUT", PATH, json={"text": ""}, headers={"if-match": put.headers["etag"]})
    assert (again.status_code, pager.get(PATH).json()["text"]) == (200, "")


def test_they_are_shown_as_a_tree_with_what_each_route_inherits(pager):
    pager.ask("PUT", PATH, json={"text": TEXT})
    tree = pager.get(PATH).json()["tree"]
    (child,) = tree["routes"]
    assert (tree["matchers"], tree["group_wait_s"], tree["routes"]) == ([], 30, [child])
    assert (child["matchers"], child["receiver"], child["group_by"]) == (['kind="hang"'], "pager", ["job"])
    assert (child["route"], child["group_wait_s"], child["routes"]) == ('{}/{kind="hang"}', 1, [])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[route]", "route.receiver"),
        (TEXT.replace("job", "jbo"), "no label 'jbo'"),
        (TEXT.replace("pager", "nobody"), "no receiver 'nobody'"),
        ("route\n[x]\n", "line 1"),
    ],
)
def test_wrong_routes_are_refused_and_those_before_stay(pager, text, told):
    pager.ask("PUT", PATH, json={"text": TEXT})
    refused = pager.ask("PUT", PATH, json={"text": text})
    assert (refused.status_code, told in refused.text) == (422, True)
    assert pager.get(PATH).json()["text"] == TEXT


def test_where_a_file_has_them_they_are_shown_and_cannot_be_changed(pager):
    value = {"is_grouped": True, "error": "line 3", "is_file": True, "text": TEXT}
    with write(pager.engine) as connection:
        connection.execute(insert(Setting).values(name=SETTING, value=value, updated_unix_ns=1))
    shown = pager.get(PATH).json()
    assert shown.pop("tree")["receiver"] == "pager"
    assert shown == {"text": TEXT, "is_read_only": True, "error": "line 3", "updated_by": ""}
    assert pager.ask("PUT", PATH, json={"text": TEXT}).status_code == 409


def test_an_incident_is_tried_on_those_in_force_and_on_others(pager):
    labels = {"kind": "hang", "job": "gpt"}
    assert pager.post(f"{PATH}/test", {"labels": labels}).json() == {"items": []}
    pager.ask("PUT", PATH, json={"text": TEXT})
    (found,) = pager.post(f"{PATH}/test", {"labels": labels}).json()["items"]
    assert (found["receiver"], found["group_wait_s"], found["group"]) == ("pager", 1, '{}/{kind="hang"}:{job="gpt"}')
    (other,) = pager.post(f"{PATH}/test", {"labels": labels, "text": '[route]\nreceiver = ""\n'}).json()["items"]
    assert (other["receiver"], other["group_wait_s"]) == ("", 30)
    assert pager.post(f"{PATH}/test", {"labels": {"knid": "hang"}}).status_code == 422


def test_the_alertname_of_an_incident_that_is_tried_follows_from_its_kind(pager):
    text = TEXT.replace("kind=hang", "alertname=RankLost")
    tried = pager.post(f"{PATH}/test", {"labels": {"kind": "rank_lost"}, "text": text}).json()["items"]
    assert tried[0]["route"] == '{}/{alertname="RankLost"}'


def test_readers_may_try_and_only_admins_change(pager):
    reader, operator = pager.token(Scope.READ), pager.token(Scope.OPERATE)
    assert pager.ask("GET", PATH, token=reader).status_code == 200
    assert pager.ask("POST", f"{PATH}/test", json={"labels": {}}, token=reader).status_code == 200
    assert pager.ask("PUT", PATH, json={"text": ""}, token=operator).status_code == 403
