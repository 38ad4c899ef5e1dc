"""The incident archive: what is in it, for whom, and that nothing of it is markup or a path."""

import csv
import hashlib
import io
import json
import zipfile

import pytest
from sqlalchemy import insert, update

from rankwatch_service.access.scopes import Scope
from rankwatch_service.simulate.job import Job as SimulatedJob
from rankwatch_service.store import audit_trail
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Command, Incident
from tests.support.service.stored_series import store
from tests.support.values.incidents import incident_row

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def stored(api):
    """An incident of rank 1 in step 60 of a job with series."""
    store(api.engine, SimulatedJob(world_size=8, steps=100))
    row = incident_row(job="gpt", ranks=[1], onset_step=60, detected_step=66, attempt=attempt_of(api), summary=HOSTILE,
                       evidence={"stacks": [{"ranks": "0-3", "stack": "File loop.py", "where": "loop"},
                                            {"ranks": "../../etc/x", "reason": "it did not answer"}]})  # fmt: skip
    asked = {
        "id": "cmd_1", "job": "gpt", "attempt": row["attempt"], "action": "pause", "params": {}, "reason": HOSTILE,
        "requested_by": "ada (tok_1)", "incident_id": row["id"], "state": "applied", "result": "held",
        "requested_unix_ns": 5, "expires_unix_ns": 6,
    }  # fmt: skip
    with write(api.engine) as connection:
        connection.execute(insert(Incident).values(**row))
        connection.execute(insert(Command).values(**asked))
        audit_trail.append(connection, 7, "ada (tok_1)", "command.request", "cmd_1", "ok")
        audit_trail.append(connection, 8, "bob (tok_2)", "command.request", "cmd_of_others", "ok")
    return row


def attempt_of(api):
    return api.get("/api/v1/jobs/gpt/attempts").json()["items"][0]["attempt"]


def unpacked(answer):
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/zip"
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_it_has_page_series_stacks_commands_and_audit_and_a_manifest_that_fits(api, stored):
    files = unpacked(api.get(f"/api/v1/incidents/{stored['id']}/archive"))
    manifest = json.loads(files.pop("manifest.json"))
    assert {one["name"]: one["sha256"] for one in manifest["files"]} == {
        name: hashlib.sha256(data).hexdigest() for name, data in files.items()
    }
    assert manifest["left_out"] == []
    assert json.loads(files["incident.json"])["id"] == stored["id"]
    assert [one["id"] for one in json.loads(files["commands.json"])] == ["cmd_1"]
    assert [json.loads(line)["target"] for line in files["audit.jsonl"].splitlines()] == ["cmd_1"]
    assert files["stacks/ranks-0-3.txt"] == b"File loop.py"
    assert {"series/loss.csv", "series/step_time_s.csv"} <= files.keys()


def test_series_have_lines_over_all_ranks_and_those_of_the_incident(api, stored):
    files = unpacked(api.get(f"/api/v1/incidents/{stored['id']}/archive"))
    rows = list(csv.DictReader(io.StringIO(files["series/step_time_s.csv"].decode())))
    assert {one["line"] for one in rows} == {"p5", "p50", "p95", "max", "rank:1"}
    steps = sorted({int(one["step"]) for one in rows if one["line"] == "rank:1"})
    assert (steps[0], steps[-1]) == (0, 99)
    assert all(float(one["low"]) <= float(one["high"]) for one in rows if one["mark"] == "finite")


def test_whoever_is_no_admin_gets_all_but_the_audit_trail_and_is_told_so(api, stored):
    path = f"/api/v1/incidents/{stored['id']}/archive"
    files = unpacked(api.get(path, token=api.token(Scope.READ)))
    assert "audit.jsonl" not in files
    assert json.loads(files["manifest.json"])["left_out"] == ["audit.jsonl: the token has no scope admin over all jobs"]
    assert api.get(path, token=api.token(Scope.READ, job="another")).status_code == 404
    assert api.get("/api/v1/incidents/inc_none/archive").status_code == 404


def test_what_people_wrote_is_text_on_the_page_and_never_a_path(api, stored):
    files = unpacked(api.get(f"/api/v1/incidents/{stored['id']}/archive"))
    page = files["page.html"].decode()
    assert HOSTILE not in page
    assert page.count("&lt;img src=x") == 2
    assert files["stacks/ranks-____etc_x.txt"] == b"it did not answer"
    assert not any(".." in name or name.startswith("/") for name in files)


def test_an_incident_without_a_step_has_no_series_and_the_manifest_says_why(api):
    row = incident_row(id="inc_host", onset_step=None, detected_step=None, consequences=[])
    with write(api.engine) as connection:
        connection.execute(insert(Incident).values(**row))
    files = unpacked(api.get("/api/v1/incidents/inc_host/archive"))
    assert not any(name.startswith("series/") for name in files)
    assert json.loads(files["manifest.json"])["left_out"] == ["series: no step is known at which training felt it"]


def test_the_page_of_an_incident_that_is_over_asks_for_nothing(api, stored):
    def page():
        return unpacked(api.get(f"/api/v1/incidents/{stored['id']}/archive"))["page.html"].decode()

    assert "<h2>What to do</h2>" in page()
    over = {"state": "resolved", "evidence": {"ended_with_job": True}}
    with write(api.engine) as connection:
        connection.execute(update(Incident).where(Incident.id == stored["id"]).values(**over))
    assert "<h2>What to do</h2>" not in page()
    assert "job ended" in page()
