"""`rankwatch simulate` as a command: what cannot be meant is wrong usage, before anything is made or sent."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rankwatch_service.cli.app import app
from rankwatch_service.cli.errors import CliError, Status
from tests.support.recordings.replayed import replayed


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["simulate", "--ranks", "8", "--steps", "20", *words])
    if isinstance(result.exception, CliError):
        return int(result.exception.status), str(result.exception)
    return result.exit_code, result.stderr


@pytest.mark.parametrize("url", ["http://[::1", ":::", "localhost:8770", "ftp://host", "http://"])
def test_a_url_that_is_none_is_wrong_usage(url: str) -> None:
    status, told = run("--live", "--speed", "0", "--url", url)
    assert status == Status.USAGE
    assert "is not the URL of a service" in told


@pytest.mark.parametrize("token", ["schl\u00fcssel", "two\nlines"])
def test_a_token_that_no_header_can_carry_is_wrong_usage(token: str) -> None:
    status, told = run("--live", "--speed", "0", "--url", "http://127.0.0.1:9", "--token", token)
    assert (status, "the token" in told) == (Status.USAGE, True)


@pytest.mark.parametrize(
    "words", [("--step-s", "inf"), ("--step-s", "nan"), ("--step-s", "1e9"), ("--noise", "nan"), ("--speed", "nan")]
)
def test_a_number_with_which_the_job_would_never_end_is_wrong_usage(tmp_path: Path, words: tuple[str, str]) -> None:
    status, _ = run("-o", str(tmp_path / "job.csv"), *words)
    assert status == Status.USAGE
    assert list(tmp_path.iterdir()) == []


def test_noise_is_the_noise_and_time_ticks_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr("rankwatch_service.cli.commands.simulate._write", lambda world, *_: made.append(world))
    assert run("-o", str(tmp_path / "job.csv"), "--noise", "0.07")[0] == 0
    assert (made[0].noise.busy, made[0].tick_s) == (0.07, 1.0)


def test_a_job_on_accelerators_is_judged_by_what_its_devices_measure(tmp_path: Path) -> None:
    path = tmp_path / "job.csv"
    words = ("--accelerator", "--steps", "160", "--fault", "straggler:rank=2,at=100,factor=1.3")
    assert run("-o", str(path), *words)[0] == 0
    with path.open() as lines:
        row = next(csv.DictReader(lines))
    assert {"busy_cpu_s", "device_uuid", "device_busy_s", "device_wait_s"} <= row.keys()
    (incident,) = replayed(path).incidents[0]
    assert (incident.kind, incident.ranks, incident.cause) == ("straggler", (2,), "device")


def test_what_devices_measure_stands_beside_hosts_that_are_busy_all_the_time_and_hardly_compute(tmp_path: Path) -> None:
    path = tmp_path / "job.csv"
    assert run("-o", str(path), "--accelerator")[0] == 0
    with path.open() as lines:
        rows = [*csv.DictReader(lines)]
    assert all(row["device_uuid"].startswith("GPU-") and float(row["busy_cpu_s"]) < 0.15 for row in rows)
    times = [{name: float(row[name]) for name in row if name.endswith("_s")} for row in rows]
    assert all(row["busy_s"] == pytest.approx(row["step_time_s"] - row["data_wait_s"]) for row in times)
    assert all(row["busy_s"] == pytest.approx(row["device_busy_s"] + row["device_wait_s"]) for row in times)
