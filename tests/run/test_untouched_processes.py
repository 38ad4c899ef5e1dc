"""What `rankwatch run` adds to the processes of a command, and what it leaves as it is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rankwatch import layout
from rankwatch.agent.processes import take_lock
from rankwatch.reader import RingReader, StepEntry
from rankwatch.run.command import NoTokenError, job_access
from rankwatch_service.access.grants import Scope
from tests.support.service.api import served_api

pytestmark = [pytest.mark.integration, pytest.mark.slow]

RUN = [sys.executable, "-m", "rankwatch_service.cli", "run"]
RUN_S = 120
TRAINS = """
    import torch
    def train(steps):
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
"""


class Offsets:
    """A folder with what a command needs, and the recorders that it leaves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("RANKWATCH_", "PYTHON"))}
        self.environment = clean | {
            "RANKWATCH_DIR": str(folder / "rings"),
            "XDG_CONFIG_HOME": str(folder / "config"),
            "HOME": str(folder),
        }
        rings = folder / "rings"
        rings.mkdir(mode=0o700)
        # As long as somebody holds its lock no agent starts, which would remove what it has read.
        self._locks = [take_lock(Path(layout.agent_lock_path(str(rings), job))) for job in ("train", "other")]

    def script(self, text: str, name: str = "train.py") -> str:
        path = self.folder / name
        path.write_text(textwrap.dedent(TRAINS) + textwrap.dedent(text))
        return str(path)

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*RUN, *command],
            env=self.environment | environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )

    @property
    def recorders(self) -> list[RingReader]:
        return [RingReader(str(path)) for path in sorted((self.folder / "rings").glob(f"*{layout.RING_SUFFIX}"))]

    @property
    def steps(self) -> list[list[int]]:
        """The steps that each process recorded."""
        return [[e.step for e in reader.poll().entries if isinstance(e, StepEntry)] for reader in self.recorders]


@pytest.fixture
def place(tmp_path) -> Offsets:
    return Offsets(tmp_path)


def test_a_script_is_watched_without_a_line_in_it(place):
    done = place.run("--", sys.executable, place.script("train(5)"))
    assert done.returncode == 0, done.stderr
    assert place.steps == [[1, 2, 3, 4]]
    (recorder,) = place.recorders
    assert (recorder.header.identity["job"], recorder.header.identity["world_size"]) == ("train", 1)
    assert recorder.progress().state == "left"
    assert "rankwatch: job 'train': a step is one step of SGD" in done.stderr


def test_the_commands_of_training_hosts_need_no_package_of_the_service(place):
    code = "import sys; sys.modules.update(dict.fromkeys(('typer', 'rich', 'sqlalchemy', 'fastapi', 'msgspec')))\n"
    code += "from rankwatch_service.cli import main; main()"

    def rankwatch(*words: str) -> tuple[int, str, str]:
        command = [sys.executable, "-c", code, *words]
        done = subprocess.run(
            command, env=place.environment, capture_output=True, text=True, timeout=RUN_S, check=False
        )
        return done.returncode, done.stdout, done.stderr

    assert rankwatch("run", "--", "echo", "it runs")[:2] == (0, "it runs\n")
    assert rankwatch("jobs") == (2, "", "rankwatch: this needs typer: pip install 'rankwatch[service]'\n")


@pytest.mark.ci
def test_what_does_not_train_imports_nothing_of_ours(place):
    shown = "import sys, torch; print(sorted(name for name in sys.modules if name.partition('.')[0] == 'rankwatch'))"
    done = place.run("--", sys.executable, "-c", shown)
    assert done.stdout == "[]\n", done.stderr
    shown = "import sys; print([name for name in ('torch', 'importlib.util', 'rankwatch') if name in sys.modules])"
    bare = subprocess.run([sys.executable, "-I", "-c", shown], capture_output=True, text=True, check=True).stdout
    assert place.run("--", sys.executable, "-c", shown).stdout.replace("'importlib.util'", "").count(
        "'"
    ) == bare.replace("'importlib.util'", "").count("'")


def test_the_environments_own_sitecustomize_runs_too(place):
    own = place.folder / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import builtins\nbuiltins.own = __file__\n")
    code = "import sys, builtins; print(builtins.own, sys.modules['sitecustomize'].__file__)"
    done = place.run("--", sys.executable, "-c", code, PYTHONPATH=str(own))
    expected = str(own / "sitecustomize.py")
    assert done.stdout == f"{expected} {expected}\n", done.stderr


def test_an_error_in_the_environments_own_sitecustomize_is_told_as_before(place):
    (place.folder / "sitecustomize.py").write_text("raise ZeroDivisionError('of the environment')\n")
    done = place.run("--", sys.executable, "-c", "print(1)", PYTHONPATH=str(place.folder))
    assert done.stdout == "1\n"
    assert "of the environment" in done.stderr


@pytest.mark.ci
def test_processes_that_a_rank_starts_are_no_ranks(place):
    place.script("train(5)", "other.py")
    text = """
        import subprocess, sys, os
        from torch.utils.data import DataLoader
        train(3)
        subprocess.run([sys.executable, "other.py"], check=True)
        if os.fork() == 0:
            train(5)
            os._exit(0)
        os.wait()
        list(DataLoader(range(8), num_workers=2))
        train(3)
    """
    done = place.run("--", sys.executable, place.script(text))
    assert done.returncode == 0, done.stderr
    assert len(place.steps) == 1


@pytest.mark.ci
def test_of_processes_without_a_number_one_is_watched_at_a_time(place):
    text = """
        import subprocess, sys, time
        if sys.argv[1:]:
            train(3)
        else:
            others = [subprocess.Popen([sys.executable, __file__, "again"]) for _ in range(1)]
            [other.wait() for other in others]
            train(2)
    """
    done = place.run("--", sys.executable, place.script(text))
    assert done.returncode == 0, done.stderr
    assert sorted(place.steps) == [[1], [1, 2]]  # one after the other


@pytest.mark.ci
def test_a_script_with_a_watch_of_its_own_keeps_it(place):
    text = """
        import rankwatch
        watch = rankwatch.start("own", agent=False)
        for step in watch.steps(3):
            train(1)
    """
    done = place.run("--job", "other", "--", sys.executable, place.script(text))
    assert done.returncode == 0, done.stderr
    assert place.steps == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("text", "state", "noted"),
    [
        ("train(3); 1 / 0", "running", "exception"),
        pytest.param("train(3)", "left", "rank_left", marks=pytest.mark.ci),
        pytest.param("train(3); sys.exit(3)", "left", "rank_left", marks=pytest.mark.ci),
        pytest.param("train(3); os.kill(os.getpid(), 9)", "running", None, marks=pytest.mark.ci),
    ],
)
def test_how_a_process_ends_at_rest(place, text, state, noted):
    done = place.run("--", sys.executable, place.script(f"import os, sys; {text}"))
    (recorder,) = place.recorders
    notes = [
        entry.kind for entry in recorder.poll().entries if getattr(entry, "kind", None) in ("rank_left", "exception")
    ]
    assert (recorder.progress().state, notes) == (state, [noted] if noted else []), done.stderr


def test_the_command_has_the_exit_status_and_the_signals(place):
    assert place.run("sh", "-c", "exit 7").returncode == 7
    assert place.run("--", "no-such-command").returncode == 127
    assert place.run().returncode == 2
    process = subprocess.Popen([*RUN, "--", "sleep", "60"], env=place.environment)
    started = Path(f"/proc/{process.pid}/comm")
    while started.read_text() != "sleep\n":
        pass
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == -signal.SIGTERM


def test_an_environment_without_rankwatch_says_so_and_trains(place):
    hidden = "import sys; sys.modules['rankwatch'] = None\n"
    done = place.run("--", sys.executable, place.script(f"{hidden}train(4); print('trained')"))
    assert done.stdout == "trained\n"
    assert "rankwatch: this process is not watched" in done.stderr
    assert sys.executable in done.stderr


@pytest.fixture
def logged_in(tmp_path):
    """An api, and the environment of a person who has logged in to it with a token of these scopes."""

    def login(url: str, token: str) -> dict[str, str]:
        config = tmp_path / "config" / "rankwatch"
        config.mkdir(parents=True)
        (config / "client.json").write_text(json.dumps({"url": url, "token": token}))
        return {"XDG_CONFIG_HOME": str(tmp_path / "config")}

    return login


def test_a_login_makes_the_token_of_the_job(tmp_path, logged_in):
    with served_api(tmp_path) as (api, url):
        environment = logged_in(url, api.admin)
        added = job_access("gpt", environment)
        assert added["RANKWATCH_URL"] == url
        listed = api.get("/api/v1/tokens").json()["items"][0]
        assert (listed["job"], listed["scopes"], listed["name"]) == ("gpt", ["ingest"], "agents of gpt")
        assert job_access("gpt", environment | {"RANKWATCH_TOKEN": "mine"}) == {}
        assert job_access("gpt", environment | {"RANKWATCH_URL": "https://elsewhere:8770"}) == {}


def test_without_a_login_nothing_is_added(tmp_path):
    assert job_access("gpt", {"XDG_CONFIG_HOME": str(tmp_path)}) == {}


def test_a_login_that_makes_no_tokens_says_what_to_do(tmp_path, logged_in):
    with served_api(tmp_path) as (api, url):
        environment = logged_in(url, api.token(Scope.READ))
        with pytest.raises(NoTokenError, match="set RANKWATCH_TOKEN to what `rankwatch token job gpt` prints"):
            job_access("gpt", environment)
    with pytest.raises(NoTokenError, match="did not make a token"):
        job_access("gpt", environment)
