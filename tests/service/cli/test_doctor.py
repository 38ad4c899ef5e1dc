"""Checks of an installation: `rankwatch doctor`, and `rankwatch health` of roles without a port."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine
from typer.testing import CliRunner, Result

from rankwatch_service.cli.app import app
from rankwatch_service.cli.commands.doctor import show_health
from rankwatch_service.cli.errors import CliError, Status
from rankwatch_service.clock import SystemClock
from rankwatch_service.notify.lease import Lease
from rankwatch_service.store.models import StreamProcess
from tests.support.accelerator import DRIVER
from tests.support.host_tree import HostTree
from tests.support.service.oidc_provider import oidc_provider
from tests.support.store.database import add, new_database


@pytest.fixture
def up(tmp_path, monkeypatch):
    """The data folder of a service that `rankwatch up` has started."""
    data = tmp_path / "elsewhere"
    data.mkdir()
    new_database(data).dispose()
    monkeypatch.setenv("RANKWATCH_INGEST_CONFIG", str(tmp_path / "ingest.json"))
    places = {"database_url": f"sqlite:///{data}/rankwatch.db", "data_dir": str(data)}
    (tmp_path / "local.json").write_text(json.dumps({"url": "http://127.0.0.1:9", "token": "t", **places}))
    return data


def checks():
    lines = CliRunner().invoke(app, ["doctor", "--json"]).stdout.splitlines()
    return {one["check"]: (one["verdict"], one["told"]) for one in map(json.loads, lines)}


def test_the_data_folder_is_that_of_the_database_that_is_checked(up):
    found = checks()
    assert found["data folder"][1].startswith(f"{up}, ")
    assert found["database"] == ("ok", f"sqlite:///{up}/rankwatch.db")
    assert found["OIDC"] == ("note", "not set: people log in with tokens")


def test_the_oidc_provider_is_asked_whether_it_answers(up, monkeypatch):
    with oidc_provider() as provider:
        for name, value in provider.settings().items():
            monkeypatch.setenv(f"RANKWATCH_{name.upper()}", value if isinstance(value, str) else json.dumps(value))
        assert checks()["OIDC"] == ("ok", f"{provider.issuer} answers")
        provider.away = True
        verdict, reported = checks()["OIDC"]
        assert (verdict, "answered 503" in reported) == ("finding", True)


def test_what_of_the_host_and_its_ports_can_be_read_is_said_and_a_wrong_folder_is_a_finding(up, tmp_path, monkeypatch):
    tree = HostTree(tmp_path / "host")
    tree.ethernet("eth0")
    tree.rdma("mlx5_0")
    monkeypatch.setenv("RANKWATCH_HOST_ROOT", str(tree.root))
    found = checks()
    assert found["host"][0] == "ok"
    assert found["network ports"] == ("ok", "mlx5_0/1, eth0")
    monkeypatch.setenv("RANKWATCH_HOST_ROOT", str(tmp_path / "elsewhere"))
    found = checks()
    assert found["host"] == (
        "finding",
        f"{tmp_path / 'elsewhere'} has no proc and no sys: agents cannot tell what is in it (RANKWATCH_HOST_ROOT)",
    )
    assert "network ports" not in found


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Says what is wrong with the driver of eight devices."""

    def say(**wrong):
        (tmp_path / "nvml.json").write_text(json.dumps(wrong))

    monkeypatch.setenv("PYTHONPATH", str(DRIVER))
    monkeypatch.setenv("SIMULATED_NVML", str(tmp_path / "nvml.json"))
    say()
    return say


def gpu_checks():
    result = CliRunner().invoke(app, ["doctor", "--gpu", "--json"])
    return {one["check"]: (one["verdict"], one["told"]) for one in map(json.loads, result.stdout.splitlines())}


def test_gpus_tell_what_they_can_and_why_not_the_rest(driver):
    driver(lost=[5], missing=["nvmlDeviceGetSerial"])
    found = gpu_checks()
    assert found["GPU driver"] == ("ok", "version 999.1, 8 devices")
    assert found["GPU 5"] == ("finding", "a device that cannot be opened: the driver has lost it")
    verdict, reported = found["GPU 3"]
    assert (verdict, reported.startswith("Simulated H100, GPU-3; does not tell: ")) == ("ok", True)
    assert "TotalEccErrors" in reported
    assert "TotalEccErrors" not in found["GPU 2"][1]
    assert "pcie_replays" in reported
    assert found["GPU errors"][0] == "ok"


def test_without_a_driver_it_says_what_to_do_and_a_driver_that_hangs_is_a_finding(driver, monkeypatch):
    driver(no_driver=True)
    verdict, reported = gpu_checks()["GPU driver"]
    assert (verdict, "--gpus all" in reported) == ("finding", True)
    driver(hangs=True)
    monkeypatch.setattr("rankwatch_service.cli.commands.doctor.ANSWER_WITHIN_S", 0.5)
    verdict, reported = gpu_checks()["GPU driver"]
    assert (verdict, reported.startswith("does not answer within")) == ("finding", True)


def test_doctor_finds_nothing_in_a_working_installation(terminal, to, tmp_path):
    assert terminal.run("db", "upgrade", "--data", str(tmp_path))[0] == 0
    status, out, err = terminal.run("doctor", "--json", "--data", str(tmp_path), *to)
    checks = {one["check"]: one["verdict"] for one in map(json.loads, out.splitlines())}
    assert checks["database"] == checks["service"] == checks["clock"] == checks["token"] == "ok", out
    assert status == int("finding" in checks.values()), err


def test_doctor_finds_a_database_that_was_not_upgraded(terminal, to, tmp_path):
    (tmp_path / "rankwatch.db").touch()
    status, out, _ = terminal.run("doctor", "--json", "--data", str(tmp_path), *to)
    checks = {one["check"]: one for one in map(json.loads, out.splitlines())}
    assert (status, checks["database"]["verdict"]) == (1, "finding")
    assert "rankwatch db upgrade" in checks["database"]["told"]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Engine]:
    engine = new_database(tmp_path)
    yield engine
    engine.dispose()


def asked(role: str, folder: Path) -> Result:
    """What `rankwatch health` says of a role."""
    return CliRunner().invoke(app, ["health", role, "--data", str(folder)])


def reported(engine: Engine, host: str, age_s: float) -> None:
    at = SystemClock().unix_ns() - int(age_s * 1e9)
    row = {"owner": f"{host}:42", "started_unix_ns": at, "counters": {}, "at_unix_ns": at}
    add(engine, StreamProcess, row)


def test_a_stream_process_of_this_host_that_reported_is_healthy(tmp_path: Path, store: Engine) -> None:
    reported(store, socket.gethostname(), 3.0)
    assert asked("stream", tmp_path).exit_code == 0


@pytest.mark.parametrize(("host", "age_s"), [(socket.gethostname(), 45.0), ("elsewhere", 1.0)])
def test_a_silent_or_remote_stream_process_is_not_healthy(tmp_path, store, host, age_s):
    reported(store, host, age_s)
    result = asked("stream", tmp_path)
    assert isinstance(result.exception, CliError)
    assert result.exception.status is Status.FINDINGS


def test_a_notifier_is_healthy_while_somebody_holds_its_lease(tmp_path: Path, store: Engine) -> None:
    assert isinstance(asked("notify", tmp_path).exception, CliError)
    assert Lease(store, "notify", SystemClock()).hold()
    assert asked("notify", tmp_path).exit_code == 0


def test_health_alone_says_what_is_wrong_first_and_then_all_parts(rankwatch, api):
    status, out, _ = rankwatch("health")
    lines = [line.split("  ")[0].strip() for line in out.splitlines()]
    assert (status, lines[0]) == (1, "service")
    assert "problems, which are critical" in out
    assert "No notifier has ever run: nobody is notified" in out
    assert lines[-7:] == ["api", "stream", "notifier", "receivers", "agents", "detectors", "database"]
    assert len(lines) <= 24, "more than one screen"
    status, out, _ = rankwatch("health", "--json")
    assert (status, json.loads(out)["state"]) == (1, "critical")


def test_health_says_in_one_line_that_all_parts_work(rankwatch, capsys):
    found = json.loads(rankwatch("health", "--json")[1])
    show_health(found | {"problems": [], "state": "ok"}, "http://x")
    out = capsys.readouterr().out
    assert ("all parts work" in out.splitlines()[0], "none: nobody is notified" in out) == (True, True)


def test_a_missing_database_is_reported_in_one_line() -> None:
    url = "postgresql://nobody:secret@127.0.0.1:1/none"
    result = CliRunner().invoke(app, ["health", "stream", "--database-url", url])
    assert isinstance(result.exception, CliError)
    assert "\n" not in str(result.exception)
    assert "secret" not in str(result.exception)
