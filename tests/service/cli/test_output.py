"""What is printed to the terminal, and what a command is said to cost before it is requested."""

import io
import json

import pytest

from rankwatch_service.cli import output
from rankwatch_service.cli.configuration import seconds
from rankwatch_service.cli.errors import CliError
from rankwatch_service.cli.views import confirm, cost, evidence_rows


@pytest.mark.parametrize("bad", ["\x1b[2J", "a\rb", "a\x07", "\u202eabc", "\x9b31m"])
def test_control_codes_in_names_do_not_reach_the_terminal(bad, capsys):
    output.print_table(["job"], [[output.plain(f"job {bad}")]], "none")
    printed = capsys.readouterr().out
    assert "job" in printed
    assert all(sign.isprintable() or sign == "\n" for sign in printed)


def test_names_are_never_read_as_markup(capsys):
    output.print_table(["job"], [[output.plain("[red]x[/red] [link=http://e]y[/link]")]], "none")
    assert "[red]x[/red] [link=http://e]y[/link]" in capsys.readouterr().out


def test_stacks_keep_their_lines_and_lose_their_control_codes():
    assert output.block('File "a"\n\x1b[31m  b\n').plain == 'File "a"\n�[31m  b\n'


def test_json_goes_to_stdout_one_object_a_line(capsys):
    output.print_json([{"a": 1}, {"b": "ü\n"}])
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [{"a": 1}, {"b": "ü\n"}]


def test_an_empty_table_says_on_stderr_what_that_means(capsys):
    output.print_table(["job"], [], "no job yet")
    captured = capsys.readouterr()
    assert (captured.out, captured.err.strip()) == ("", "no job yet")


def test_an_id_is_never_broken_over_two_lines(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    row = [output.identifier("0123456789abcdef" * 2), output.plain("a word " * 20), output.plain("warning " * 5)]
    output.print_table(["id", "summary", "state"], [row], "none")
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) > 2
    assert all(len(line) <= 80 for line in printed)
    assert "0123456789abcdef" * 2 in printed[1]


def test_a_pipe_gets_one_line_for_each_row(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    output.print_table(["id", "summary"], [[output.identifier("a" * 32), output.plain("word " * 60)]], "none")
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize(("columns", "name"), [(80, "nnn…"), (100, "n" * 70), (160, "n" * 70)])
def test_a_table_fits_the_terminal_and_cuts_what_is_no_id_and_no_sentence(capsys, monkeypatch, columns, name):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    rows = [[output.identifier("0123456789"), "n" * 70, output.plain(None), output.plain("one of many words " * 9)]]
    output.print_table(["id", "name", "owner", "summary"], rows, "none")
    heading, *lines = (line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert "owner" not in heading  # nothing is in it
    assert (lines[0].split()[0], name in lines[0]) == ("0123456789", True)
    assert ("one of many" in lines[0]) == (columns == 160)  # else it stands below
    assert all(len(line) <= columns for line in lines)
    assert " ".join(" ".join(lines).split()).count("one of many words") == 9


def test_what_takes_long_shows_a_bar_at_a_terminal_alone(capsys, monkeypatch):
    monkeypatch.setattr(output, "PROGRESS_AFTER_S", 0.0)
    for at_terminal in (True, False):
        monkeypatch.setattr("sys.stderr.isatty", lambda at_terminal=at_terminal: at_terminal)
        with output.progress("writing x") as show:
            show(3_000_000, "3.0 MB")
        captured = capsys.readouterr()
        assert (captured.out, "writing x" in captured.err) == ("", at_terminal)


def test_what_is_short_shows_no_bar(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with output.progress("writing x"):
        pass
    assert capsys.readouterr().err == ""


def test_a_pipe_gets_no_blanks_behind_the_last_word(capsys):
    output.print_table(["id", "summary"], [["a", "word"], ["b", "a longer text"]], "none")
    assert [line for line in capsys.readouterr().out.splitlines() if line != line.rstrip()] == []


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "–"), ("", "–"), ([], "–"), (0, "0"), (0.123456, "0.1235"), ([1, 2], "1 2")]
)
def test_values_are_shown_plainly(value, shown):
    assert output.plain(value).plain == shown


@pytest.mark.parametrize(("text", "expected"), [("90s", 90), ("30m", 1_800), ("2h", 7_200), ("1d", 86_400)])
def test_durations_are_read(text, expected):
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "h", "2", "2 h", "-1h", "1.5h", "2w"])
def test_a_malformed_duration_is_refused(text):
    with pytest.raises(CliError, match="not a duration"):
        seconds(text)


@pytest.mark.parametrize(
    ("state", "evidence", "shown"),
    [("open", {}, "open"), ("resolved", {}, "resolved"), ("resolved", {"ended_with_job": True}, "job ended")],
)
def test_the_state_of_an_incident_says_whether_the_job_ended_before_it_was_over(state, evidence, shown):
    assert output.incident_state({"state": state, "evidence": evidence}).plain == shown


@pytest.mark.parametrize(
    ("evidence", "reported"),
    [
        ({"os_state": "?", "phase": "", "signal": None, "hosts": [], "pids": {}}, []),
        ({"how": "zombie"}, [("exit status is from", "the process table")]),
        ({"os_state": "D"}, [("process state", "waiting in the kernel")]),
        ({"busy_s": 1.9, "peers_busy_s": 1.0}, [("busy", "1.9 s; peers: 1 s, 1.9 times that")]),
        ({"value": 4.0, "threshold": 0.0}, [("value", "4; threshold: 0")]),
        ({"phase_excess_s": {"data_wait": 0.5}}, [("over the peers by phase", "data wait 0.5 s")]),
        ({"standing": True, "sm_clock_hz": 10**9}, [("standing", "yes"), ("sm clock", "1,000,000,000 Hz")]),
        ({"alerts": [{"summary": "full", "labels": ""}]}, [("alerts", "summary full")]),
        ({"value": float("nan"), "usual": 2.0}, [("value", "nan"), ("usual", "2")]),
    ],
)
def test_evidence_is_reported_with_units_beside_what_is_usual_and_without_what_is_missing(evidence, reported):
    assert [(name.strip(), text.plain) for name, text in evidence_rows(evidence)] == reported


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
