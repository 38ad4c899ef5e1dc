"""Reads by REST: filters, orders and pages of lists, cursors that nobody forges, numbers that JSON cannot express."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import insert, update

from rankwatch_service.access.grants import Scope
from rankwatch_service.incidents.lost_time import HOUR_NS, Loss, lost_by_kind
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import (
    Attempt,
    Command,
    Incident,
    IncidentTransition,
    Job,
    JobHostDevice,
    JobOwnership,
)
from tests.support.service.stored_series import read
from tests.support.store.database import add, attempt_row, change, command_row, job_row
from tests.support.store.database import numbered_incident as incident

ON_BOTH_DATABASES = True


@pytest.fixture
def many(api):
    rows = [incident(n, job=f"j{n % 2}", severity="critical" if n % 3 == 0 else "warning") for n in range(1, 24)]
    add(api.engine, Incident, *rows)
    return rows


def pages(api, path, **how):
    cursor = None
    while True:
        joint = "&" if "?" in path else "?"
        page = api.get(path + (f"{joint}cursor={cursor}" if cursor else ""), **how).json()
        yield page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            return


def test_all_pages_together_are_the_list_each_item_once(api, many):
    got = [one["id"] for page in pages(api, "/api/v1/incidents?limit=5") for one in page]
    assert got == [one["id"] for one in sorted(many, key=lambda one: (one["onset_unix_ns"], one["id"]), reverse=True)]


def test_new_rows_do_not_shift_the_pages(api, many):
    first, *rest = pages(api, "/api/v1/incidents?limit=10")
    seen = [one["id"] for one in first]
    walk = pages(api, "/api/v1/incidents?limit=10")
    next(walk)
    add(api.engine, Incident, incident(99, onset_unix_ns=10**6))
    assert seen + [one["id"] for page in walk for one in page] == seen + [one["id"] for page in rest for one in page]


def test_a_cursor_that_was_changed_or_belongs_to_another_list_is_refused(api, many):
    cursor = api.get("/api/v1/incidents?limit=5").json()["next_cursor"]
    assert api.get(f"/api/v1/incidents?limit=5&cursor={cursor}").status_code == 200
    other = "B" if cursor[0] == "A" else "A"
    changed = [cursor[:-1], cursor + "A", other + cursor[1:], cursor.swapcase(), "", "ä", "x" * 5_000, "eyJhIjoxfQ"]
    for bad in changed:
        assert api.get("/api/v1/incidents", params={"cursor": bad}).status_code == 422, bad
    for path in ("/api/v1/incidents?job=j1&", "/api/v1/commands?", "/api/v1/tokens?"):
        assert api.get(f"{path}cursor={cursor}").status_code == 422, path


def test_several_filters_must_all_match(api, many):
    found = api.get("/api/v1/incidents?job=j1&severity=critical&state=unresolved").json()["items"]
    assert [one["onset_step"] for one in found] == [21, 15, 9, 3]


def test_a_filter_given_several_times_matches_each_of_its_values(api):
    states = ["open", "acknowledged", "resolved"]
    rows = [incident(n, state=states[n % 3], kind=["hang", "straggler"][n % 2]) for n in range(1, 10)]
    add(api.engine, Incident, *rows)
    add(api.engine, Job, *[job_row(name=state, state=state) for state in ("running", "stalled", "lost")])

    def found(query):
        return {one["state"] for one in api.get(f"/api/v1/{query}").json()["items"]}

    assert found("incidents?state=open&state=acknowledged") == {"open", "acknowledged"}
    assert found("incidents?state=unresolved&state=resolved") == set(states)
    assert found("incidents?kind=hang&state=open&state=resolved") == {"resolved", "open"}
    assert found("jobs?state=stalled&state=lost") == {"stalled", "lost"}
    assert api.get("/api/v1/incidents?state=open&state=nonsense").status_code == 422
    assert api.get("/api/v1/incidents?limit=5&limit=6").status_code == 422


def test_the_most_urgent_come_first_and_the_first_page_says_how_many_there_are(api):
    rows = [
        incident(
            n, severity=["critical", "warning", "info"][n % 3], state=["open", "acknowledged", "resolved"][n % 4 % 3]
        )
        for n in range(1, 61)
    ]
    add(api.engine, Incident, *rows)
    first = api.get("/api/v1/incidents?order=urgency&limit=7").json()
    assert first["total"] == 60
    walked = [one for page in pages(api, "/api/v1/incidents?order=urgency&limit=7") for one in page]
    severities = ["critical", "warning", "info"]

    def urgency(one):
        place = ["open", "acknowledged", "resolved"].index(one["state"])
        return place, 0 if place == 2 else severities.index(one["severity"]), -one["onset_unix_ns"]

    assert [urgency(one) for one in walked] == sorted(urgency(one) for one in rows)
    assert {one["id"] for one in walked} == {one["id"] for one in rows}
    assert api.get(f"/api/v1/incidents?order=urgency&limit=7&cursor={first['next_cursor']}").json()["total"] is None
    assert api.get("/api/v1/incidents?state=open&severity=critical&limit=1").json()["total"] == 10


def test_totals_count_what_is_open_and_what_it_costs_once(api):
    rows = [
        incident(n, job="a", severity="critical", state="acknowledged", impact_gpu_hours_per_hour=200.0) for n in (1, 2)
    ]
    rows += [incident(3, job="b", impact_gpu_hours_per_hour=1.5), incident(4, job="b", state="resolved")]
    add(api.engine, Job, job_row(name="a", world_size=256), job_row(name="b", world_size=8))
    add(api.engine, Incident, *rows)
    none = {"critical": 0, "warning": 0, "info": 0}
    assert api.get("/api/v1/incidents/totals").json() == {
        "open": none | {"warning": 1},
        "acknowledged": none | {"critical": 2},
        "resolved": none | {"warning": 1},
        "impact_gpu_hours_per_hour": 257.5,
        "accelerated": True,
        "jobs": {"running": 2, "stalled": 0, "paused": 0, "log_not_understood": 0, "lost": 0, "ended": 0},
        "updated_unix_ns": 4,
        "updated_at": "1970-01-01T00:00:00.000000Z",
        "telemetry_unix_ns": 2,
        "telemetry_at": "1970-01-01T00:00:00.000000Z",
    }
    of_b = api.get("/api/v1/incidents/totals", token=api.token(Scope.READ, job="b")).json()
    assert (of_b["acknowledged"], of_b["impact_gpu_hours_per_hour"]) == (none, 1.5)
    jobs = {one["name"]: one for one in api.get("/api/v1/jobs").json()["items"]}
    assert [(jobs[name]["incidents"], jobs[name]["worst_severity"]) for name in "ab"] == [
        (2, "critical"),
        (1, "warning"),
    ]


def test_a_token_for_one_job_lists_and_reads_that_job_alone(api, many):
    token = api.token(Scope.READ, job="j1")
    listed = [one for page in pages(api, "/api/v1/incidents?limit=5", token=token) for one in page]
    assert {one["job"] for one in listed} == {"j1"}
    assert api.get("/api/v1/incidents/inc_1", token=token).status_code == 200
    assert api.get("/api/v1/incidents/inc_2", token=token).status_code == 404
    assert api.get("/api/v1/incidents?job=j0", token=token).json()["items"] == []


@pytest.mark.parametrize(
    ("loss", "shown"),
    [(float("nan"), "NaN"), (float("inf"), "Inf"), (float("-inf"), "-Inf"), (1e308, 1e308), (-0.0, 0.0), (None, None)],
)
def test_a_number_that_json_cannot_express_is_its_name(api, loss, shown):
    add(api.engine, Job, job_row(loss=loss))
    assert api.get("/api/v1/jobs/j").json()["loss"] == shown
    assert api.get("/api/v1/jobs").json()["items"][0]["loss"] == shown


def test_charts_of_a_job_without_values_are_empty_and_of_no_job_are_404(api):
    add(api.engine, Job, job_row())
    assert api.get("/api/v1/jobs/j/series?metric=loss").json()["segments"] == []
    assert read(api.get("/api/v1/jobs/j/heatmap.bin?metric=loss").content)[2].size == 0
    assert api.get("/api/v1/jobs/none/series?metric=loss").status_code == 404
    for query in (
        "",
        "metric=loss&points=0",
        "metric=loss&points=99999",
        "metric=loss&ranks=a",
        "metric=loss&from_step=-1",
    ):
        assert api.get(f"/api/v1/jobs/j/series?{query}").status_code == 422, query
    assert api.get("/api/v1/jobs/j/series?metric=loss&ranks=0-99999999&reduce=none").status_code == 422


def test_an_incident_is_found_by_a_prefix_of_its_id(api):
    rows = [incident(1, id="inc_3f9a2c1bd17744aa20c1d2e3"), incident(2, id="inc_3f9a2c1bd17744aa20c1ffff", job="other")]
    add(api.engine, Incident, rows[0], incident(3, id="inc_aaaaaaaaaaaaaaaaaaaaaaaa"))
    whole = rows[0]["id"]
    for given in (whole, "3f9a2c1bd1", "inc_3f9a2c1bd1", "%233f9a2c", "3f9a2c"):
        found = api.get(f"/api/v1/incidents/{given}").json()
        assert (found["id"], found["short_id"]) == (whole, "3f9a2c1bd1"), given
        assert [one["id"] for one in api.get(f"/api/v1/incidents?id={given}").json()["items"]] == [whole], given
    for given in ("3f9a2", "3f9a2%25", "ffffff", "inc_"):
        assert api.get(f"/api/v1/incidents/{given}").status_code == 404, given
        assert api.get(f"/api/v1/incidents?id={given}").json()["items"] == [], given
    add(api.engine, Incident, *rows[1:])
    several = api.get("/api/v1/incidents/3f9a2c1bd1")
    assert several.status_code == 409
    assert whole in several.json()["detail"]
    of_other = api.get("/api/v1/incidents/3f9a2c1bd1", token=api.token(Scope.READ, job="other"))
    assert of_other.json()["id"] == rows[1]["id"]


def test_an_incident_shows_first_steps_and_what_its_job_supports(api, many):
    add(api.engine, Job, job_row(name="j1"))
    add(api.engine, Attempt, attempt_row("j1", can=["pause", "relaunch"]))
    found = api.get("/api/v1/incidents/inc_1").json()
    assert found["can"] == ["pause", "relaunch"]
    assert "nvidia-smi" in found["first_steps"][0]
    assert api.get("/api/v1/incidents/inc_2").json()["can"] == []


def test_attempts_are_listed_without_their_topology_where_nobody_needs_it(api):
    add(api.engine, Job, job_row(name="j1"))
    add(api.engine, Attempt, attempt_row("j1"))
    whole, short = (api.get(f"/api/v1/jobs/j1/attempts{query}").json()["items"] for query in ("", "?topology=false"))
    assert (whole[0].pop("topology"), short[0].pop("topology")) == ({"can": [], "ranks": [], "replicated": True}, {})
    assert whole == short


@pytest.mark.parametrize("accelerated", [True, False])
def test_job_incident_and_totals_say_alike_whether_costs_are_hours_of_gpus(api, accelerated):
    jobs = [job_row(name="j1", accelerated=accelerated), job_row(name="j2", accelerated=not accelerated)]
    add(api.engine, Job, *jobs)
    add(api.engine, Attempt, attempt_row("j1"))
    rows = [incident(9, job="j1"), incident(8, job="j2", impact_gpu_hours_per_hour=0.0)]
    add(api.engine, Incident, *rows)
    asked = ("jobs/j1", "incidents/inc_9", "incidents/totals")
    assert [api.get(f"/api/v1/{path}").json()["accelerated"] for path in asked] == [accelerated] * 3


def acknowledge_as_stream(api, incident):
    """Do what stream does with an acknowledgement in the control log, at once."""
    line = {"number": 2, "what": "acknowledged", "actor": "admin", "text": "", "fields": {}, "at_unix_ns": 9}
    owned = {"state": "acknowledged", "acknowledged_by": "admin", "transitions": 2}
    with write(api.engine) as connection:
        connection.execute(insert(IncidentTransition).values(incident_id=incident, **line))
        connection.execute(update(Incident).where(Incident.id == incident).values(**owned))


def test_a_judgement_waits_for_stream_and_says_202_without_it(api, many, monkeypatch):
    monkeypatch.setattr("rankwatch_service.api.routes.incidents.STREAM_WAIT_S", 0.05)
    answer = api.post("/api/v1/incidents/inc_3/acknowledge")
    assert (answer.status_code, answer.json()["state"]) == (202, "open")

    acknowledge_as_stream(api, "inc_3")
    answer = api.post("/api/v1/incidents/inc_3/acknowledge")
    assert (answer.status_code, answer.json()["state"]) == (200, "acknowledged")
    assert [one["what"] for one in answer.json()["history"]] == ["acknowledged"]


def test_who_takes_over_or_gives_back_waits_for_stream_and_what_changes_nothing_does_not(api, many, monkeypatch):
    monkeypatch.setattr("rankwatch_service.api.routes.incidents.STREAM_WAIT_S", 0.05)
    path = "/api/v1/incidents/inc_3"
    assert api.post(f"{path}/unacknowledge").status_code == 200
    acknowledge_as_stream(api, "inc_3")
    bob = api.token(Scope.READ, Scope.OPERATE)
    answers = [api.post(f"{path}/acknowledge", token=bob), api.post(f"{path}/unacknowledge")]
    assert [(answer.status_code, answer.json()["acknowledged_by"]) for answer in answers] == [(202, "admin")] * 2


def test_a_judgement_is_answered_as_soon_as_stream_has_acted(api, many, monkeypatch):
    monkeypatch.setattr("rankwatch_service.api.routes.incidents.STREAM_WAIT_S", 3_600.0)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(api.post, "/api/v1/incidents/inc_3/acknowledge")
        while not api.get("/api/v1/audit?action=incident.acknowledged").json()["items"]:
            assert not answer.done()
        acknowledge_as_stream(api, "inc_3")
        assert (answer.result().status_code, answer.result().json()["state"]) == (200, "acknowledged")


def test_metrics_are_openmetrics_and_count_what_is_open(api, many):
    answer = api.get("/metrics")
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")
    assert 'rankwatch_incidents_open{severity="critical"} 7.0' in answer.text
    assert "rankwatch_build_info{" in answer.text


@pytest.fixture
def listed(api):
    """Numbers of the incidents that a query finds, in its order."""
    rows = [
        incident(1, ranks=[1, 17], hosts=["host-1"], onset_unix_ns=100, updated_unix_ns=900),
        incident(2, ranks=[7], hosts=["host-1", "host-17"], onset_unix_ns=200, resolved_unix_ns=250, state="resolved"),
        incident(3, ranks=[], hosts=[], onset_unix_ns=300, kind="hang", summary="Loss is 50% HIGHER", job="gpt_a"),
        incident(4, ranks=[171], hosts=['a"b'], onset_unix_ns=400, impact_gpu_hours_per_hour=64.0, job="gptxa",
                 state="acknowledged", acknowledged_by="ada@example.com"),
    ]  # fmt: skip
    add(api.engine, Incident, *rows)

    def found(**query):
        answer = api.get("/api/v1/incidents", params=query)
        assert answer.status_code == 200, answer.text
        return [one["onset_step"] for one in answer.json()["items"]]

    return found


def test_a_rank_or_host_finds_those_that_name_it_whole(listed):
    assert listed(rank=17) == [1]
    assert listed(rank=[7, 171]) == [4, 2]
    assert listed(host="host-1") == [2, 1]
    assert listed(host=["host-17", 'a"b']) == [4, 2]
    assert listed(host="host") == []
    assert listed(host="host-1", state="resolved") == [2]


def test_a_device_or_attempt_finds_those_that_name_it(api, listed):
    rows = [
        incident(5, devices=["GPU-5a", "GPU-5b"], attempt="l.5", onset_unix_ns=500),
        incident(6, devices=["GPU-6"], attempt="l.6", onset_unix_ns=600),
    ]
    add(api.engine, Incident, *rows)
    assert listed(device="GPU-5b") == [5]
    assert listed(device=["GPU-6", "GPU-5a"]) == [6, 5]
    assert listed(device="GPU-5") == []
    assert listed(attempt="l.6") == [6]
    assert listed(attempt=["l.5", "l.6"], device="GPU-5a") == [5]


def test_a_range_of_time_finds_what_lasted_into_it(listed):
    assert listed(from_unix_ns=250) == [4, 3, 2, 1]
    assert listed(from_unix_ns=251) == [4, 3, 1]
    assert listed(to_unix_ns=300) == [2, 1]
    assert listed(from_unix_ns=251, to_unix_ns=300) == [1]


def test_a_search_ignores_case_and_takes_wildcards_as_text(listed):
    assert listed(search="50% higher") == [3]
    assert listed(search="HOST-17") == [2]
    assert listed(search="gpt_a") == [3]
    assert listed(search="Ada@") == [4]
    assert listed(search="inc_4") == [4]
    assert listed(search="%") == [3]


def test_ids_find_those_of_them_that_match_the_other_filters(listed):
    assert listed(id=["inc_1", "inc_2", "inc_9"]) == [2, 1]
    assert listed(id=["inc_1", "inc_2"], state="open") == [1]


def test_the_order_is_the_service_s_and_goes_on_over_pages(api, listed):
    expected = {
        "newest": [4, 3, 2, 1],
        "oldest": [1, 2, 3, 4],
        "updated": [1, 4, 3, 2],
        "urgency": [3, 1, 4, 2],
        "cost": [4, 3, 2, 1],
    }
    for order, numbers in expected.items():
        assert listed(order=order) == numbers, order
        walked = pages(api, f"/api/v1/incidents?order={order}&limit=1")
        assert [one["onset_step"] for page in walked for one in page] == numbers, order


def test_a_cursor_holds_for_its_filters_alone(api, listed):
    cursor = api.get("/api/v1/incidents?limit=1&host=host-1").json()["next_cursor"]
    assert api.get("/api/v1/incidents", params={"limit": 1, "host": "host-1", "cursor": cursor}).status_code == 200
    assert api.get("/api/v1/incidents", params={"limit": 1, "host": "host-17", "cursor": cursor}).status_code == 422


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rank", "-1"), ("rank", "x"), ("rank", str(2**31)), ("host", ""), ("host", "a\0b"), ("host", "h" * 201),
        ("search", ""), ("search", "a\0b"), ("search", "x" * 201), ("from_unix_ns", "-1"), ("to_unix_ns", str(2**63)),
        ("order", "random"), ("kind", "nonsense"), ("hosts", "host-1"),
    ],
    ids=["negative", "text", "too large", "no host", "NUL in a host", "long host", "empty search", "NUL in a search",
         "long search", "negative time", "late time", "order", "kind", "misspelled"],
)  # fmt: skip
def test_a_filter_without_meaning_is_refused_with_its_name(api, name, value):
    answer = api.get("/api/v1/incidents", params={name: value})
    assert answer.status_code == 422
    assert name in answer.text


def test_totals_count_jobs_by_state_and_say_when_anything_changed(api, listed):
    totals = api.get("/api/v1/incidents/totals").json()
    assert totals["jobs"] == dict.fromkeys(("running", "stalled", "paused", "log_not_understood", "lost", "ended"), 0)
    assert (totals["updated_unix_ns"], totals["telemetry_unix_ns"]) == (900, None)
    rows = [("a", "stalled"), ("b", "stalled"), ("c", "lost"), ("d", "running")]
    for n, (name, state) in enumerate(rows):
        add(api.engine, Job, job_row(name=name, state=state, last_seen_unix_ns=n))
    totals = api.get("/api/v1/incidents/totals").json()
    assert totals["jobs"] == {"running": 1, "stalled": 2, "paused": 0, "log_not_understood": 0, "lost": 1, "ended": 0}
    assert totals["telemetry_unix_ns"] == 3
    assert api.get("/api/v1/incidents/totals?job=a").json()["jobs"]["stalled"] == 1


@pytest.fixture
def names(api):
    """What a list of the api names, by path, list of the names and query."""

    def found(path, name, **query):
        answer = api.get(f"/api/v1/{path}", params=query)
        assert answer.status_code == 200, answer.text
        return [one[name] for one in answer.json()["items"]]

    return found


def test_commands_are_found_by_action_attempt_and_time_and_come_in_the_order_asked_for(api, names):
    now = api.clock.unix_ns()
    rows = [
        command_row("cmd_1", requested_unix_ns=now + 1, finished_unix_ns=now + 90),
        command_row("cmd_2", requested_unix_ns=now + 2, action="stop", attempt="l.1"),
        command_row("cmd_3", requested_unix_ns=now + 3, action="trace", applied_unix_ns=now + 50),
    ]
    for row in rows:
        add(api.engine, Command, row)

    def found(**query):
        return names("commands", "id", **query)

    assert found() == ["cmd_3", "cmd_2", "cmd_1"]
    assert found(order="oldest") == ["cmd_1", "cmd_2", "cmd_3"]
    assert found(order="changed") == ["cmd_1", "cmd_3", "cmd_2"]
    assert found(action=["stop", "trace"]) == ["cmd_3", "cmd_2"]
    assert found(attempt="l.1") == ["cmd_2"]
    assert found(from_unix_ns=now + 2) == ["cmd_3", "cmd_2"]
    assert found(from_unix_ns=now + 2, to_unix_ns=now + 3) == ["cmd_2"]
    assert api.get("/api/v1/commands?action=nonsense").status_code == 422


def test_jobs_are_found_by_owner_host_and_time_and_come_in_the_order_asked_for(api, names):
    rows = [
        job_row(name="a", world_size=8, first_seen_unix_ns=1, last_seen_unix_ns=10),
        job_row(name="b", world_size=64, first_seen_unix_ns=20, last_seen_unix_ns=30),
        job_row(name="c", world_size=4, first_seen_unix_ns=5, last_seen_unix_ns=40),
    ]
    device = {"job": "c", "kind": "host", "number": 0, "host": "node-1", "index": 0, "uuid": ""}
    add(api.engine, Job, *rows)
    add(api.engine, JobOwnership, job="b", project="nlp", owner="ann")
    add(api.engine, JobHostDevice, device)

    def found(**query):
        return names("jobs", "name", **query)

    assert found() == ["c", "b", "a"]
    assert found(order="newest") == ["b", "c", "a"]
    assert found(order="size") == ["b", "a", "c"]
    assert found(owner="ann") == ["b"]
    assert found(host="node-1") == ["c"]
    assert found(from_unix_ns=30) == ["c", "b"]
    assert found(from_unix_ns=10, to_unix_ns=20) == ["c", "a"]


H = HOUR_NS
NEARLY = 0.1
"""Time goes on while a test runs; this many GPU-hours are minutes."""


@pytest.mark.parametrize(
    ("losses", "lost"),
    [
        ([], {}),
        ([Loss("hang", 2 * H, H, 8.0)], {}),
        ([Loss("hang", 0, H, 15.0), Loss("straggler", 0, 4 * H, 2.0)], {"straggler": 7.6, "hang": 6.4}),
        ([Loss("hang", 0, H, 99.0), Loss("rank_lost", 0, 2 * H, 8.0)], {"rank_lost": 12.0, "hang": 4.0}),
        ([Loss("hang", 0, H, 2.0), Loss("hang", H, 2 * H, 3.0), Loss("hang", 5 * H, 6 * H, 1.0)], {"hang": 6.0}),
    ],
    ids=["nothing", "already over", "two at once", "more than the job has", "one after another"],
)  # fmt: skip
def test_what_happens_at_once_costs_no_more_than_all_gpus(losses, lost):
    found = lost_by_kind(losses, 8)
    assert list(found) == list(lost)
    assert found == pytest.approx(lost)


@pytest.fixture
def job(api):
    """A job of 8 GPUs that began 10 hours ago."""
    now = api.clock.unix_ns()
    rows = [
        incident(1, kind="hang", onset_unix_ns=now - 9 * H, resolved_unix_ns=now - 8 * H, state="resolved",
                 attempt="l.0", impact_gpu_hours_per_hour=8.0),
        incident(2, onset_unix_ns=now - 2 * H, attempt="l.1", impact_gpu_hours_per_hour=2.0),
        incident(3, kind="nonfinite", onset_unix_ns=now - H, impact_gpu_hours_per_hour=0.0),
        incident(4, kind="hang", job="other", onset_unix_ns=now - H, impact_gpu_hours_per_hour=8.0),
    ]  # fmt: skip
    seen = {"first_seen_unix_ns": now - 10 * H, "last_seen_unix_ns": now - H}
    add(api.engine, Job, job_row(name="j", world_size=8, **seen))
    add(api.engine, Incident, *rows)
    return now


def test_all_attempts_of_a_job_count_with_the_kind_that_cost_most_first(api, job):
    found = api.get("/api/v1/jobs/j/lost-time").json()
    assert [(one["kind"], one["incidents"], one["gpu_hours"]) for one in found["items"]] == [
        ("hang", 1, pytest.approx(8.0)),
        ("straggler", 1, pytest.approx(4.0, abs=NEARLY)),
    ]
    assert found["gpu_hours"] == pytest.approx(12.0, abs=NEARLY)
    assert found["goodput"] == pytest.approx(1 - 12 / 80, abs=0.01)
    assert found["goodput_now"] == pytest.approx(0.75)
    assert found["from_unix_ns"] == job - 10 * H


def test_a_period_counts_only_what_lies_in_it(api, job):
    found = api.get(f"/api/v1/jobs/j/lost-time?from_unix_ns={job - 4 * H}&to_unix_ns={job - H}").json()
    assert [(one["kind"], one["gpu_hours"]) for one in found["items"]] == [("straggler", pytest.approx(2.0))]
    assert found["goodput"] == pytest.approx(1 - 2 / 24)
    before = api.get("/api/v1/jobs/j/lost-time?to_unix_ns=5").json()
    assert (before["items"], before["gpu_hours"], before["goodput"]) == ([], 0, None)


@pytest.mark.parametrize(("state", "goodput"), [("stalled", 0), ("lost", 0), ("paused", None), ("ended", None)])
def test_a_job_without_progress_has_no_goodput_now(api, job, state, goodput):
    change(api.engine, update(Job).values(state=state))
    found = api.get("/api/v1/jobs/j/lost-time").json()
    assert found["goodput_now"] == goodput
    assert (found["to_unix_ns"] == job - H) == (state == "ended")


def test_lost_time_of_a_job_that_one_may_not_see_is_refused(api, job):
    assert api.get("/api/v1/jobs/j/lost-time", token=api.token(Scope.READ, job="other")).status_code in (403, 404)
    assert api.get("/api/v1/jobs/nobody/lost-time").status_code == 404
