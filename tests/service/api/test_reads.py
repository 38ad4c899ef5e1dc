"""Reads by REST: pages that do not shift, cursors that cannot be forged, numbers that JSON cannot express."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import insert, update

from rankwatch_service.access.scopes import Scope
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Attempt, Incident, IncidentTransition, Job

ON_BOTH_DATABASES = True


def incident(number, **changes):
    return {
        "id": f"inc_{number}", "job": "j", "attempt": "l.0", "kind": "straggler", "scope": "rank:1",
        "episode": 1, "severity": "warning", "state": "open", "ranks": [1], "hosts": ["h"], "devices": [],
        "onset_step": number, "detected_step": number, "resolved_step": None, "onset_unix_ns": number // 2,
        "detected_unix_ns": number, "updated_unix_ns": number, "resolved_unix_ns": None, "score": 9.0,
        "confidence": 0.9, "cause": "", "summary": "slow", "evidence": {"ratio": "NaN"}, "consequences": [],
        "changes_before": [], "impact_gpu_hours_per_hour": 0.5, "suggestion": {}, "checkpoint": None, "transitions": 1,
        "acknowledged_by": None,
    } | changes  # fmt: skip


@pytest.fixture
def many(api):
    rows = [incident(n, job=f"j{n % 2}", severity="critical" if n % 3 == 0 else "warning") for n in range(1, 24)]
    with write(api.engine) as connection:
        connection.execute(insert(Incident), rows)
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
    with write(api.engine) as connection:
        connection.execute(insert(Incident), [incident(99, onset_unix_ns=10**6)])
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
    with write(api.engine) as connection:
        connection.execute(insert(Incident), rows)
        connection.execute(insert(Job), [job_row(name=state, state=state) for state in ("running", "stalled", "lost")])

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
    with write(api.engine) as connection:
        connection.execute(insert(Incident), rows)
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
    with write(api.engine) as connection:
        connection.execute(insert(Job), [job_row(name="a", world_size=256), job_row(name="b", world_size=8)])
        connection.execute(insert(Incident), rows)
    none = {"critical": 0, "warning": 0, "info": 0}
    assert api.get("/api/v1/incidents/totals").json() == {
        "open": none | {"warning": 1},
        "acknowledged": none | {"critical": 2},
        "resolved": none | {"warning": 1},
        "impact_gpu_hours_per_hour": 257.5,
        "accelerated": True,
        "jobs": {"running": 2, "stalled": 0, "paused": 0, "lost": 0, "ended": 0},
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


def job_row(**changes):
    return {
        "name": "j", "state": "running", "attempt": "l.0", "world_size": 4, "ranks_reporting": 4, "step": 5,
        "step_time_s": 0.1, "loss": 1.0, "first_seen_unix_ns": 1, "last_seen_unix_ns": 2,
    } | changes  # fmt: skip


@pytest.mark.parametrize(
    ("loss", "shown"),
    [(float("nan"), "NaN"), (float("inf"), "Inf"), (float("-inf"), "-Inf"), (1e308, 1e308), (-0.0, 0.0), (None, None)],
)
def test_a_number_that_json_cannot_express_is_its_name(api, loss, shown):
    with write(api.engine) as connection:
        connection.execute(insert(Job).values(**job_row(loss=loss)))
    assert api.get("/api/v1/jobs/j").json()["loss"] == shown
    assert api.get("/api/v1/jobs").json()["items"][0]["loss"] == shown


def test_a_nan_stored_by_a_database_that_can_is_shown_as_such():
    from rankwatch_service.numbers import as_json

    assert as_json(float("nan")) == "NaN"


def test_charts_of_a_job_without_values_are_empty_and_of_no_job_are_404(api):
    with write(api.engine) as connection:
        connection.execute(insert(Job).values(**job_row()))
    assert api.get("/api/v1/jobs/j/series?metric=loss").json()["segments"] == []
    assert api.get("/api/v1/jobs/j/heatmap?metric=loss").json()["high"] == []
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
    with write(api.engine) as connection:
        connection.execute(insert(Incident), [rows[0], incident(3, id="inc_aaaaaaaaaaaaaaaaaaaaaaaa")])
    whole = rows[0]["id"]
    for given in (whole, "3f9a2c1bd1", "inc_3f9a2c1bd1", "%233f9a2c", "3f9a2c"):
        found = api.get(f"/api/v1/incidents/{given}").json()
        assert (found["id"], found["short_id"]) == (whole, "3f9a2c1bd1"), given
        assert [one["id"] for one in api.get(f"/api/v1/incidents?id={given}").json()["items"]] == [whole], given
    for given in ("3f9a2", "3f9a2%25", "ffffff", "inc_"):
        assert api.get(f"/api/v1/incidents/{given}").status_code == 404, given
        assert api.get(f"/api/v1/incidents?id={given}").json()["items"] == [], given
    with write(api.engine) as connection:
        connection.execute(insert(Incident), rows[1:])
    several = api.get("/api/v1/incidents/3f9a2c1bd1")
    assert several.status_code == 409
    assert whole in several.json()["detail"]
    of_other = api.get("/api/v1/incidents/3f9a2c1bd1", token=api.token(Scope.READ, job="other"))
    assert of_other.json()["id"] == rows[1]["id"]


def test_an_incident_shows_first_steps_and_what_its_job_supports(api, many):
    with write(api.engine) as connection:
        connection.execute(insert(Job).values(**job_row(name="j1")))
        row = {"job": "j1", "attempt": "l.0", "number": 1, "started_unix_ns": 1, "world_size": 4}
        connection.execute(insert(Attempt).values(**row, topology={"can": ["pause", "relaunch"]}))
    found = api.get("/api/v1/incidents/inc_1").json()
    assert found["can"] == ["pause", "relaunch"]
    assert "nvidia-smi" in found["first_steps"][0]
    assert api.get("/api/v1/incidents/inc_2").json()["can"] == []


def test_attempts_are_listed_without_their_topology_where_nobody_needs_it(api):
    with write(api.engine) as connection:
        connection.execute(insert(Job).values(**job_row(name="j1")))
        row = {"job": "j1", "attempt": "l.0", "number": 1, "started_unix_ns": 1, "world_size": 4}
        connection.execute(insert(Attempt).values(**row, topology={"can": [], "ranks": []}))
    whole, short = (api.get(f"/api/v1/jobs/j1/attempts{query}").json()["items"] for query in ("", "?topology=false"))
    assert (whole[0].pop("topology"), short[0].pop("topology")) == ({"can": [], "ranks": []}, {})
    assert whole == short


@pytest.mark.parametrize("accelerated", [True, False])
def test_job_incident_and_totals_say_alike_whether_costs_are_hours_of_gpus(api, accelerated):
    with write(api.engine) as connection:
        jobs = [job_row(name="j1", accelerated=accelerated), job_row(name="j2", accelerated=not accelerated)]
        connection.execute(insert(Job), jobs)
        row = {"job": "j1", "attempt": "l.0", "number": 1, "started_unix_ns": 1, "world_size": 4}
        connection.execute(insert(Attempt).values(**row, topology={"can": [], "ranks": []}))
        rows = [incident(9, job="j1"), incident(8, job="j2", impact_gpu_hours_per_hour=0.0)]
        connection.execute(insert(Incident), rows)
    asked = ("jobs/j1", "incidents/inc_9", "incidents/totals")
    assert [api.get(f"/api/v1/{path}").json()["accelerated"] for path in asked] == [accelerated] * 3


def acknowledge_as_stream(api, incident):
    """Do what stream does with an acknowledgement in the control log."""
    with write(api.engine) as connection:
        row = {"incident_id": incident, "number": 2, "what": "acknowledged", "actor": "admin", "text": "", "fields": {}}
        connection.execute(insert(IncidentTransition).values(**row, at_unix_ns=9))
        owned = {"state": "acknowledged", "acknowledged_by": "admin", "transitions": 2}
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
