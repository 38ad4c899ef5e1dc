"""A preview equals a second run over the same export."""

import io
import json
from contextlib import ExitStack

import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from rankwatch_service.access.grants import Scope
from rankwatch_service.cli.app import app
from rankwatch_service.incidents.kinds import PREVIEWABLE
from rankwatch_service.preview import engine
from rankwatch_service.series.rows import stored_chunk
from rankwatch_service.simulate.faults import LossSpike, Slow
from rankwatch_service.simulate.job import Job
from tests.support.service.api import running_api
from tests.support.service.stored_series import store

PATH = "/api/v1/tuning/preview"
DEAF = {"settings": {"straggler.wall.ratio_min": 3.0, "loss.level.ratio_jump": 500.0, "hang.steps": 9.0}}


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def api(request, tmp_path_factory):
    """An api on each database in turn, which has a job with a slow rank and a spike of the loss."""
    with ExitStack() as stack:
        url = ""
        if request.param == "postgresql":
            url = stack.enter_context(request.getfixturevalue("postgres").migrated())
        api = stack.enter_context(running_api(tmp_path_factory.mktemp("api"), database_url=url))
        job = Job(world_size=8, steps=300, seed=5)
        store(api.engine, job.inject(Slow(3, 120, 1.3, until_step=180), LossSpike(220, 5.0, 3)))
        yield api


@pytest.fixture(scope="module")
def exported(api, tmp_path_factory):
    answer = api.get("/api/v1/jobs/gpt/telemetry")
    assert answer.headers["content-type"] == "application/vnd.apache.parquet", answer.text
    path = tmp_path_factory.mktemp("export") / "gpt.parquet"
    path.write_bytes(answer.content)
    return path


def replayed(path, *arguments):
    """The incidents of kinds that have a preview, as `rankwatch replay` prints them."""
    result = CliRunner().invoke(app, ["replay", str(path), "--job", "gpt", "--json", *arguments])
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.output.splitlines()]
    return [one for one in lines if one.get("kind") in PREVIEWABLE]


def test_the_export_has_each_stored_value_as_it_is_stored(api, exported):
    table = pyarrow.parquet.read_table(exported)
    assert table.num_rows == 8 * 300
    assert table.column("step").to_pylist() == [step for step in range(300) for _ in range(8)]
    assert table.column("rank").to_pylist() == list(range(8)) * 300
    assert set(table.column("host").to_pylist()) == {"host-0"}
    first = stored_chunk(api.engine, "gpt", table.column("attempt")[0].as_py(), 0)
    assert table.column("busy_s").to_pylist()[: 64 * 8] == first["busy_s"].ravel().tolist()
    assert table.column("loss").to_pylist()[: 64 * 8] == first["loss"].ravel().tolist()


def test_a_replay_of_the_export_finds_what_was_injected(exported):
    found = {(one["kind"], tuple(one["ranks"])) for one in replayed(exported)}
    assert {("straggler", (3,)), ("loss_spike", ())} <= found


def test_a_preview_of_changed_settings_equals_a_second_run_with_them_over_the_same_export(api, exported, tmp_path):
    answer = api.post(PATH, {"job": "gpt", "tunings": [DEAF]})
    assert answer.status_code == 200, answer.text
    preview = answer.json()
    (tmp_path / "tuning.json").write_text(json.dumps({"tunings": [DEAF]}))
    with_defaults, with_these = replayed(exported), replayed(exported, "--tuning", str(tmp_path / "tuning.json"))
    assert [one for one in with_defaults if one not in with_these] == preview["does_not_open"]
    assert [one for one in with_these if one not in with_defaults] == preview["opens"]
    assert preview["both"] == len(with_defaults) - len(preview["does_not_open"])
    assert "straggler" in {one["kind"] for one in preview["does_not_open"]}
    assert (preview["rows"], preview["first_step"], preview["last_step"], preview["version"]) == (2400, 0, 299, 0)
    compared = replayed(exported, "--compare", str(tmp_path / "tuning.json"))
    assert [{key: one[key] for key in one if key != "found"} for one in compared] == preview["does_not_open"]


def test_what_cannot_be_previewed_is_said(api):
    preview = api.post(PATH, {"job": "gpt", "tunings": [DEAF]}).json()
    assert preview["settings_not_previewed"] == ["hang.steps"]
    assert {"hang", "rank_lost", "telemetry_lost"} <= set(preview["not_previewed"])
    assert not {"straggler", "loss_spike"} & set(preview["not_previewed"])
    settings = {one["name"]: one["previewable"] for one in api.get("/api/v1/tuning/settings").json()["items"]}
    assert (settings["hang.steps"], settings["straggler.wall.ratio_min"]) == (False, True)


def test_a_preview_changes_nothing(api):
    api.post(PATH, {"job": "gpt", "tunings": [DEAF]})
    assert api.get("/api/v1/tuning").json()["version"] == 0
    assert api.get("/api/v1/tuning/versions").json()["items"] == []


def test_some_steps_are_exported(api):
    content = api.get("/api/v1/jobs/gpt/telemetry?from_step=100&to_step=130").content
    assert set(pyarrow.parquet.read_table(io.BytesIO(content)).column("step").to_pylist()) == set(range(100, 131))


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"job": "none", "tunings": []}, 404, "there is no job 'none'"),
        ({"job": "gpt", "tunings": [], "from_step": 5000}, 422, "no steps of job 'gpt' are stored in this range"),
        ({"job": "gpt", "tunings": [{"settings": {"hang.step": 1}}]}, 422, "there is no setting 'hang.step'"),
    ],
)
def test_what_cannot_be_done_is_said(api, body, status, said):
    answer = api.post(PATH, body)
    assert (answer.status_code, said in answer.text) == (status, True)


def test_too_many_values_are_refused(api, monkeypatch):
    monkeypatch.setattr(engine, "EXPORT_CELLS_MAX", 1000)
    answer = api.get("/api/v1/jobs/gpt/telemetry")
    assert (answer.status_code, "choose fewer of them" in answer.text) == (422, True)


def test_one_preview_runs_at_a_time(api):
    with engine._one_at_a_time:
        answer = api.post(PATH, {"job": "gpt", "tunings": []})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


def test_a_preview_that_takes_too_long_is_ended(api, monkeypatch):
    monkeypatch.setattr(engine, "PREVIEW_S_MAX", 0.001)
    answer = api.post(PATH, {"job": "gpt", "tunings": []})
    assert (answer.status_code, "choose fewer steps" in answer.text) == (422, True)


def test_who_may_see_one_job_may_export_it_and_no_other(api):
    token = api.token(Scope.READ, job="gpt")
    assert api.ask("GET", "/api/v1/jobs/gpt/telemetry?to_step=3", token=token).status_code == 200
    assert api.ask("GET", "/api/v1/jobs/gpt/telemetry", token=api.token(Scope.READ, job="x")).status_code in (403, 404)
    assert api.ask("POST", PATH, json={"job": "gpt", "tunings": []}, token=token).status_code == 403
