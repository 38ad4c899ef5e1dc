"""What a command costs is said before it is requested, to people at a terminal."""

import io

import pytest

from rankwatch_service.cli.errors import CliError
from rankwatch_service.cli.views import confirm, cost

JOB = {"name": "gpt", "world_size": 1_024, "step": 5_230, "step_time_s": 1.5, "accelerated": True}
CHECKPOINTS = [
    {"id": "c3", "step": 5_200, "verdict": "suspect", "saved_unix_ns": 0},
    {"id": "c2", "step": 5_000, "verdict": "good", "saved_unix_ns": 0},
    {"id": "c1", "step": 4_000, "verdict": "good", "saved_unix_ns": 0},
]


class Service:
    """Answers as the client of a service does."""

    def get(self, path):
        assert path == "/api/v1/jobs/gpt"
        return JOB

    def items(self, path, limit):
        assert path == "/api/v1/jobs/gpt/checkpoints"
        return iter(CHECKPOINTS)


class Person(io.StringIO):
    """Types an answer at a terminal."""

    def isatty(self):
        return True


def body(action, **params):
    return {"action": action, "params": params, "reason": ""}


def test_a_rollback_says_from_where_to_where_and_what_is_done_again():
    assert cost(JOB, CHECKPOINTS, body("rollback")) == (
        "rollback gpt: 1,024 ranks go from step 5,230 back to step 5,000, saved 1970-01-01 00:00:00Z: "
        "230 steps are done again, about 98.1 GPU-hours."
    )
    assert "back to step 4,000" in cost(JOB, CHECKPOINTS, body("rollback", checkpoint="c1"))


@pytest.mark.parametrize("params", [{}, {"from_scratch": True}])
def test_a_relaunch_without_a_checkpoint_says_so(params):
    checkpoints = CHECKPOINTS if params else CHECKPOINTS[:1]
    assert "no checkpoint is known to go back to" in cost(JOB, checkpoints, body("relaunch", **params))


def test_a_stop_says_how_many_ranks_end_where():
    said = cost(JOB, [], body("stop"))
    assert said == "stop gpt: 1,024 ranks end their training at step 5,230 or just after it."
    assert "at step none" in cost(JOB | {"step": None}, [], body("stop"))


@pytest.mark.parametrize(("answer", "goes_on"), [("y\n", True), ("n\n", False), ("\n", False)])
def test_a_person_is_asked(monkeypatch, capsys, answer, goes_on):
    monkeypatch.setattr("sys.stdin", Person(answer))
    if goes_on:
        confirm(Service(), "gpt", body("rollback"), asked=True)
    else:
        with pytest.raises(CliError, match="nothing was requested"):
            confirm(Service(), "gpt", body("rollback"), asked=True)
    assert "230 steps are done again" in capsys.readouterr().err


@pytest.mark.parametrize(("stdin", "asked"), [(io.StringIO(""), True), (Person(""), False)], ids=["script", "--yes"])
def test_a_script_and_who_says_yes_are_not_asked(monkeypatch, capsys, stdin, asked):
    monkeypatch.setattr("sys.stdin", stdin)
    confirm(Service(), "gpt", body("rollback"), asked=asked)
    assert capsys.readouterr() == ("", "")
