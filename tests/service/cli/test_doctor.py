"""What `rankwatch doctor` says of the data folder and of the OIDC provider; the rest is in `test_commands.py`."""

import json

import pytest
from typer.testing import CliRunner

from rankwatch_service.cli.app import app
from tests.support.accelerator import DRIVER
from tests.support.host_tree import HostTree
from tests.support.service.oidc_provider import oidc_provider
from tests.support.store.database import new_database


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
        verdict, told = checks()["OIDC"]
        assert (verdict, "answered 503" in told) == ("finding", True)


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
    verdict, told = found["GPU 3"]
    assert (verdict, told.startswith("Simulated H100, GPU-3; does not tell: ")) == ("ok", True)
    assert "TotalEccErrors" in told
    assert "TotalEccErrors" not in found["GPU 2"][1]
    assert "pcie_replays" in told
    assert found["GPU errors"][0] == "ok"


def test_without_a_driver_it_says_what_to_do_and_a_driver_that_hangs_is_a_finding(driver, monkeypatch):
    driver(no_driver=True)
    verdict, told = gpu_checks()["GPU driver"]
    assert (verdict, "--gpus all" in told) == ("finding", True)
    driver(hangs=True)
    monkeypatch.setattr("rankwatch_service.cli.commands.doctor.ANSWER_WITHIN_S", 0.5)
    verdict, told = gpu_checks()["GPU driver"]
    assert (verdict, told.startswith("does not answer within")) == ("finding", True)
