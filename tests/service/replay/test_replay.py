"""Recorded jobs replayed: the incidents that the stream would have opened, with the times of the file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rankwatch_detectors.base import Finding, Kind, Observation
from rankwatch_detectors.values.corruption import LocalNormDetector
from rankwatch_service.cli.app import app
from rankwatch_service.cli.errors import CliError
from rankwatch_service.replay.configure import read_config
from rankwatch_service.replay.layout import ReplayError
from rankwatch_service.replay.report import NOT_IN_FILES, as_json
from rankwatch_service.replay.sources import open_source
from rankwatch_service.simulate.faults import BitFlip, NonFinite, Slow
from rankwatch_service.simulate.files import write_job
from rankwatch_service.simulate.job import Job, RankPlacement
from tests.support.recordings.outcome import replayed
from tests.support.trainer_logs import write_event_file


def recorded(job: Job, path: Path) -> Path:
    write_job(job, path)
    return path


def test_a_slow_rank_is_named_with_its_host_and_the_times_of_the_file(tmp_path: Path) -> None:
    job = Job(world_size=32, steps=320, seed=3).inject(Slow(17, 200, 1.2, until_step=280))
    outcome = replayed(recorded(job, tmp_path / "job.parquet"))
    (reported,) = [as_json(incident, outcome.named) for incident in outcome.incidents[0]]
    assert (reported["kind"], reported["ranks"], reported["hosts"], reported["onset_step"]) == (
        "straggler",
        [17],
        ["host-2"],
        200,
    )
    assert 204 <= reported["detected_step"] <= 212
    assert 280 < reported["resolved_step"] <= 310
    assert reported["onset_time_s"] < reported["detected_time_s"] < 320
    assert (outcome.rows, outcome.frames, outcome.ranks) == (32 * 320, 320, 32)
    assert not outcome.left_out


@pytest.mark.parametrize("uuids", [True, False])
def test_the_cpu_time_of_ranks_on_devices_judges_nobody(tmp_path: Path, uuids: bool) -> None:
    placement = RankPlacement(uuids=uuids, launch_cpu=True)
    job = Job(world_size=16, steps=240, seed=1, placement=placement).inject(Slow(5, 200, 1.15))
    path = recorded(job, tmp_path / "job.csv")
    outcome = replayed(path)
    (incident,) = outcome.incidents[0]
    assert (incident.kind, incident.ranks) == (Kind.STRAGGLER, (5,))
    assert 200 <= (incident.detected_step or 0) <= 207
    assert outcome.accelerated  # costs are GPU-hours
    # The column of the device decides; without it, the CPU time is the ranks' own work.
    replace_in(path, "device_uuid" if uuids else "device_type", "note")
    outcome = replayed(path)
    assert (outcome.incidents, outcome.accelerated) == ([[]], False)


def test_files_of_which_only_one_tells_of_devices_are_one_accelerated_job(tmp_path: Path) -> None:
    job = Job(world_size=16, steps=240, seed=1, placement=RankPlacement(uuids=False, launch_cpu=True))
    head, *rows = recorded(job.inject(Slow(5, 200, 1.15)), tmp_path / "job.csv").read_text().splitlines()
    first, second = tmp_path / "first.csv", tmp_path / "second.csv"
    of_rank = [int(row.split(",")[2]) for row in rows]
    first.write_text("\n".join([head, *(row for row, rank in zip(rows, of_rank, strict=True) if rank < 8)]) + "\n")
    head = head.replace("device_type", "note")
    second.write_text("\n".join([head, *(row for row, rank in zip(rows, of_rank, strict=True) if rank >= 8)]) + "\n")
    outcome = replayed(first, second)
    assert [(incident.kind, incident.ranks) for incident in outcome.incidents[0]] == [(Kind.STRAGGLER, (5,))]


def replace_in(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new, 1))


def test_the_size_of_the_batches_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rankwatch_service.replay import files

    job = Job(world_size=8, steps=300, seed=4).inject(
        Slow(3, 100, 1.5, until_step=160), BitFlip(5, 205), NonFinite(2, 250)
    )
    path = recorded(job, tmp_path / "job.parquet")
    whole = [as_json(incident, named=True) for incident in replayed(path).incidents[0]]
    monkeypatch.setattr(files, "BATCH_ROWS", 77)
    assert [as_json(incident, named=True) for incident in replayed(path).incidents[0]] == whole
    assert [reported["kind"] for reported in whole] == ["straggler", "corruption"]
    # Wrong bits bring wrong numbers: the NaN that follows is a consequence.
    assert [part["kind"] for part in whole[1]["consequences"]] == ["nonfinite"]


def series(tmp_path: Path, rows: list[str], head: str = "time_s,step,loss,kind") -> Path:
    path = tmp_path / "series.csv"
    path.write_text("\n".join([head, *rows]) + "\n")
    return path


STOOD = ((range(60), 0), (range(60, 90), 40))


def test_a_gap_in_the_times_is_a_hang_of_that_length_and_one_beside_an_evaluation_is_none(tmp_path: Path) -> None:
    before, after = ([f"{step + off_s},{step},2,train" for step in steps] for steps, off_s in STOOD)
    hung = series(tmp_path, [*before, *after])
    (incident,) = replayed(hung).incidents[0]
    assert (incident.kind, incident.first.onset_step, incident.state) == (Kind.HANG, 60, "resolved")
    assert 59 < incident.detected_time_s <= 59 + 8
    assert incident.summary.startswith("Training stands still in step 60")
    said = " ".join(run(str(hung))[1].split())
    assert "Training stands still in step 60 since 59 s. It has ended by itself after 41 s." in said
    assert "first: See what the ranks did at that time; a file has no stacks" in said
    assert replayed(series(tmp_path, [*before, "99,59,,eval", *after])).incidents == [[]]


def test_a_stall_shows_in_step_times_where_there_are_no_others(tmp_path: Path) -> None:
    rows = [f"{step},{80 if step == 70 else 2},2" for step in range(120)]
    (incident,) = replayed(series(tmp_path, rows, "step,step_time_s,loss")).incidents[0]
    assert (incident.kind, incident.first.onset_step) == (Kind.HANG, 70)


def test_a_step_whose_time_was_not_logged_is_not_taken_to_be_as_slow_as_the_one_before(tmp_path: Path) -> None:
    rows = [f"{step},{60 if step == 70 else ('' if step % 2 else 8)},2" for step in range(120)]
    assert replayed(series(tmp_path, rows, "step,step_time_s,loss")).incidents == [[]]


def test_a_stall_whose_log_lines_came_late_is_one_incident_in_the_step_that_took_so_long(tmp_path: Path) -> None:
    rows = [f"{step},{step},1,2" for step in range(70)]
    rows += ["109,70,1,2", "119,71,49,2", *(f"{step + 48},{step},1,2" for step in range(72, 120))]
    (incident,) = replayed(series(tmp_path, rows, "time_s,step,step_time_s,loss")).incidents[0]
    assert (incident.kind, incident.first.onset_step, incident.first.onset_time_s) == (Kind.HANG, 71, 70)


def test_a_clock_that_was_set_back_goes_on_from_where_it_was(tmp_path: Path) -> None:
    rows = [f"{step if step < 50 else step - 50},{step},2,train" for step in range(100)]
    outcome = replayed(series(tmp_path, rows))
    assert (outcome.frames, outcome.incidents) == (100, [[]])


def rows_of(path: Path, rows: Iterable[tuple[object, ...]]) -> Path:
    """A file with one row for each step and rank."""
    lines = [",".join(map(str, row)) for row in rows]
    path.write_text("\n".join(["step,rank,time_s,kind,loss,step_time_s", *lines]) + "\n")
    return path


@pytest.mark.parametrize("timed", [True, False], ids=["with times", "without"])
@pytest.mark.parametrize(("steps", "reported"), [(900, True), (350, True), (310, False)])
def test_a_rank_whose_rows_stop_while_its_peers_go_on_has_ended(tmp_path, steps, reported, timed):
    rows = (
        (step, rank, step if timed else "", "train", 2.0, "" if timed else 1.0)
        for step in range(steps)
        for rank in range(4)
        if rank != 2 or step < 280
    )
    (incidents,) = replayed(rows_of(tmp_path / "run.csv", rows)).incidents
    assert [(one.kind, one.ranks, one.first.onset_step) for one in incidents] == (
        [(Kind.RANK_LOST, (2,), 280)] if reported else []
    )
    assert all("no row after step 279" in one.summary for one in incidents)


def test_a_rank_that_logs_more_rarely_than_its_peers_has_not_ended(tmp_path: Path) -> None:
    rows = (
        (step, rank, step, "train", 2.0, 1.0)
        for step in range(1500)
        for rank in range(3)
        if rank != 1 or not step % 200
    )
    assert replayed(rows_of(tmp_path / "run.csv", rows)).incidents == [[]]


@pytest.mark.parametrize("kind", ["eval", "checkpoint"])
@pytest.mark.parametrize("seconds", [0.25, 90.0], ids=["short", "long"])
def test_rows_of_an_evaluation_that_bear_the_step_before_it_are_a_phase_after_that_step(tmp_path, kind, seconds):
    rows, now_s = [], 0.0
    for step in range(300):
        now_s += 1.0
        rows += [(step, rank, now_s, "train", 2.0, 1.0) for rank in range(2)]
        if step % 50 == 49:
            now_s += seconds
            rows += [(step, rank, now_s, kind, 3.5, "") for rank in range(2)]
    outcome = replayed(rows_of(tmp_path / "run.csv", rows))
    assert outcome.incidents == [[]]
    assert not outcome.left_out
    assert (outcome.rows, outcome.frames, outcome.last_step) == (len(rows), 300, 299)


def test_two_configurations_are_compared_by_what_only_one_of_them_finds(tmp_path: Path) -> None:
    job = Job(world_size=16, steps=260, seed=5).inject(Slow(3, 100, 1.05), BitFlip(5, 205))
    path = recorded(job, tmp_path / "job.parquet")
    code, (reported, _) = run_json(str(path), "--compare", "straggler.wall.ratio_min=1.5")
    assert (code, reported["kind"], reported["ranks"], reported["found"]) == (0, "straggler", [3], "only with default")
    _, out, _ = run(str(path), "--compare", "straggler.wall.ratio_min=1.5")
    assert "Found with both settings: 1 incident." in out
    assert "1 incident only with default:" in out
    assert "No incident only with straggler.wall.ratio_min=1.5." in out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("straggler.budgets=1", "there is no setting straggler.budgets"),
        ("stragglers.budget=1", "there is no setting stragglers"),
        ("straggler.budget=low", "straggler.budget: Expected `float`"),
        ("straggler", "is neither a .toml or .json file nor DETECTOR.SETTING=VALUE"),
        ("missing.toml", "missing.toml"),
        ("straggler=1,straggler.budget=2", "straggler.budget: straggler has a value already"),
        ("straggler.budget=-1", "straggler.budget: -1 is not a finite number above 0"),
        ("slowdown.budget=0", "slowdown.budget: 0 is not a finite number above 0"),
        ("stage.budget=NaN", "stage.budget: nan is not a finite number above 0"),
        ("straggler.budget=Infinity", "straggler.budget: inf is not a finite number above 0"),
    ],
)
def test_settings_that_are_none_are_said(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"\S") as caught:
        read_config(text)
    assert said in str(caught.value)


def test_settings_come_from_files_as_well(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[straggler]\nbudget = 9\n[straggler.wall]\nratios = [1.5]\nratio_min = 1.4\n")
    (tmp_path / "a.json").write_text('{"hang": {"floor_s": 9.5}}')
    assert read_config(str(tmp_path / "a.toml")).straggler.wall.ratios == (1.5,)
    assert read_config(str(tmp_path / "a.json")).hang.floor_s == 9.5


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["replay", *words])
    error = result.exception
    if isinstance(error, CliError):
        return int(error.status), result.stdout, f"{error}\n"
    return result.exit_code, result.stdout, result.stderr


def run_json(*words: str) -> tuple[int, list[dict[str, Any]]]:
    code, out, _ = run(*words, "--json")
    return code, [json.loads(line) for line in out.splitlines()]


def test_the_command_prints_an_incident_a_line_and_what_was_read(tmp_path: Path) -> None:
    path = recorded(Job(world_size=16, steps=260, seed=5).inject(Slow(3, 100, 1.3)), tmp_path / "job.parquet")
    code, (reported, last) = run_json(str(path))
    assert (code, reported["kind"], reported["ranks"], reported["resolved_step"]) == (0, "straggler", [3], None)
    assert (last["summary"]["rows"], last["summary"]["incidents"]) == (16 * 260, 1)
    code, out, _ = run(str(path))
    assert code == 0
    assert "Rank 3 on host-0 is 3" in out
    assert "Read 4,160 rows" in out
    assert "first: Compare its GPU" in out
    assert "rank-hours" in out
    assert max(map(len, out.splitlines())) <= 80


def test_the_command_says_what_is_wrong_and_what_cannot_be_seen(tmp_path: Path) -> None:
    broken = series(tmp_path, ["1,one,2,train"])
    code, _, err = run(str(broken))
    assert code == 1
    assert "row 1, column step: 'one' is not a number" in err
    code, out, _ = run(str(series(tmp_path, [f"{step},{step},2,train" for step in range(50)])))
    assert code == 0
    assert "No incident." in out
    assert "straggler: needs rank, and busy_s" in out
    assert "hang: needs" not in out
    never = " ".join(out.split()).partition("Never detected in files, which lack the data: ")[2]
    for kind in ("telemetry_lost", "device_fault", "device_degraded", "host_degraded", "network_degraded"):
        assert kind in never


HEADER = "time_s,step,rank,step_time_s,forward_s,loss,grad_norm,nonfinite,fingerprint,note"


@pytest.mark.parametrize("rows", [[], ["0,one,0,1,1,2,1,0,7,a"]])
def test_columns_of_a_file_without_a_sound_row_are_those_of_its_header(tmp_path: Path, rows: list[str]) -> None:
    path = str(series(tmp_path, rows, HEADER))
    _, out, _ = run(path)
    assert "columns are missing" not in out
    summary = run_json(path)[1][-1]["summary"]
    assert summary["not_looked_for"] == list(map(str, NOT_IN_FILES))
    assert set(summary["columns"]) == {*HEADER.split(",")[3:-1], "busy_s"}


def test_ranks_are_counted_though_the_rows_of_the_first_ones_end_in_a_wrong_one(tmp_path: Path) -> None:
    rows = [f"{step},{rank},2" for rank in range(2) for step in range(100)]
    code, out, err = run(str(series(tmp_path, rows, "step,rank,loss")))
    assert code == 1
    assert "Read 100 rows" in out
    assert ": 1 rank, 100 steps" in out
    assert "sort them by step, not by rank" in err


def test_rows_that_come_late_since_the_file_is_sorted_by_rank_are_reported_so(tmp_path: Path) -> None:
    rows = [f"{step},{rank},2" for rank in range(2) for step in range(40)]
    _, out, _ = run(str(series(tmp_path, rows, "step,rank,loss")))
    assert "sorted by rank" in " ".join(out.split())
    result = CliRunner().invoke(app, ["replay", "--help"])
    assert "in the order of steps" in result.stdout


def test_what_stands_before_a_wrong_row_is_judged_and_printed(tmp_path: Path) -> None:
    rows = [f"{step},{'nan' if step == 70 else 2},train" for step in range(100)]
    wrong = series(tmp_path, [*rows, "100,soon,train"], "step,loss,kind")
    code, out, err = run(str(wrong))
    assert code == 1
    assert "Read 100 rows" in out
    assert "NaN in the loss in step 70" in out
    assert "row 101, column loss: 'soon' is not a number" in err
    code, (reported, last) = run_json(str(wrong))
    assert (code, reported["onset_step"]) == (1, 70)
    assert "row 101, column loss" in last["summary"]["error"]
    assert "straggler" in last["summary"]["not_looked_for"]


def test_a_detector_that_fails_is_reported_in_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: LocalNormDetector, observation: Observation) -> list[Finding]:
        raise ArithmeticError("no such norm")

    monkeypatch.setattr(LocalNormDetector, "observe", fail)
    path = series(tmp_path, [f"{step},{step},2,train" for step in range(5)])
    assert "ArithmeticError: no such norm" in run_json(str(path))[1][-1]["summary"]["failures"][0]


def event_file(folder: Path, steps: range, start_s: float, losses: dict[int, float]) -> Path:
    path = folder / f"events.out.tfevents.{steps.start}"
    scalars = [
        (start_s + step, step, tag, value)
        for step in steps
        for tag, value in (("train/loss", losses.get(step, 2.0 + 0.01 * (step % 7))), ("lr", 1e-4))
    ]
    write_event_file(path, scalars)
    return path


def test_scalars_of_an_event_file_are_a_series(tmp_path: Path) -> None:
    path = event_file(tmp_path, range(120), 1e9, {100: 9.0})
    code, (reported, last) = run_json(str(path), "--map", "train/loss=loss")
    assert (code, reported["kind"], reported["onset_step"], reported["resolved_step"] is not None) == (
        0,
        "loss_spike",
        100,
        True,
    )
    assert sorted(last["summary"]["columns"]) == ["loss", "lr"]


def written(folder: Path, scalars: list[tuple[int, str, float]]) -> Path:
    path = folder / "events.out.tfevents.1"
    write_event_file(path, [(1e9 + number, *scalar) for number, scalar in enumerate(scalars)])
    return path


def test_a_step_that_is_written_again_in_an_event_file_begins_an_attempt(tmp_path: Path) -> None:
    steps = [*range(100), *range(80, 130)]
    scalars = [(step, tag, 2.0) for step in steps for tag in ("loss", "lr")]
    (batch,) = [batch for batch, _ in open_source(written(tmp_path, scalars)).batches()]
    assert batch.column("step").to_pylist() == steps
    attempts = "".join(text.rpartition(".")[2] for text in batch.column("attempt").to_pylist())
    assert attempts == 100 * "0" + 50 * "1"


def test_a_tag_written_twice_in_its_step_and_one_that_comes_later_are_no_attempt(tmp_path: Path) -> None:
    scalars = [(1, "loss", 2.0), (1, "loss", 2.5), (2, "loss", 3.0), (1, "lr", 0.5), (2, "lr", 0.5)]
    (batch,) = [batch for batch, _ in open_source(written(tmp_path, scalars)).batches()]
    assert (batch.column("loss").to_pylist(), batch.column("lr").to_pylist()) == ([2.5, 3.0], [0.5, 0.5])


def test_tags_may_be_called_like_what_each_row_has(tmp_path: Path) -> None:
    tags = ("step", "time_s", "attempt", "loss")
    outcome = replayed(written(tmp_path, [(step, tag, 7.0) for step in range(9) for tag in tags]))
    assert (outcome.rows, outcome.last_step) == (9, 8)
    assert sorted(outcome.metrics) == ["loss", "tag/attempt", "tag/step", "tag/time_s"]


def test_event_files_of_a_job_that_was_started_again_are_its_launches(tmp_path: Path) -> None:
    first = event_file(tmp_path, range(120), 1e9, {})
    second = event_file(tmp_path, range(100, 200), 1e9 + 60, {150: 9.0})
    for paths in ((first, second), (second, first)):
        code, (reported, last) = run_json(*map(str, paths), "--map", "train/loss=loss")
        assert (code, reported["onset_step"], last["summary"]["rows"]) == (0, 150, 220)


def test_a_truncated_event_file_is_read_to_its_last_whole_event(tmp_path: Path) -> None:
    path = written(tmp_path, [(step, "loss", 2.0) for step in range(9)])
    for damaged in (path.read_bytes()[:-9], path.read_bytes() + b"\xff" * 40):
        path.write_bytes(damaged)
        assert replayed(path).rows in (8, 9)
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(ReplayError, match="without scalars"):
        open_source(path)
