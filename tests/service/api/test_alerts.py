"""`POST` and `GET /api/v2/alerts`, as clients of an Alertmanager use them."""

from datetime import UTC, datetime

import pytest

from rankwatch_service import alerts
from rankwatch_service.access.grants import Scope
from rankwatch_service.alerts import ALERTS_MAX
from rankwatch_service.api.routes.alerts import ALERTS_PER_REQUEST_MAX, LISTED_MAX
from rankwatch_service.store.models import Job
from tests.support.clock import FakeClock
from tests.support.store.database import add, job_row

CLOCK = FakeClock
PATH = "/api/v2/alerts"


@pytest.fixture(autouse=True)
def jobs(api):
    seen = dict.fromkeys(("first_seen_unix_ns", "last_seen_unix_ns"), api.clock.unix_ns())
    add(api.engine, Job, job_row("gpt", **seen), job_row("bert", **seen))


def at(api, seconds):
    return datetime.fromtimestamp(api.clock.unix_ns() / 1e9 + seconds, UTC).isoformat().replace("+00:00", "Z")


def alert(name="DiskFull", **labels):
    """Labels that are fields of an alert are none."""
    fields = {key: labels.pop(key) for key in ("startsAt", "endsAt", "annotations", "generatorURL") if key in labels}
    return {"labels": {"alertname": name, **labels}} | fields


def post(api, *alerts, status=200, **how):
    reply = api.post(PATH, list(alerts), **how)
    assert reply.status_code == status, reply.text
    return reply.json()


def results(api, *alerts, **how):
    return post(api, *alerts, **how)["results"]


def test_an_alert_begins_is_repeated_and_ends(api):
    firing = alert(job_name="gpt", startsAt=at(api, -90), annotations={"summary": "full"}, generatorURL="http://p/g")
    assert post(api, firing) == {"results": {"begun": 1}, "waiting": []}
    (shown,) = api.get(PATH).json()
    assert shown == {
        "labels": {"alertname": "DiskFull", "job_name": "gpt"},
        "annotations": {"summary": "full"},
        "startsAt": "2023-11-14T22:11:50.000000Z",
        "endsAt": "2023-11-14T22:18:20.000000Z",
        "updatedAt": "2023-11-14T22:13:20.000000Z",
        "generatorURL": "http://p/g",
        "fingerprint": shown["fingerprint"],
        "receivers": [],
        "status": {"state": "active", "silencedBy": [], "inhibitedBy": []},
        "jobs": ["gpt"],
    }
    assert results(api, firing, firing) == {"repeated": 1}
    assert results(api, firing | {"endsAt": at(api, -1)}) == {"ended": 1}
    assert api.get(PATH).json() == []


def test_times_that_are_not_set_count_as_missing(api):
    zero = "0001-01-01T00:00:00.000Z"
    assert results(api, alert(job_name="gpt", startsAt=zero, endsAt=zero)) == {"begun": 1}
    (shown,) = api.get(PATH).json()
    assert (shown["startsAt"], shown["endsAt"]) == ("2023-11-14T22:13:20.000000Z", "2023-11-14T22:18:20.000000Z")
    assert results(api, alert("Ever", job_name="gpt", endsAt="9999-12-31T23:59:59.123456789Z")) == {"begun": 1}


def test_alerts_that_cannot_be_accepted_hold_up_no_others(api):
    late = alert(startsAt=at(api, 0), endsAt=at(api, -60))
    refused = post(api, {"labels": {}}, late, alert(job_name="gpt"), status=400)
    assert refused["detail"] == "2 of 3 alerts cannot be accepted; all others were taken"
    assert refused["errors"] == [
        {"loc": "body.0", "msg": "an alert has at least one label"},
        {"loc": "body.1", "msg": "endsAt is before startsAt"},
    ]
    assert [one["jobs"] for one in api.get(PATH).json()] == [["gpt"]]


def test_a_request_has_so_many_alerts_and_a_reply_names_few(api):
    many = [alert(f"A{number}") for number in range(ALERTS_PER_REQUEST_MAX)]
    assert len(post(api, *many)["waiting"]) == LISTED_MAX
    post(api, *many, alert(), status=422)
    post(api, {"labels": {"alertname": 1}}, status=422)
    post(api, alert(startsAt="today"), status=422)


def test_an_alert_for_which_there_is_no_room_is_to_be_sent_again(api, monkeypatch):
    monkeypatch.setattr(alerts, "ALERTS_MAX", 1)
    reply = api.post(PATH, [alert(job_name="gpt"), alert("LinkDown", job_name="gpt")])
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert reply.json()["detail"] == f"{ALERTS_MAX} alerts fire already: 1 of 2 were not taken"


def test_what_is_about_rankwatch_itself_is_ignored(api):
    assert results(api, alert("Watchdog"), alert("RankwatchDown", job_name="gpt")) == {"own": 2}
    assert api.get(PATH).json() == []


def test_only_a_token_with_the_scope_sends_and_only_about_its_jobs(api):
    sender, of_bert = api.token(Scope.ALERT), api.token(Scope.ALERT, Scope.READ, job="bert")
    assert results(api, alert(job_name="gpt"), token=sender) == {"begun": 1}
    post(api, alert(), token=api.token(Scope.READ, Scope.OPERATE, Scope.INGEST), status=403)
    post(api, alert(), token="", status=401)
    assert api.get(PATH, token=sender).status_code == 403
    sent = results(api, alert("LinkDown", job_name="bert"), alert(job_name="gpt", endsAt=at(api, 0)), token=of_bert)
    assert sent == {"begun": 1, "repeated": 1}
    assert results(api, alert("Elsewhere", job_name="gpt"), token=of_bert) == {"waiting": 1}
    assert [one["labels"]["alertname"] for one in api.get(PATH, token=of_bert).json()] == ["LinkDown"]
    assert len(api.get(PATH).json()) == 3


def test_the_list_is_filtered_as_an_alertmanager_does(api):
    post(api, alert(job_name="gpt", severity="critical"), alert("LinkDown", job_name="bert"), alert("Elsewhere"))

    def names(query=""):
        return {one["labels"]["alertname"] for one in api.get(PATH + query).json()}

    assert names() == {"DiskFull", "LinkDown", "Elsewhere"}
    assert names("?active=false&silenced=true&inhibited=true") == {"Elsewhere"}
    assert names("?unprocessed=false") == {"DiskFull", "LinkDown"}
    assert names('?filter=severity="critical"') == {"DiskFull"}
    assert names('?filter=alertname=~"D.*|L.*"&filter=job_name!="gpt"') == {"LinkDown"}
    assert names("?receiver=x") == set()
    assert api.get(PATH + "?filter=nonsense").status_code == 422


def test_those_that_wait_are_listed_with_the_reason_to_whoever_may_see_them(api, monkeypatch):
    monkeypatch.setattr(alerts, "ALERTS_PER_JOB_MAX", 1)
    post(api, alert("A", job_name="gpt"), alert("Full", job_name="gpt", startsAt=at(api, -60)))
    post(api, alert("Elsewhere", instance="n:1", severity="critical", annotations={"summary": "gone"}))
    first, second = (page := api.get("/api/v1/alerts/waiting").json())["items"]
    assert page["total"] == 2
    assert (first["name"], first["job"], first["severity"], first["summary"]) == ("Elsewhere", "", "critical", "gone")
    assert first["why"].startswith("No agent of a running job that its sender may access has reported from n:1 ")
    assert (second["name"], second["job"], second["why"][:14]) == ("Full", "gpt", "Job gpt has 1 ")
    (mine,) = api.get("/api/v1/alerts/waiting", token=api.token(Scope.READ, job="gpt")).json()["items"]
    assert mine["name"] == "Full"
    assert api.get("/api/v1/alerts/waiting", token=api.token(Scope.READ, job="bert")).json()["items"] == []


def test_the_metrics_count_them(api):
    post(api, alert(job_name="gpt"), alert("Elsewhere"), alert("Watchdog"))
    post(api, {"labels": {}}, status=400)
    lines = api.get("/metrics").text.splitlines()
    for result in ("begun", "waiting", "own", "malformed"):
        assert f'rankwatch_alerts_total{{result="{result}"}} 1.0' in lines
    assert "rankwatch_alerts_waiting 1.0" in lines
