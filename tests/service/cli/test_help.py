"""The command line from a fresh interpreter, and what a shell offers after a Tab."""

import os
import re
import subprocess
import sys
from importlib.metadata import version

import pytest
from rich.text import Text
from typer.main import get_command
from typer.testing import CliRunner

from rankwatch_service.cli.app import app
from rankwatch_service.store.models import Incident, Job
from tests.support.store.database import add, job_row
from tests.support.values.incidents import incident_row

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


def test_building_the_command_line_imports_nothing_heavy():
    code = "import sys; import rankwatch_service.cli.app; print([n for n in sys.argv[1:] if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code, *HEAVY], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def commands(command, *path):
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, *path, name)


def test_commands_have_help():
    done = run("agent", "--help")  # it becomes another process
    assert (done.returncode, "--dir" in done.stdout) == (0, True)
    for command in ((), ("up",), ("pause",), ("token", "create"), ("incidents",)):
        reported = CliRunner().invoke(app, [*command, "--help"])
        assert (reported.exit_code, reported.stderr, "Usage" in reported.stdout) == (0, "", True), command


def test_the_version_is_that_of_the_package():
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"rankwatch {version('rankwatch')}\n")


def test_a_service_that_does_not_answer_is_said_with_what_to_do_next():
    done = run("jobs", "--url", "http://127.0.0.1:1", "--token", "x")
    assert done.returncode == 3
    assert "Connection refused; start a service with `rankwatch up`, or name another (--url" in done.stderr


def test_no_help_loses_a_word_in_brackets():
    """Brackets mark a style, unless they are escaped."""

    def is_whole(text):
        return Text.from_markup(text).plain == re.sub(r"\\(?=\[)|\[/?(bold|dim)\]", "", text)

    for path, command in commands(get_command(app)):
        for part in (command, *command.params):
            assert is_whole(getattr(part, "help", None) or ""), (path, part.name)


@pytest.fixture(scope="module", autouse=True)
def filled(api):
    add(api.engine, Job, *[job_row(name) for name in ("gpt-small", "gpt-large", "vit")])
    add(api.engine, Incident, incident_row(id="inc_77aa", summary="rank 3 hangs"))


def offered(url: str, token: str, typed: str, **more: str) -> str:
    """What bash is told for a line that is not complete."""
    environment = os.environ | {
        "RANKWATCH_URL": url,
        "RANKWATCH_TOKEN": token,
        "_RANKWATCH_COMPLETE": "complete_zsh",
        "_TYPER_COMPLETE_ARGS": typed,
    }
    script = "import sys; sys.argv[0] = 'rankwatch'; from rankwatch_service.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", script], env=environment | more, capture_output=True, text=True, timeout=60, check=False
    ).stdout


@pytest.mark.parametrize("command", ["pause", "jobs show", "checkpoints"])
def test_jobs_are_offered_by_their_names(api, command):
    found = offered(api.url, api.admin, f"rankwatch {command} gpt")
    assert ("gpt-small" in found, "gpt-large" in found, "vit" in found) == (True, True, False)


def test_incidents_are_offered_with_their_summaries(api):
    assert "rank 3 hangs" in offered(api.url, api.admin, "rankwatch incidents show ")


def test_a_service_that_is_away_offers_nothing(tmp_path):
    assert "gpt" not in offered("http://127.0.0.1:1", "x", "rankwatch pause ", XDG_CONFIG_HOME=str(tmp_path))
