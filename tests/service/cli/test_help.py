"""The command line from a fresh interpreter, and what a shell offers after a Tab."""

import os
import re
import socket
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from rich.text import Text
from typer.main import get_command
from typer.testing import CliRunner

from rankwatch.client.connection import TIMEOUT_S
from rankwatch_service.cli.app import app
from rankwatch_service.store.models import Checkpoint, Incident, Job
from tests.support.store.database import add, checkpoint_row, job_row
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
    for command in ((), ("up",), ("pause",), ("token", "create"), ("incidents",)):
        reported = CliRunner().invoke(app, [*command, "--help"])
        assert (reported.exit_code, reported.stderr, "Usage" in reported.stdout) == (0, "", True), command


WITHOUT_JSON = {"up", "demo", "simulate", "api", "stream", "notify", "run", "follow", "agent"}
"""Those that go on until they are stopped, or until a job has ended."""


def answering():
    """Commands that answer or change something, by what is typed."""
    for path, command in commands(get_command(app)):
        if path and (getattr(command, "invoke_without_command", False) or not getattr(command, "commands", None)):
            yield " ".join(path), command


def test_every_command_that_answers_or_changes_something_has_json():
    without = {name for name, command in answering() if "--json" not in {o for p in command.params for o in p.opts}}
    assert without == WITHOUT_JSON


@pytest.mark.parametrize("line", ["run --help", "follow x --help", "agent --help", "jobs -h"])
def test_the_help_of_all_commands_has_one_style(line):
    done = run(*line.split())
    assert (done.returncode, "╭─ Options" in done.stdout, "Usage: " in done.stdout) == (0, True, True)


def test_the_help_of_a_training_command_is_its_own():
    done = run("run", "--", sys.executable, "--help")
    assert (done.returncode, done.stdout.startswith("usage: "), "-m mod" in done.stdout) == (0, True, True)


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
    add(api.engine, Checkpoint, checkpoint_row("gpt-small", 450))
    pager = {"name": "pager", "url": "https://hooks.example/hook"}
    assert api.post("/api/v1/receivers", pager).status_code == 201


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


@pytest.mark.parametrize(
    ("typed", "word"),
    [
        ("rollback gpt-small --checkpoint ", "step 450, good"),
        ("receivers test ", "pager"),
        ("incidents --kind stra", "straggler"),
        ("incidents --job gpt-l", "gpt-large"),
        ("incidents feedback inc_77aa no", "noise"),
        ("rollb", "rollback"),
    ],
)
def test_the_words_of_a_command_are_offered(api, typed, word):
    assert word in offered(api.url, api.admin, f"rankwatch {typed}")


def test_a_shell_gets_a_script_that_asks_for_words():
    script = Path(sys.executable).with_name("rankwatch")
    done = subprocess.run([script, "--show-completion", "bash"], capture_output=True, text=True, timeout=60, check=True)
    assert "_RANKWATCH_COMPLETE=complete_bash" in done.stdout


def test_tab_waits_no_longer_for_a_service_that_does_not_answer(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert offered(url, "x", "rankwatch pause ", XDG_CONFIG_HOME=str(tmp_path)).strip() in ("", "_files")
        assert time.monotonic() - began < TIMEOUT_S


def test_a_service_that_is_away_offers_nothing(tmp_path):
    assert "gpt" not in offered("http://127.0.0.1:1", "x", "rankwatch pause ", XDG_CONFIG_HOME=str(tmp_path))
