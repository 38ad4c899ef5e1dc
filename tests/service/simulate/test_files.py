"""Synthetic jobs as files: the columns of replay, what is missing stays missing, equal seeds give equal bytes."""

from __future__ import annotations

import csv
import gzip
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rankwatch_service.cli.app import app
from rankwatch_service.cli.errors import CliError, Status
from rankwatch_service.simulate.faults import (
    BitFlip,
    DeviceXid,
    Hang,
    HostSilence,
    Kill,
    MissingRows,
    NonFinite,
    RecurringStall,
    Restart,
    ScalerSkip,
    Slow,
    Throttle,
)
from rankwatch_service.simulate.files import SimulateError, write_job
from rankwatch_service.simulate.job import Job, Noise, RankPlacement
from rankwatch_service.simulate.rows import columns_of, rows_of
from tests.support.recordings.outcome import replayed


def table(path: Path) -> list[dict[str, str]]:
    packed = path.read_bytes()
    text = (gzip.decompress(packed) if path.suffix == ".gz" else packed).decode()
    return list(csv.DictReader(text.splitlines()))


def test_there_is_one_row_for_each_rank_and_step_in_the_order_of_time(tmp_path: Path) -> None:
    assert write_job(Job(8, 20, 1, placement=RankPlacement(tp=2, pp=2)), tmp_path / "job.csv") == 160
    rows = table(tmp_path / "job.csv")
    assert [(int(row["step"]), int(row["rank"])) for row in rows] == [(s, r) for s in range(20) for r in range(8)]
    times = [float(row["time_s"]) for row in rows]
    assert times == sorted(times)
    assert {(row["dp"], row["tp"], row["pp"]) for row in rows[:8]} == {
        (dp, tp, pp) for dp in "01" for tp in "01" for pp in "01"
    }
    assert {row["host"] for row in rows} == {"host-0"}


def test_what_was_not_measured_is_empty_and_nan_is_a_value(tmp_path: Path) -> None:
    write_job(Job(8, 15, 2).inject(NonFinite(3, 10), MissingRows(5, 4, 6), ScalerSkip(7)), tmp_path / "job.csv")
    rows = {(int(row["step"]), int(row["rank"])): row for row in table(tmp_path / "job.csv")}
    assert len(rows) == 15 * 8 - 2
    assert rows[1, 0]["fingerprint"] == ""
    assert rows[10, 0]["fingerprint"] != ""
    assert [rows[10, rank]["nonfinite"] for rank in (2, 3)] == ["0", "7"]
    assert math.isnan(float(rows[11, 0]["loss"]))
    assert math.isinf(float(rows[7, 0]["grad_norm"]))
    assert rows[6, 0]["optimizer_skipped"] == ""


def test_late_values_stand_in_the_row_of_their_step(tmp_path: Path) -> None:
    write_job(Job(8, 5, 3, late_values=True), tmp_path / "late.csv")
    write_job(Job(8, 5, 3), tmp_path / "same.csv")
    assert (tmp_path / "late.csv").read_text() == (tmp_path / "same.csv").read_text()


def test_a_step_after_an_evaluation_has_its_kind_and_its_time(tmp_path: Path) -> None:
    write_job(Job(8, 30, 4).inject(RecurringStall(10, 25.0, "eval")), tmp_path / "job.csv")
    rows = [row for row in table(tmp_path / "job.csv") if row["rank"] == "0"]
    assert [int(row["step"]) for row in rows if row["kind"] == "eval"] == [10, 20]
    times = [float(row["time_s"]) for row in rows]
    for number in range(1, 30):
        assert float(rows[number]["step_time_s"]) == pytest.approx(times[number] - times[number - 1])
    assert float(rows[10]["step_time_s"]) > 25


@pytest.mark.parametrize("ending", ["csv", "csv.gz", "parquet"])
def test_equal_seeds_give_equal_files(tmp_path: Path, ending: str) -> None:
    for name in "ab":
        write_job(Job(8, 50, 5).inject(Slow(3, 20, 1.2)), tmp_path / f"{name}.{ending}", "job")
    write_job(Job(8, 50, 6).inject(Slow(3, 20, 1.2)), tmp_path / f"c.{ending}", "job")
    a, b, c = ((tmp_path / f"{name}.{ending}").read_bytes() for name in "abc")
    assert a == b
    assert a != c
    assert (tmp_path / "a.labels.json").read_text() == (tmp_path / "b.labels.json").read_text()


def test_parquet_holds_what_csv_holds(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    job = Job(16, 40, 7).inject(
        NonFinite(3, 10), Restart(20, 5, relaunch=False), HostSilence("host-1", 25, 30), BitFlip(2, 12)
    )
    write_job(job, tmp_path / "job.parquet")
    write_job(job, tmp_path / "job.csv.gz")
    packed = parquet.read_table(tmp_path / "job.parquet").to_pylist()
    plain = table(tmp_path / "job.csv.gz")
    texts = [{name: "" if value is None else str(value) for name, value in row.items()} for row in packed]
    assert texts == plain


def test_labels_say_what_was_injected_into_which_job(tmp_path: Path) -> None:
    write_job(
        Job(16, 50, 8, placement=RankPlacement(tp=2)).inject(
            Slow((1, 2), 10, 1.5, 30), Hang(4, 20), Kill(5, 40), BitFlip(6, 45)
        ),
        tmp_path / "x.csv",
    )
    labels = json.loads((tmp_path / "x.labels.json").read_text())
    assert labels["job"] == "x"
    assert (labels["ranks"], labels["tp"], labels["seed"]) == (16, 2, 8)
    assert labels["faults"] == [
        {"kind": "straggler", "ranks": [1, 2], "at_step": 10, "until_step": 30},
        {"kind": "hang", "ranks": [4], "at_step": 20, "until_step": None},
        {"kind": "rank_lost", "ranks": [5], "at_step": 40, "until_step": None},
    ]


def test_what_only_counters_of_devices_show_is_no_fault_to_find_in_a_file(tmp_path: Path) -> None:
    faults = Slow((1, 2), 10, 1.5, 30), DeviceXid(3, 20, 79), Throttle(4, 25, 1.4)
    write_job(Job(16, 50, 8).inject(*faults), tmp_path / "x.csv")
    labels = json.loads((tmp_path / "x.labels.json").read_text())
    assert [(label["kind"], label["ranks"]) for label in labels["faults"]] == [
        ("straggler", [1, 2]),
        ("straggler", [4]),
    ]
    assert [(label["kind"], label["ranks"]) for label in labels["not_in_file"]] == [("device_fault", [3])]


def test_columns_are_all_that_can_occur() -> None:
    for job in (
        Job(8, 12),
        Job(8, 12, placement=RankPlacement(accelerated=False), report_tokens=True, noise=Noise(uneven_cv=0.1)).inject(
            NonFinite(1, 5)
        ),
        Job(8, 12, placement=RankPlacement(launch_cpu=True)),
        Job(8, 12, placement=RankPlacement(uuids=False, launch_cpu=True, device_times=True)),
    ):
        seen = {name for rows in rows_of(job) for name in rows.columns}
        assert seen == set(columns_of(job))


def test_a_job_that_cannot_be_written_leaves_the_file_before_it(tmp_path: Path) -> None:
    path = tmp_path / "job.csv"
    path.write_text("before")
    with pytest.raises(ValueError, match="multiple"):
        write_job(Job(10, 5, placement=RankPlacement(tp=4)), path)
    assert path.read_text() == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["job.csv"]
    with pytest.raises(SimulateError, match=r"\.parquet, \.csv"):
        write_job(Job(8, 5), tmp_path / "job.xlsx")


def test_memory_does_not_grow_with_the_number_of_steps(tmp_path: Path) -> None:
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from rankwatch_service.simulate import files\n"
        "from rankwatch_service.simulate.job import Job\n"
        "files.BLOCK_ROWS = 16_384\n"
        "for steps in (24, 72):\n"
        "    files.write_job(Job(2048, steps, 1), Path(sys.argv[1]))\n"
        "    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    pytest.importorskip("pyarrow")
    command = [sys.executable, "-c", code, str(tmp_path / "job.parquet")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100)
    few_kb, many_kb = map(int, done.stdout.split())
    # Three blocks and nine; held until the end, the difference alone would be 80 MB.
    assert many_kb < few_kb + 20_000


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["simulate", "--ranks", "8", "--steps", "20", *words])
    if isinstance(result.exception, CliError):
        return int(result.exception.status), str(result.exception)
    return result.exit_code, result.stderr


@pytest.mark.parametrize("url", ["http://[::1", ":::", "localhost:8770", "ftp://host", "http://"])
def test_a_url_that_is_none_is_wrong_usage(url: str) -> None:
    status, reported = run("--live", "--speed", "0", "--url", url)
    assert status == Status.USAGE
    assert "is not the URL of a service" in reported


@pytest.mark.parametrize("token", ["schl\u00fcssel", "two\nlines"])
def test_a_token_that_no_header_can_carry_is_wrong_usage(token: str) -> None:
    status, reported = run("--live", "--speed", "0", "--url", "http://127.0.0.1:9", "--token", token)
    assert (status, "the token" in reported) == (Status.USAGE, True)


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
