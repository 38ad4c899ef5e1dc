"""The name of a job that a framework's line starts."""

import sys
from pathlib import Path

import pytest

from rankwatch.integrations.started import started


@pytest.mark.parametrize(
    ("name", "environment", "job"),
    [("/data/runs/llama-7b/", {}, "llama-7b"), ("", {}, "train_gpt"), ("", {"RANKWATCH_JOB": "told"}, "told")],
    ids=["the framework's", "the script's", "the environment's"],
)
def test_a_job_is_named_after_its_run_else_after_its_script(name, environment, job, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/home/me/train_gpt.py", "--steps", "10"])
    env = {"RANKWATCH_DIR": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), **environment}
    watch = started(name, "", env=env, agent=False)
    assert watch.identity.job == job
    watch.close()


def test_where_no_script_runs_a_job_must_be_named(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["-c"])
    with pytest.raises(ValueError, match="the job has no name: pass job= or set RANKWATCH_JOB"):
        started("", "", env={"RANKWATCH_DIR": str(tmp_path)}, agent=False)
