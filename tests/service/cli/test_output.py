"""What is printed to the terminal."""

import json

import pytest

from rankwatch_service.cli import output
from rankwatch_service.cli.configuration import seconds
from rankwatch_service.cli.errors import CliError
from rankwatch_service.cli.views import evidence_rows


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
    [
        ("open", {}, "open"),
        ("resolved", {}, "resolved"),
        ("resolved", {"ended_with_job": True}, "job ended"),
    ],
)
def test_the_state_of_an_incident_says_whether_the_job_ended_before_it_was_over(state, evidence, shown):
    assert output.incident_state({"state": state, "evidence": evidence}).plain == shown


@pytest.mark.parametrize(
    ("evidence", "told"),
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
def test_evidence_is_told_with_units_beside_what_is_usual_and_without_what_is_missing(evidence, told):
    assert [(name.strip(), text.plain) for name, text in evidence_rows(evidence)] == told
