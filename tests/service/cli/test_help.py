"""The command line from a fresh interpreter."""

import os
import re
import subprocess
import sys
from importlib.metadata import version

import pytest
from rich.text import Text
from typer.main import get_command

from rankwatch_service.cli.app import app

HEAVY = ("fastapi", "uvicorn", "sqlalchemy", "numpy", "river", "torch", "httpx2", "pydantic", "kafka")


def run(*arguments):
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-m", "rankwatch_service.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        check=False,
    )


def test_help_names_every_group_of_commands():
    done = run("--help")
    assert done.returncode == 0
    for word in ("up", "demo", "agent", "jobs", "incidents", "rollback", "silences", "receivers", "token", "doctor"):
        assert word in done.stdout


def test_building_the_command_line_imports_nothing_heavy():
    code = "import sys; import rankwatch_service.cli.app; print([n for n in sys.argv[1:] if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code, *HEAVY], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["up", "api", "demo", "pause", "doctor", "token", "db", "incidents"])
def test_every_command_has_help(command):
    done = run(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage" in done.stdout


def test_the_agent_has_help():
    done = run("agent", "--help")
    assert done.returncode == 0
    assert "--dir" in done.stdout


def test_the_version_is_that_of_the_package():
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"rankwatch {version('rankwatch')}\n")


def test_a_service_that_does_not_answer_is_said_with_what_to_do_next():
    done = run("jobs", "--url", "http://127.0.0.1:1", "--token", "x")
    assert done.returncode == 3
    assert "Connection refused; start a service with `rankwatch up`, or name another (--url" in done.stderr


def test_no_help_loses_a_word_in_brackets():
    """Brackets mark a style, unless they are escaped."""

    def helps(command, path):
        yield path, command.help or ""
        yield from ((f"{path} {one.name}", getattr(one, "help", None) or "") for one in command.params)
        for name, inner in getattr(command, "commands", {}).items():
            yield from helps(inner, f"{path} {name}")

    def is_whole(text):
        written = re.sub(r"\\(?=\[)|\[/?(bold|dim)\]", "", text)
        return Text.from_markup(text).plain == written

    assert [path for path, text in helps(get_command(app), "rankwatch") if not is_whole(text)] == []
