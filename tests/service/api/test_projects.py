"""Projects and owners of jobs by REST, on both databases. What stream makes of them is in `stream/test_projects.py`."""

import pytest

from rankwatch import wire
from rankwatch_service.access.grants import Scope
from rankwatch_service.access.tokens import issue_token
from rankwatch_service.api.ingest import NEW_JOBS_MAX
from rankwatch_service.policy.control_records import JobOwnership, PolicySet
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Incident, Job
from tests.support.store.database import add, job_row
from tests.support.values.batches import batch
from tests.support.values.incidents import incident_row

ON_BOTH_DATABASES = True
JOBS = "/api/v1/jobs"


@pytest.fixture
def jobs(api):
    """Two jobs, of which one has an open incident and a resolved one."""
    add(api.engine, Job, job_row("a"), job_row("b"))
    states = enumerate(("open", "resolved"))
    add(api.engine, Incident, *[incident_row(id=f"inc_{number}", job="a", state=state) for number, state in states])
    assert edit(api, "a", project="nlp", owner="ann").status_code == 200
    return api


def edit(api, job, token=None, **body):
    return api.ask("PATCH", f"{JOBS}/{job}", token=token, json=body)


def names(api, path, **how):
    return [one.get("name") or one["id"] for one in api.get(path, **how).json()["items"]]


def test_an_edit_sets_what_it_names_and_is_told_to_stream_and_audited_once(jobs):
    changed = edit(jobs, "a", owner="bob").json()
    assert (changed["project"], changed["owner"]) == ("nlp", "bob")
    assert edit(jobs, "a", owner="bob").status_code == 200, "nothing changes"
    detail = jobs.get(f"{JOBS}/a").json()
    assert (detail["project"], detail["owner"]) == ("nlp", "bob")
    assert edit(jobs, "a", project="").json()["project"] == ""
    of_a = [record for record in jobs.reported(JobOwnership) if record.job == "a"]
    assert of_a == [JobOwnership("a", "nlp", "ann"), JobOwnership("a", "nlp", "bob"), JobOwnership("a", "", "bob")]
    audited = jobs.get("/api/v1/audit?target=a").json()["items"]
    assert [(row["action"], row["fields"]["owner"]) for row in audited] == [
        ("job.edit", "bob"),
        ("job.edit", "bob"),
        ("job.edit", "ann"),
    ]


def test_who_may_edit_a_job_and_what_it_can_be_called(jobs):
    assert edit(jobs, "none", owner="x").status_code == 404
    assert edit(jobs, "a", jobs.token(Scope.READ), owner="x").status_code == 403
    assert edit(jobs, "a", jobs.token(Scope.OPERATE, job="b"), owner="x").status_code == 404
    assert edit(jobs, "a", jobs.token(Scope.OPERATE, job="a"), owner="x").status_code == 200
    for name in ("a/b", " x", "\u200b", "x" * 201):
        assert edit(jobs, "a", project=name).status_code == 422
    assert edit(jobs, "a", name="x").status_code == 422


def test_jobs_and_incidents_of_a_project(jobs):
    edit(jobs, "b", project="vision")
    assert names(jobs, f"{JOBS}?project=nlp") == ["a"]
    assert sorted(names(jobs, f"{JOBS}?project=nlp&project=vision")) == ["a", "b"]
    assert names(jobs, "/api/v1/incidents?project=nlp&state=open") == ["inc_0"]
    assert names(jobs, "/api/v1/incidents?project=vision") == []
    assert jobs.get("/api/v1/incidents/totals?project=nlp").json()["open"]["warning"] == 1
    assert jobs.get("/api/v1/incidents/totals?project=vision").json()["open"]["warning"] == 0


def test_the_list_of_projects_counts_jobs_that_are_listed_and_open_incidents(jobs):
    edit(jobs, "b", project="vision", owner="")
    found = jobs.get("/api/v1/projects").json()["items"]
    assert found == [{"name": "vision", "jobs": 1, "incidents": 0}, {"name": "nlp", "jobs": 1, "incidents": 1}]
    page = jobs.get("/api/v1/projects?limit=1").json()
    assert names(jobs, f"/api/v1/projects?limit=1&cursor={page['next_cursor']}") == ["nlp"]
    assert names(jobs, "/api/v1/projects", token=jobs.token(Scope.READ, job="b")) == ["vision"]


def test_receivers_and_rules_name_projects(jobs):
    receiver = {"name": "nlp", "url": "https://hooks.example/nlp", "projects": ["nlp"]}
    assert jobs.post("/api/v1/receivers", receiver).json()["projects"] == ["nlp"]
    rule = {"id": "r", "mode": "suggest", "action": "stop", "project": "nlp"}
    assert jobs.ask("PUT", "/api/v1/policy", json={"rules": [rule]}).status_code == 200
    assert jobs.get("/api/v1/policy").json()["rules"][0]["project"] == "nlp"
    assert jobs.reported(PolicySet)[-1].rules[0].project == "nlp"


# ---- tokens ----------------------------------------------------------------------------------------------------------


def token(api, *scopes, **more):
    with write(api.engine) as connection:
        return issue_token(connection, "test", "a team", scopes, api.clock.unix_ns(), makers=(), **more)[1]


def send(api, job, by):
    return api.send(wire.encode(batch(0, job=job)), token=by).status_code


def enrol(api, job, by):
    return api.post("/api/v1/agents/enrol", {"job": job, "host": "h"}, token=by).status_code


@pytest.mark.parametrize("how", [send, enrol])
def test_a_job_that_begins_inherits_what_its_token_says_once(jobs, how):
    mine = token(jobs, Scope.INGEST, job="new", project="nlp", owner="ann")
    assert [how(jobs, "new", mine) for _ in range(2)] in ([202, 202], [201, 201])
    assert jobs.reported(JobOwnership)[-1] == JobOwnership("new", "nlp", "ann")
    reported = jobs.get("/api/v1/audit?target=new&action=job.edit").json()["items"]
    assert [(row["fields"]["project"], row["actor"].split()[0]) for row in reported] == [("nlp", "a")]


def test_the_token_of_one_job_goes_on_when_a_person_moves_the_job_and_moves_it_not_back(jobs):
    mine = token(jobs, Scope.INGEST, job="b", project="nlp")
    edit(jobs, "b", project="vision")
    before = jobs.reported(JobOwnership)
    assert send(jobs, "b", mine) == 202
    assert jobs.reported(JobOwnership) == before
    assert names(jobs, f"{JOBS}?project=vision") == ["b"]


@pytest.mark.parametrize("how", [send, enrol])
def test_a_token_of_a_project_sends_for_jobs_of_it_alone_and_begins_jobs_in_it(jobs, how):
    mine = token(jobs, Scope.INGEST, project="nlp")
    other = token(jobs, Scope.INGEST, project="vision")
    assert how(jobs, "a", mine) in (201, 202)
    assert how(jobs, "b", mine) == 403, "a job without a project is not theirs either"
    assert how(jobs, "new", mine) in (201, 202)
    assert how(jobs, "new", other) == 403
    assert how(jobs, "new", mine) in (201, 202)


def test_a_token_of_a_project_sees_nothing_of_other_jobs(jobs):
    mine = token(jobs, Scope.READ, Scope.OPERATE, Scope.COMMAND, Scope.ADMIN, project="nlp")
    add(jobs.engine, Incident, incident_row(id="inc_b", job="b"))
    assert names(jobs, JOBS, token=mine) == ["a"]
    assert "inc_b" not in names(jobs, "/api/v1/incidents", token=mine)
    assert jobs.get("/api/v1/incidents/inc_b", token=mine).status_code == 404
    assert jobs.get("/api/v1/incidents/inc_0", token=mine).status_code == 200
    assert jobs.get(f"{JOBS}/b", token=mine).status_code == 404
    assert jobs.ask("DELETE", f"{JOBS}/b", token=mine).status_code == 404
    assert jobs.get("/api/v1/tokens", token=mine).status_code == 403
    silence = {"job": "b", "ends_unix_ns": jobs.clock.unix_ns() + 10**12, "comment": "x"}
    for job in ("b", "", "not-yet"):
        assert jobs.post("/api/v1/silences", silence | {"job": job}, token=mine).status_code == 403
    assert jobs.post("/api/v1/silences", silence | {"job": "a"}, token=mine).status_code == 201


def test_a_token_of_a_project_moves_no_job_into_another(jobs):
    mine = token(jobs, Scope.OPERATE, project="nlp")
    assert edit(jobs, "a", mine, project="vision").status_code == 403
    assert edit(jobs, "a", mine, project="").status_code == 403
    assert edit(jobs, "a", mine, project="nlp", owner="bob").status_code == 200


def test_a_session_of_a_token_of_a_project_has_its_limits(jobs):
    mine = token(jobs, Scope.READ, project="nlp")
    assert jobs.log_in(mine).status_code == 201
    listed = jobs.client.get(JOBS).json()["items"]
    assert [job["name"] for job in listed] == ["a"]


def test_enrolling_for_new_jobs_has_the_limit_of_telemetry(jobs):
    mine = token(jobs, Scope.INGEST, project="nlp")
    answers = [enrol(jobs, f"new-{number}", mine) for number in range(NEW_JOBS_MAX + 20)]
    assert answers[:NEW_JOBS_MAX] == [201] * NEW_JOBS_MAX
    assert 429 in answers
    assert enrol(jobs, "new-0", mine) == 201


def test_a_token_is_listed_with_what_it_passes_on(jobs):
    body = {"name": "nlp", "scopes": ["ingest"], "job": "x", "project": "nlp", "owner": "ann"}
    made = jobs.post("/api/v1/tokens", body).json()
    assert (made["project"], made["owner"]) == ("nlp", "ann")
    assert jobs.post("/api/v1/tokens", body | {"project": "a/b"}).status_code == 422
