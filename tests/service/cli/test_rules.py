"""Rules on metrics on the command line: applied, listed, previewed and deleted."""

import json

import pytest

from rankwatch_service.store.models import Job
from tests.support.store.database import add, job_row

RULES = """
[[rule]]
name = "reward-low"
metric = "reward"
when = "below"
value = 1
severity = "critical"
jobs = ["rl-*"]

[[rule]]
name = "kl-gone"
metric = "kl"
when = "absent"
hold_s = 50
"""


@pytest.fixture(scope="module")
def job(api):
    add(api.engine, Job, job_row("rl-1"))
    return "rl-1"


@pytest.fixture
def rules(tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text(RULES)
    return path


@pytest.fixture
def recorded(tmp_path):
    """A log of 200 steps, one a second: the reward falls in step 100, and of KL there is none after step 20."""
    path = tmp_path / "log.csv"
    rows = [f"{step},{step},{0.5 if 100 <= step < 120 else 2.0},{0.1 if step <= 20 else ''}" for step in range(200)]
    path.write_text("\n".join(["step,time_s,reward,kl", *rows]) + "\n")
    return path


def test_a_replay_judges_by_rules_beside_its_detectors(terminal, rules, recorded):
    lines = terminal.run("replay", str(recorded), "--rules", str(rules), "--json")[1].splitlines()
    found = [json.loads(line) for line in lines[:-1]]
    assert [(one["kind"], one["severity"], one["scope"]) for one in found if one["kind"] == "metric"] == [
        ("metric", "warning", "rule:kl-gone"),
        ("metric", "critical", "rule:reward-low"),
    ]


def test_a_file_is_applied_listed_applied_again_and_a_rule_deleted(rankwatch, rules):
    assert rankwatch("rules", "apply", str(rules))[2] == "2 added, 0 changed, 0 deleted, 0 unchanged\n"
    listed = rankwatch("rules")[1]
    assert "reward-low" in listed
    assert "below 1" in listed
    assert "50 s" in listed
    rules.write_text(RULES.partition('[[rule]]\nname = "kl')[0].replace("value = 1", "value = 2"))
    assert rankwatch("rules", "apply", str(rules))[2] == "0 added, 1 changed, 1 deleted, 0 unchanged\n"
    assert rankwatch("rules", "apply", str(rules))[2] == "0 added, 0 changed, 0 deleted, 1 unchanged\n"
    assert rankwatch("rules", "delete", "reward-low")[2] == "reward-low deleted\n"
    assert rankwatch("rules", "--json")[1] == ""


def test_rules_are_previewed_on_a_job(rankwatch, rules, job):
    status, out, _ = rankwatch("rules", "preview", str(rules), job)
    assert (status, out) == (0, "reward-low: 0 incidents in 0 steps\nkl-gone: 0 incidents in 0 steps\n")


@pytest.mark.parametrize("command", [("apply",), ("preview", "rl-1")])
def test_a_wrong_file_is_refused_with_its_rule(terminal, tmp_path, command):
    path = tmp_path / "wrong.toml"
    path.write_text('[[rule]]\nname = "r"\nmetric = "m"\nwhen = "above"\n')
    status, _, err = terminal.run("rules", command[0], str(path), *command[1:])
    assert status == 2
    assert "rule 1 (r): when = above needs a value, the threshold" in " ".join(err.split())
