"""Names and messages of others reach a terminal as text: no escape sequence, no invisible sign."""

import ast
import json
from pathlib import Path

import pytest
import rich.text
from typer.testing import CliRunner

from rankwatch.notices import say
from rankwatch.terminal import json_line, printable
from rankwatch_service import text_log
from rankwatch_service.cli import output
from rankwatch_service.cli.app import app

ROOT = Path(__file__).parents[2]
HOSTILE = "all\x1b]0;owned\x07_re\x1b[31mduce\x9b2J\u202e"
CLEAN = "all�]0;owned�_re�[31mduce�2J�"
WRITES = frozenset(
    {
        "collectors/rankwatch/notices.py",
        "collectors/rankwatch/agent/device_reader.py",
        "collectors/rankwatch/run/site/sitecustomize.py",
        "service/rankwatch_service/api/__main__.py",
        "service/rankwatch_service/cli/__init__.py",
        "service/rankwatch_service/cli/app.py",
        "service/rankwatch_service/cli/commands/access.py",
        "service/rankwatch_service/cli/commands/flight_recorder.py",
        "service/rankwatch_service/cli/commands/incidents.py",
        "service/rankwatch_service/cli/commands/notifications.py",
        "service/rankwatch_service/cli/commands/policy.py",
        "service/rankwatch_service/cli/commands/replay.py",
        "service/rankwatch_service/cli/commands/simulate.py",
        "service/rankwatch_service/cli/views.py",
        "service/rankwatch_service/text_log.py",
        "service/rankwatch_service/up.py",
    }
)
"""Files that write to a terminal: what comes from others passes `printable` or `json_line` there."""


def test_what_a_terminal_obeys_is_replaced_and_lines_stay():
    assert printable(HOSTILE) == CLEAN
    assert printable("two\n\tlines, ünd mehr 中文") == "two\n\tlines, ünd mehr 中文"


def test_json_stays_what_it_was_and_holds_no_sign_that_a_terminal_obeys():
    line = json_line({"name": HOSTILE})
    assert json.loads(line) == {"name": HOSTILE}
    assert line[:-1].isprintable()


def test_lines_for_people_are_text(capsys):
    say(HOSTILE)
    text_log.say(HOSTILE)
    output.note(HOSTILE)
    told = capsys.readouterr().err
    assert told.count(CLEAN) == 3
    assert "\x1b" not in told


def test_tables_and_fields_are_text_and_not_markup(capsys):
    output.print_table(["name"], [[HOSTILE], [rich.text.Text("plain")]], "none")
    output.print_fields([("name", f"[bold]{HOSTILE}")])
    told = capsys.readouterr().out
    assert not {"\x1b", "\x9b"} & set(told)
    assert f"[bold]{CLEAN}" in told


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
def test_the_name_of_an_operation_in_a_dump_is_text(tmp_path, form):
    for rank in (0, 1):
        entry = {
            "collective_seq_id": 5 + rank, "process_group": ["0", "default_pg"], "profiling_name": f"nccl:{HOSTILE}",
            "state": "scheduled", "input_sizes": [[1]], "input_dtypes": ["float"], "output_sizes": [[1]],
            "output_dtypes": ["float"], "frames": [], "record_id": 1, "pg_id": 0, "op_id": 1, "p2p_seq_id": 0,
            "is_p2p": False, "time_created_ns": 1, "timeout_ms": 1000, "retired": False,
        }  # fmt: skip
        dump = {
            "version": "2.4", "rank": rank, "entries": [entry],
            "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
        }  # fmt: skip
        (tmp_path / f"rank_{rank}.json").write_text(json.dumps(dump))
    done = CliRunner().invoke(app, ["flight-recorder", *map(str, sorted(tmp_path.iterdir())), *form])
    assert "owned" in done.output
    assert not {"\x1b", "\x9b", "\x07"} & set(done.output)


def test_only_known_files_write_to_a_terminal():
    writes, found = ("print", "sys.stdout.write", "sys.stderr.write"), set()
    for path in (*ROOT.glob("collectors/**/*.py"), *ROOT.glob("service/**/*.py")):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        if any(ast.unparse(call.func) in writes for call in calls):
            found.add(str(path.relative_to(ROOT)))
    assert found <= WRITES
