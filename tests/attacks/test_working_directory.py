"""Whoever can write into the folder in which somebody starts rankwatch has neither code run nor settings believed."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from rankwatch import children
from rankwatch.children import python_module
from rankwatch.spawn import ensure_agent
from rankwatch_service.cli.configuration import configured_settings
from rankwatch_service.cli.errors import CliError
from rankwatch_service.demo.processes import working_for
from tests.support.accelerator import DRIVER
from tests.support.agent.service import KEY, TOKEN, AgentService, until
from tests.support.ranks.recording_rank import RecordingRank
from tests.support.service.process import LOGIN, START_S

ROOT = Path(__file__).parents[2]
NOBODY = 65_534


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A folder with modules and programs that this product starts or loads; the file `ran` tells that one was."""
    place = tmp_path / "shared"
    for package in ("rankwatch", "rankwatch_service"):
        (place / package).mkdir(parents=True)
    modules = ("argparse", "csv", "json", "logging", "msgspec", "sqlite3")
    for name in (*modules, "rankwatch/__init__", "rankwatch_service/__init__"):
        (place / f"{name}.py").write_text(f"open({str(place / 'ran')!r}, 'w').close()\nraise SystemExit(0)\n")
    for name in ("py-spy", "python", "sh"):
        (place / name).write_text(f"#!/bin/sh\n: > {place}/ran\n")
        (place / name).chmod(0o755)
    return place


def variables(**more: str) -> dict[str, str]:
    """The environment of whoever starts something there: with relative entries of PATH, and a relative file."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RANKWATCH_")}
    return kept | {"PATH": f".::{kept['PATH']}:", "RANKWATCH_INGEST_CONFIG": "config/ingest.json"} | more


@pytest.mark.parametrize(
    ("module", "argument"),
    [("rankwatch.agent", "--help"), ("rankwatch.agent.host", "/"), ("rankwatch_service", "--help")],
)
def test_a_module_in_the_working_directory_is_not_run(planted: Path, module: str, argument: str) -> None:
    done = subprocess.run(python_module(module, argument), cwd=planted, capture_output=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not (planted / "ran").exists()
    subprocess.run([sys.executable, "-m", module, argument], cwd=planted, capture_output=True, check=False, timeout=60)
    assert (planted / "ran").exists(), "without -P it is"


@pytest.mark.parametrize("entry", [".", ":", "../shared"])
def test_children_search_no_relative_entry_of_pythonpath(
    planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    """Relative to a folder that a training script may have changed since, which Python itself does not follow."""
    monkeypatch.chdir(planted)
    (tmp_path / "theirs.py").write_text("print('found')")
    environment = variables(PYTHONPATH=f"{entry}:{tmp_path}")
    children.run(python_module("rankwatch.agent.host", "/"), environment, capture_output=True, check=True)
    assert children.run(python_module("theirs"), environment, capture_output=True, check=True).stdout == b"found\n"
    assert not (planted / "ran").exists()
    subprocess.run(python_module("rankwatch.agent.host", "/"), env=environment, check=False)
    assert (planted / "ran").exists(), "elsewhere than in / they do"


def test_variables_that_name_a_file_or_folder_mean_the_same_in_a_child(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"RANKWATCH_CA_FILE": "../ca.pem", "RANKWATCH_KAFKA_SSL_CAFILE": "/ca.pem", "RANKWATCH_SPOOL": ""}
    reported = children.run(
        ["/usr/bin/env"], given | {"RANKWATCH_JOB": "gpt"}, capture_output=True, text=True, check=True
    )
    wanted = given | {"RANKWATCH_CA_FILE": f"{tmp_path}/../ca.pem", "RANKWATCH_JOB": "gpt"}
    assert dict(line.split("=", 1) for line in reported.stdout.splitlines()) == wanted


@pytest.mark.parametrize("entry", [".", "", "../shared"])
def test_programs_are_not_found_by_a_relative_entry_of_path(
    planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    monkeypatch.chdir(planted)
    monkeypatch.setenv("PATH", f"{entry}:{tmp_path}")
    assert children.program("py-spy") is None
    assert shutil.which("py-spy") is not None, "as a shell does"
    with pytest.raises(AssertionError, match="py-spy is searched for"):
        children.start(["py-spy"])
    shutil.copy(planted / "py-spy", tmp_path)
    assert children.program("py-spy") == str(tmp_path / "py-spy")


@pytest.fixture
def service() -> Iterator[AgentService]:
    """What takes telemetry."""
    with AgentService() as service:
        yield service


@pytest.mark.integration
def test_an_agent_that_is_started_there_works_by_relative_paths_and_what_it_starts_is_in_the_root(
    planted: Path, service: AgentService
) -> None:
    """A daemon starts the job's agent, that its worker, and that the reader of devices."""
    recorders = planted / "recorders"
    recorders.mkdir(mode=0o700)
    (planted / "token").write_text(f"{TOKEN}.k{KEY.hex()}")
    environment = variables(RANKWATCH_URL=service.url, RANKWATCH_SPOOL="spools/mine", PYTHONPATH=str(DRIVER))
    command = python_module("rankwatch.agent", "--dir", "recorders", "--token-file", "token")
    with RecordingRank(recorders) as rank, subprocess.Popen(command, cwd=planted, env=environment) as daemon:
        try:
            rank.do("steps", 5)
            until(lambda: any(batch.devices for batch in service.batches))
            started = working_for(str(planted), "rankwatch.agent")
            assert {os.readlink(f"/proc/{pid}/cwd") for pid in started if pid != daemon.pid} == {"/"}
            service.stop()
            rank.do("steps", 5)
            until(lambda: any((planted / "spools" / "mine").rglob("*")))
            service.start()
        finally:
            daemon.terminate()
    until(lambda: not working_for(str(planted), "rankwatch.agent"))
    assert not (planted / "ran").exists()


@pytest.mark.integration
def test_a_training_script_whose_paths_are_relative_starts_an_agent_that_finds_them(
    planted: Path, service: AgentService, monkeypatch: pytest.MonkeyPatch
) -> None:
    (planted / "recorders").mkdir(mode=0o700)
    (planted / "token").write_text(f"{TOKEN}.k{KEY.hex()}")
    with RecordingRank(planted / "recorders"):
        monkeypatch.chdir(planted)
        assert ensure_agent("recorders", "gpt", variables(), url=service.url, token_file="token")
        until(lambda: service.batches)
        assert not ensure_agent("recorders", "gpt", variables()), "it runs"
    until(lambda: not working_for(str(planted), "rankwatch.agent"))
    assert not (planted / "ran").exists()


@pytest.mark.integration
def test_a_service_that_is_started_there_keeps_its_data_there_and_its_roles_are_in_the_root(planted: Path) -> None:
    command = python_module("rankwatch_service", "up", "--data", "data", "--port", "0")
    output = planted / "output"
    with output.open("wb") as file, subprocess.Popen(command, cwd=planted, env=variables(), stdout=file) as up:
        try:
            until(lambda: LOGIN.search(output.read_text()), START_S)
            url, _ = LOGIN.findall(output.read_text())[0]
            until(lambda: httpx2.get(f"{url}/readyz").is_success, START_S)
            roles = working_for(str(planted / "data"), "rankwatch_service")
            assert [os.readlink(f"/proc/{pid}/cwd") for pid in roles] == ["/"] * 4, "the api has two processes"
        finally:
            up.terminate()
    assert {path.name for path in (planted / "data").iterdir()} > {"rankwatch.db", "secret.key", "ingest-token"}
    assert (planted / "config" / "ingest.json").exists()
    assert not (planted / "ran").exists()


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [(["replay", "run.csv"], "20 rows"), (["doctor", "--json"], "{place}/tree has no proc and no sys")],
)
def test_commands_that_are_given_there_read_relative_paths_in_children(
    planted: Path, arguments: list[str], reported: str
) -> None:
    (planted / "run.csv").write_text("step,loss\n" + "".join(f"{step},2.5\n" for step in range(20)))
    (planted / "tree").mkdir()
    command = python_module("rankwatch_service", *arguments)
    done = subprocess.run(
        command, cwd=planted, env=variables(RANKWATCH_HOST_ROOT="tree"), capture_output=True, text=True, check=False
    )
    assert reported.format(place=planted) in done.stdout + done.stderr
    assert not (planted / "ran").exists()


def test_children_are_started_by_one_function_and_the_linter_refuses_all_others() -> None:
    """What of the standard library starts a process, by the names that it has."""
    starts = re.compile(
        r"(exec|spawn)[lv]|posix_spawn|fork(pty)?$|system$|[pP]open$|run$|call$|check_|getoutput|getstatus"
    )
    calls = [f"{module.__name__}.{name}" for module in (os, subprocess) for name in dir(module) if starts.match(name)]
    calls += ["pty.spawn", "asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell", "shutil.which"]
    calls += ["multiprocessing.Process", "concurrent.futures.ProcessPoolExecutor"]
    source = "".join(f"import {call.rpartition('.')[0]}; {call}(*x)\n" for call in calls)
    for folder in ("collectors/rankwatch/agent", "service/rankwatch_service/cli", "detectors/rankwatch_detectors"):
        command = [Path(sys.executable).with_name("ruff"), "check", "--output-format=json"]
        command += [f"--stdin-filename={folder}/new.py", "-"]
        reported = subprocess.run(command, input=source, cwd=ROOT, capture_output=True, text=True, check=False).stdout
        refused = {one["location"]["row"] for one in json.loads(reported) if one["code"].startswith(("S6", "TID251"))}
        assert [call for row, call in enumerate(calls, 1) if row not in refused] == [], folder
    product = [path for folder in ("collectors", "detectors", "service") for path in (ROOT / folder).rglob("*.py")]
    assert [path.name for path in product if '"-m"' in path.read_text()] == ["children.py"], "Python has -P there"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a settings file that somebody else may have written."""
    place = tmp_path / "shared"
    place.mkdir(mode=0o755)
    (place / "rankwatch.toml").write_text('public_url = "https://evil.example"\n')
    (place / "rankwatch.toml").chmod(0o600)
    monkeypatch.chdir(place)
    monkeypatch.delenv("RANKWATCH_PUBLIC_URL", raising=False)
    return place


def test_a_settings_file_of_ones_own_is_read(folder: Path) -> None:
    assert configured_settings().public_url == "https://evil.example"
    folder.chmod(0o1777)
    assert configured_settings().public_url == "https://evil.example", "as in /tmp, where nobody else can replace it"


@pytest.mark.parametrize(("what", "mode"), [("rankwatch.toml", 0o666), ("rankwatch.toml", 0o602), (".", 0o777)])
def test_a_settings_file_that_others_can_write_or_replace_is_not_read(folder: Path, what: str, mode: int) -> None:
    (folder / what).chmod(mode)
    with pytest.raises(CliError, match=r"rankwatch\.toml is not read, as others can write .* must belong to this user"):
        configured_settings()


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files to others")
@pytest.mark.parametrize("what", ["rankwatch.toml", "."])
def test_a_settings_file_or_folder_of_another_user_is_not_read(folder: Path, what: str) -> None:
    os.chown(folder / what, NOBODY, NOBODY)
    with pytest.raises(CliError, match=f"is not read, as .* belongs to user {NOBODY}"):
        configured_settings()


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files to others")
def test_a_group_of_several_may_not_write_it(folder: Path) -> None:
    (folder / "rankwatch.toml").chmod(0o620)
    assert configured_settings().public_url == "https://evil.example", "of a group of this user alone"
    os.chown(folder / "rankwatch.toml", -1, NOBODY)
    with pytest.raises(CliError, match="others can write"):
        configured_settings()


def test_a_link_is_judged_by_what_it_leads_to(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.toml"
    (folder / "rankwatch.toml").rename(elsewhere)
    (folder / "rankwatch.toml").symlink_to(elsewhere)
    assert configured_settings().public_url == "https://evil.example"
    elsewhere.chmod(0o666)
    with pytest.raises(CliError, match="others can write"):
        configured_settings()
