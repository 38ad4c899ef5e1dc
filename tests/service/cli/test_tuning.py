"""Tunings on the command line, against a real api on a real port."""

import json

import pytest

from rankwatch_service.simulate.faults import Slow
from rankwatch_service.simulate.job import Job
from tests.support.service.stored_series import store

GPT = {"jobs": "gpt-*", "profile": "quiet", "settings": {"hang.steps": 6.0}}


def test_they_are_set_shown_listed_and_reset(rankwatch, tmp_path):
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps({"tunings": [GPT]}))
    status, _, err = rankwatch("tuning", "set", str(path))
    assert (status, err) == (0, "version 1 is in force\n")
    shown = json.loads(rankwatch("tuning", "show")[1])
    assert shown == {"version": 1, "tunings": [GPT]}
    path.write_text(json.dumps(shown))
    assert rankwatch("tuning", "reset")[2] == "version 2 is in force: every setting has its default\n"
    status, _, err = rankwatch("tuning", "set", str(path))
    assert (status, "version 2 is in force, not 1" in err) == (2, True)
    listed = [json.loads(line) for line in rankwatch("tuning", "versions", "--json")[1].splitlines()]
    assert [(one["version"], one["tunings"]) for one in listed] == [(2, []), (1, [GPT])]
    assert "gpt-*" in rankwatch("tuning", "versions")[1]


def test_the_settings_are_a_table(rankwatch):
    text = rankwatch("tuning", "settings")[1]
    assert "straggler.wall.ratio_min" in text
    assert "ratio to the usual value" in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"tunings": [{"settings": {"hang.step": 1}}]}', "there is no setting 'hang.step'; hang has hang.steps"),
    ],
)
def test_a_file_that_is_none_is_said(rankwatch, tmp_path, text, said):
    (tmp_path / "bad.json").write_text(text)
    status, _, err = rankwatch("tuning", "set", str(tmp_path / "bad.json"))
    assert (status, said in err) == (2, True)


def test_a_job_is_exported_and_a_tuning_previewed(rankwatch, terminal, api, tmp_path):
    store(api.engine, Job(world_size=4, steps=160, seed=5).inject(Slow(3, 100, 1.5)))
    status, _, err = rankwatch("jobs", "export", "gpt", str(tmp_path / "gpt.parquet"))
    assert (status, err.split()[-1]) == (0, "bytes"), err
    reported = terminal.run("replay", str(tmp_path / "gpt.parquet"), "--json")[1].splitlines()
    assert "straggler" in [json.loads(line).get("kind") for line in reported]
    deaf = {"straggler.wall.ratio_min": 3.0, "hang.steps": 9.0}
    (tmp_path / "deaf.json").write_text(json.dumps({"tunings": [{"settings": deaf}]}))
    status, out, err = rankwatch("tuning", "preview", "gpt", str(tmp_path / "deaf.json"))
    assert (status, err) == (0, "hang.steps cannot be previewed\n")
    assert "does not open" in out
    assert "rank_lost, telemetry_lost" in out
    status, _, err = rankwatch("jobs", "export", "none", str(tmp_path / "none.parquet"))
    assert (status, "there is no job 'none'" in err) == (2, True)
    assert not (tmp_path / "none.parquet").exists()
