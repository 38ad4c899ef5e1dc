"""Saves and restores that fail, jobs that have stopped saving: what is reported, until when, and what is no reason."""

from __future__ import annotations

import dataclasses
import errno
import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from rankwatch_detectors.base import AttemptStart, Change, Finding, Observation, Occurrence, Severity, Tick
from rankwatch_detectors.dispatch import DispatchingDetector
from rankwatch_detectors.progress.checkpoint_failed import (
    CheckpointFailedConfig,
    CheckpointFailedDetector,
    SaveParts,
    SavePartsConfig,
)
from rankwatch_detectors.progress.checkpoint_overdue import CheckpointOverdueConfig, CheckpointOverdueDetector
from rankwatch_detectors.progress.restore_failed import RestoreFailedConfig, RestoreFailedDetector
from tests.support.detection.verdicts import closed, evaluate, opened
from tests.support.values.presences import ATTEMPT, frame, topology

NO_ROOM = {"type": "OSError", "message": "[Errno 28] No space left on device", "errno": errno.ENOSPC}
BROKEN = {"type": "RuntimeError", "message": "Connection closed by peer [::1]:4242"}
UNREADABLE = {"type": "RuntimeError", "message": "PytorchStreamReader failed reading zip archive"}


class SavingJob:
    """A job of four ranks at a step a second, whose detector is asked after each event and each second."""

    def __init__(self, detector: DispatchingDetector | None = None) -> None:
        self.detector = detector or CheckpointFailedDetector(CheckpointFailedConfig())
        self.attempt = ATTEMPT
        self.now_s = 0.0
        self.step = 0
        self.said: list[Finding] = []
        self.begin(ATTEMPT)

    def begin(self, attempt: str, ranks: int = 4, *, lockstep: bool = True) -> None:
        self.attempt = attempt
        self.observe(AttemptStart(attempt, replace(topology(ranks), lockstep=lockstep), self.now_s))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.observe(frame(self.step, {"step_time_s": [1.0] * 4}, attempt=self.attempt, time_s=self.now_s))
            self.step += 1
            self.stand(1)

    def stand(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_s += 1.0
            self.observe(Tick(self.now_s, None))

    def row(self, rank: int, step: int) -> None:
        """A row of one rank alone, after the frame of its step has closed."""
        row = frame(step, {"step_time_s": [1.0] * 4}, attempt=self.attempt, time_s=self.now_s)
        row.present["step_time_s"][:] = [number == rank for number in range(4)]
        self.observe(replace(row, late=True))

    def hear(self, kind: str, rank: int | None = None, step: int | None = None, **fields: Any) -> None:
        step = self.step if step is None else step
        self.observe(Occurrence(kind, self.attempt, "node-1", self.now_s, rank, step, fields))

    def fail(self, rank: int = 0, what: str = "save", **fields: Any) -> None:
        error = {} if "type" in fields else NO_ROOM if what == "save" else UNREADABLE
        # A step saves within itself; what is loaded, is loaded between two steps.
        step = fields.pop("step", self.step - (what == "restore"))
        self.hear("checkpoint_failed", rank, step, what=what, **error, **fields)

    def save(self, *ranks: int, step: int | None = None, **fields: Any) -> None:
        for rank in ranks or (0,):
            self.hear("checkpoint_saved", rank, step, **{"tier": "local", "shards": 0, **fields})

    def observe(self, observation: Observation) -> None:
        self.said += self.detector.observe(observation)

    @property
    def changes(self) -> list[Change]:
        return [finding.change for finding in self.said]


@pytest.fixture
def saving() -> SavingJob:
    job = SavingJob()
    job.train(10)
    job.save(0, shards=1)
    job.train(10)
    return job


def test_a_failed_save_is_reported_once_training_goes_on_without_it(saving: SavingJob) -> None:
    saving.fail(0, location="/data/20.pt", where="train.py:40 in save")
    saving.train(1)
    assert saving.said == []
    saving.train(1)
    (finding,) = saving.said
    assert (finding.severity, finding.ranks, finding.onset_step, finding.cause) == (Severity.WARNING, (0,), 20, "disk")
    assert finding.summary == (
        "Rank 0 could not save its checkpoint to /data/20.pt in step 20: OSError: [Errno 28] No space left on device; "
        "the newest complete one is of step 10, so 10 steps are at risk."
    )
    reported = {"rank": 0, "step": 20, "path": "/data/20.pt", "type": "OSError", "where": "train.py:40 in save"}
    assert reported.items() <= finding.evidence.items()
    assert finding.evidence["newest_step"] == 10


def test_a_save_at_the_second_try_within_the_same_step_has_lost_nothing(saving: SavingJob) -> None:
    saving.fail(0)
    saving.fail(0)
    saving.save(0)
    saving.fail(0, "restore", ordered=True)  # which is none of a save
    saving.train(200)
    assert saving.said == []


def test_a_rank_that_tries_for_minutes_without_a_step_is_reported(saving: SavingJob) -> None:
    saving.fail(0)
    saving.stand(119)
    assert saving.said == []
    saving.stand(1)
    assert saving.changes == [Change.OPEN]


def test_a_later_good_save_of_each_rank_that_failed_ends_it(saving: SavingJob) -> None:
    saving.fail(1)
    saving.fail(2)
    saving.train(2)
    saving.fail(1)
    saving.train(50)
    saving.save(0)
    saving.save(1)
    assert saving.changes == [Change.OPEN]
    assert saving.said[0].ranks == (1, 2)
    saving.save(2)
    assert (saving.changes[-1], saving.said[-1].summary) == (Change.CLOSE, "A checkpoint of step 72 was saved.")


@pytest.mark.parametrize("registers", [True, False])
def test_a_save_that_succeeds_ends_it_whether_or_not_the_script_registers_it(saving, registers):
    saving.fail(0)
    saving.hear("checkpoint_succeeded", 0, what="save", tier="")
    saving.train(5)
    assert saving.said == []
    saving.fail(0)
    saving.train(5)
    saving.hear("checkpoint_succeeded", 0, what="restore", tier="")
    saving.hear("checkpoint_succeeded", 0, what="save", tier="memory")
    assert saving.changes == [Change.OPEN]
    if registers:
        saving.save(0)
    else:
        saving.hear("checkpoint_succeeded", 0, what="save", tier="")
    assert saving.changes == [Change.OPEN, Change.CLOSE]


def test_a_rank_that_fails_later_joins(saving: SavingJob) -> None:
    saving.fail(1)
    saving.train(10)
    saving.fail(3)
    saving.train(10)
    assert saving.changes == [Change.OPEN, Change.UPDATE]
    assert saving.said[-1].ranks == (1, 3)
    assert "and so did 1 other:" in saving.said[-1].summary


def test_the_disk_that_agents_report_after_it_is_its_cause(saving: SavingJob) -> None:
    saving.fail(0, type="RuntimeError", message="unexpected pos 128 vs 22")
    saving.train(2)
    disk = {"path": "/data/10.pt", "free_bytes": 5, "total_bytes": 1_000, "save_bytes": 100}
    saving.hear("checkpoint_disk", **disk)
    saving.hear("checkpoint_disk", **disk)
    assert saving.changes == [Change.OPEN, Change.UPDATE]
    assert [finding.cause for finding in saving.said] == ["", "disk"]
    assert saving.said[-1].evidence["disk"] == {"host": "node-1", **disk}
    assert saving.said[-1].summary.endswith(
        "The path of the save is not known; the file system of the last save, /data/10.pt on node-1, is full: "
        "0.0 of 1.0 kB are free."
    )


IS_FULL = "The file system of /data/20.pt on node-1 is full"
HAS_ROOM = "The file system of /data/20.pt on node-1 has room"
UNKNOWN = "The path of the save is not known; the file system of the last save, /data/20.pt on node-1, has room"


@pytest.mark.parametrize(
    ("location", "free_gb", "total_gb", "said"),
    [
        ("/data/20.pt", 0, 0.003145728, f"{IS_FULL}: 0.0 of 3.1 MB are free."),
        ("/data/20.pt", 71.1, 270.6, f"{HAS_ROOM}: 71.1 of 270.6 GB are free."),
        ("/data/20.pt", 5_000, 9_000, f"{HAS_ROOM}: 5.0 of 9.0 TB are free."),
        ("", 5, 10, f"{UNKNOWN}: 5.0 of 10.0 GB are free."),
    ],
)
def test_the_disk_of_a_save_is_reported_in_units_that_fit(saving, location, free_gb, total_gb, said):
    disk = {"free_bytes": int(free_gb * 1e9), "total_bytes": int(total_gb * 1e9), "save_bytes": 100}
    saving.hear("checkpoint_disk", path="/data/20.pt", **disk)
    saving.fail(0, type="RuntimeError", message="unexpected pos 128 vs 22", errno=0, location=location)
    saving.train(2)
    assert saving.said[-1].summary.endswith(said)


def test_an_exception_that_ends_the_process_is_reported_with_it(saving: SavingJob) -> None:
    saving.fail(2)
    saving.hear("exception", 2, **NO_ROOM, code=1)
    assert saving.changes == [Change.OPEN]


@pytest.mark.parametrize(
    "ends",
    [
        pytest.param([("process_exit", 0, {"signal": 15})], id="itself"),
        pytest.param([("process_exit", 3, {"signal": 15}), ("process_exit", 0, {"code": 143})], id="after another"),
        pytest.param([("exception", 0, {"type": "KeyboardInterrupt"})], id="Ctrl-C"),
    ],
)
def test_a_save_that_fails_while_the_job_ends_on_request_is_none(saving: SavingJob, ends: list[Any]) -> None:
    saving.fail(0)
    for kind, rank, fields in ends:
        saving.hear(kind, rank, **fields)
    saving.stand(300)
    saving.begin("next.0")
    saving.train(20)
    assert saving.said == []


def test_the_save_of_a_rank_whose_peer_was_killed_has_not_failed_by_itself(saving: SavingJob) -> None:
    saving.fail(0, **BROKEN)
    saving.hear("process_exit", 3, signal=9)
    saving.hear("exception", 0, **BROKEN, code=1)
    saving.stand(300)
    assert saving.said == []


def test_a_folder_with_the_name_of_a_network_is_no_lost_peer(saving: SavingJob) -> None:
    saving.fail(0, type="RuntimeError", message="Parent directory /mnt/store/nccl does not exist.")
    saving.hear("exception", 0, type="RuntimeError", message="Parent directory", code=1)
    assert saving.changes == [Change.OPEN]


def test_it_outlasts_the_attempt_and_the_launch_until_any_rank_saves(saving: SavingJob) -> None:
    saving.fail(3)
    saving.train(2)
    saving.begin("next.0", ranks=2)
    saving.detector.restore(json.loads(json.dumps(saving.detector.snapshot())))
    saving.save(0, tier="memory")
    assert saving.changes == [Change.OPEN]
    saving.save(0)
    assert saving.changes == [Change.OPEN, Change.CLOSE]


def test_saves_to_disk_that_fail_take_the_place_of_captures_that_do(saving: SavingJob) -> None:
    saving.fail(1, tier="memory", type="MemoryError", message="")
    saving.train(2)
    saving.fail(1, location="/data/22.pt")
    saving.train(2)
    assert (saving.said[-1].cause, saving.said[-1].evidence["path"]) == ("disk", "/data/22.pt")
    assert saving.said[-1].summary.startswith("Rank 1 could not save its checkpoint to /data/22.pt in step 22: OSError")
    saving.save(1, tier="memory")
    saving.fail(2, tier="memory", type="MemoryError", message="")
    saving.train(2)
    saving.save(1)
    assert saving.changes == [Change.OPEN, *[Change.UPDATE] * 3]
    assert (saving.said[-1].ranks, saving.said[-1].evidence["type"]) == ((2,), "MemoryError")
    saving.save(2, tier="memory")
    assert saving.changes[-1] == Change.CLOSE


def test_what_an_earlier_launch_could_not_save_any_rank_of_the_next_one_makes_good(saving: SavingJob) -> None:
    saving.fail(3)
    saving.fail(2, tier="memory")
    saving.begin("next.0", ranks=2)
    saving.save(0)
    saving.train(20)
    saving.observe(Occurrence("checkpoint_failed", ATTEMPT, "node-1", saving.now_s, 3, 20, {"what": "save", **NO_ROOM}))
    saving.train(20)
    assert [finding.evidence["tier"] for finding in saving.said] == []


def test_each_of_a_thousand_ranks_on_a_full_disk_counts_until_it_has_saved() -> None:
    job = SavingJob()
    job.begin("wide.0", ranks=1024)
    for rank in range(1024):
        job.fail(rank, location=f"/data/{rank}.pt")
    job.stand(200)
    (finding,) = job.said
    assert ", and so did 1023 others: OSError" in finding.summary
    assert finding.ranks == tuple(range(64))
    job.save(*range(1023))
    assert job.changes == [Change.OPEN]
    job.fail(1022)
    job.stand(200)
    assert (job.said[-1].ranks, job.said[-1].evidence["path"]) == ((1023, 1022), "")
    job.save(1022, 1023)
    assert job.changes[-1] == Change.CLOSE


def test_ranks_that_end_together_after_a_failed_save_are_reported_together(saving: SavingJob) -> None:
    for rank in range(4):
        saving.fail(rank)
    for rank in range(4):
        saving.hear("exception", rank, **NO_ROOM, code=1)
    saving.stand(2)
    assert [finding.ranks for finding in saving.said] == [(0,), (0, 1, 2, 3)]


def test_an_error_without_a_word_is_left_out(saving: SavingJob) -> None:
    saving.fail(0, type="", message="")
    saving.train(2)
    assert saving.said[0].summary == (
        "Rank 0 could not save its checkpoint in step 20; the newest complete one is of step 10, "
        "so 10 steps are at risk."
    )


def test_at_their_own_pace_the_steps_of_others_do_not_say_that_a_rank_went_on(saving: SavingJob) -> None:
    saving.begin("apart.0", lockstep=False)
    saving.fail(3, step=0)
    saving.train(100)
    assert saving.said == []
    saving.train(20)
    assert saving.changes == [Change.OPEN]


def test_a_person_who_resolves_it_hears_of_the_next_failure(saving: SavingJob) -> None:
    saving.fail(0)
    saving.train(2)
    saving.hear("accepted", kinds=["checkpoint_failed"])
    saving.train(5)
    saving.fail(0)
    saving.train(2)
    assert saving.changes == [Change.OPEN, Change.CLOSE, Change.OPEN]


def test_a_part_that_never_comes_is_reported_and_comes_with_the_next_save() -> None:
    job = SavingJob()
    job.save(0, 1, 2, 3, step=0, checkpoint="local:run.0:0")
    job.train(100)
    job.save(0, 1, 3, step=100, checkpoint="local:run.0:100")
    job.train(299)
    assert job.said == []
    job.train(1)
    (finding,) = job.said
    assert (finding.ranks, finding.onset_step, finding.evidence["newest_step"]) == ((2,), 100, 0)
    assert finding.summary.startswith("Rank 2 did not save its part of the checkpoint of step 100, although the others")
    job.save(0, 1, 2, 3, step=400, checkpoint="local:run.0:400")
    job.train(400)
    assert job.changes == [Change.OPEN, Change.CLOSE]


def test_whose_parts_belong_to_a_save_is_learned_for_each_tier() -> None:
    job = SavingJob()
    for step in (0, 100):
        job.save(0, 1, 2, 3, step=step, checkpoint=f"local:run.0:{step}")
        job.save(0, step=step, tier="remote", checkpoint=f"remote:run.0:{step}")
        job.train(500)
    assert job.said == []


def test_the_newest_save_is_one_of_which_as_many_parts_are_there_as_it_says() -> None:
    job = SavingJob()
    job.save(0, 1, 2, 3, step=0, shards=4)
    job.train(100)
    job.save(0, 1, step=100, shards=4)
    job.fail(2)
    job.train(2)
    assert job.said[0].evidence["newest_step"] == 0


class CountedRank(int):
    """A rank that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        CountedRank.compared += 1
        return int(self) == other

    def __lt__(self, other: int) -> bool:
        CountedRank.compared += 1
        return int(self) < int(other)

    __hash__ = int.__hash__


def test_a_part_costs_the_same_however_many_ranks_have_saved_theirs() -> None:
    parts, ranks = SaveParts(SavePartsConfig()), 500
    for step in (5, 6):
        for rank in map(CountedRank, range(ranks - (step == 6))):
            parts.add(Occurrence("checkpoint_saved", ATTEMPT, "", step, rank, step, {"tier": "local"}), step)
    assert CountedRank.compared <= 2 * ranks
    assert (parts.missing(400.0), parts.missing(400.0)) == ([], [ranks - 1])


@pytest.mark.parametrize("reason", ["late", "another launch", "a rank has ended", "one saves for all"])
def test_a_part_that_is_not_missing(reason: str) -> None:
    job = SavingJob()
    job.save(0, 1, 2, 3, step=0)
    job.train(100)
    job.save(0, step=100, shards=int(reason == "one saves for all"))
    job.train(200)
    if reason == "late":
        job.save(1, 2, 3, step=100)
    elif reason == "another launch":
        job.begin("next.0")
        job.save(0, 1, step=200)
    elif reason == "a rank has ended":
        job.hear("process_exit", 3, signal=9)
    job.train(1000)
    assert job.said == []


def test_parts_that_usually_come_minutes_apart_are_awaited_for_longer() -> None:
    job = SavingJob()
    job.save(0, step=0)
    job.train(200)
    job.save(1, step=0)
    job.train(10)
    job.save(0, step=210)
    job.train(599)
    assert job.said == []
    job.train(1)
    assert job.changes == [Change.OPEN]


@pytest.fixture
def loading() -> SavingJob:
    job = SavingJob(RestoreFailedDetector(RestoreFailedConfig()))
    job.train(20)
    return job


def test_a_rollback_that_fails_on_a_rank_is_critical_until_a_step_is_trained_in_any_attempt(loading: SavingJob) -> None:
    loading.fail(1, "restore", checkpoint="local:run.0:12", location="/data/12", ordered=True)
    (finding,) = loading.said
    assert (finding.severity, finding.ranks, finding.onset_step) == (Severity.CRITICAL, (1,), 12)
    assert finding.summary == (
        "Rank 1 could not load checkpoint local:run.0:12 from /data/12: RuntimeError: PytorchStreamReader failed "
        "reading zip archive. The job stands still."
    )
    loading.hear("exception", 1, type="SystemExit", code=75)
    loading.stand(100)
    loading.begin("next.0")
    loading.detector.restore(json.loads(json.dumps(loading.detector.snapshot())))
    loading.stand(100)
    assert loading.changes == [Change.OPEN]
    loading.train(1)
    assert loading.changes == [Change.OPEN, Change.CLOSE]


def test_a_resume_that_fails_in_launch_after_launch_is_one_episode(loading: SavingJob) -> None:
    for launch in ("second.0", "third.0"):
        loading.begin(launch)
        loading.fail(0, "restore", location="/data/12")
        loading.hear("exception", 0, **UNREADABLE, code=1)
        loading.stand(30)
    assert loading.changes == [Change.OPEN]


@pytest.mark.parametrize(
    ("what", "then", "fields"),
    [
        pytest.param("restore", "", {}, id="it trains"),
        pytest.param("restore", "checkpoint_loaded", {}, id="it loads another"),
        pytest.param("restore", "checkpoint_succeeded", {"what": "restore", "tier": ""}, id="it loads its own"),
        pytest.param("restore", "process_exit", {"signal": 15}, id="it is asked to end"),
        pytest.param("save", "exception", {"code": 1}, id="it was a save"),
    ],
)
def test_a_restore_that_fails_and_does_not_keep_the_job_from_training_is_none(loading, what, then, fields):
    loading.begin("second.0")
    loading.fail(0, what)
    if then:
        loading.hear(then, 0, **fields)
    else:
        loading.train(1)
    loading.stand(4000)
    assert loading.said == []


def test_the_steps_of_other_ranks_do_not_end_it(loading: SavingJob) -> None:
    loading.fail(3, "restore", ordered=True)
    row = frame(30, {"step_time_s": [1.0] * 4}, time_s=loading.now_s)
    row.present["step_time_s"][3] = False
    loading.said += loading.detector.observe(row)
    assert loading.changes == [Change.OPEN]
    loading.begin("second.0", ranks=3)
    loading.said += loading.detector.observe(frame(12, {"step_time_s": [1.0] * 3}, attempt="second.0"))
    assert loading.changes == [Change.OPEN, Change.CLOSE]


@pytest.mark.parametrize(("step", "limit_s"), [(-1, 1800), (19, 900)])
def test_a_rank_that_neither_trains_nor_ends_is_reported_when_it_would_hang(loading, step, limit_s):
    loading.begin("second.0")
    loading.fail(2, "restore", step=step)
    loading.stand(limit_s - 1)
    assert loading.said == []
    loading.stand(1)
    assert loading.changes == [Change.OPEN]


ABSENT = {"type": "FileNotFoundError", "message": "[Errno 2] No such file: 'latest.pt'", "errno": errno.ENOENT}


def test_a_script_that_finds_nothing_to_load_and_begins_anew_disturbs_nobody(loading: SavingJob) -> None:
    loading.begin("second.0")
    for rank in range(4):
        loading.fail(rank, "restore", step=-1, **ABSENT)
    loading.stand(4000)
    loading.hear("exception", 0, type="OutOfMemoryError", message="CUDA out of memory", code=1)
    loading.hear("process_exit", 0, code=1)
    loading.stand(100)
    assert loading.said == []


@pytest.mark.parametrize("ordered", [False, True])
def test_what_is_not_there_is_reported_if_the_script_ends_because_of_it_or_at_once_if_it_was_ordered(loading, ordered):
    loading.begin("second.0")
    loading.fail(0, "restore", step=-1, ordered=ordered, **ABSENT)
    if not ordered:
        loading.hear("exception", 0, **ABSENT, code=1)
    assert loading.changes == [Change.OPEN]


def test_ranks_at_their_own_pace_end_it_one_by_one_with_rows_that_come_late(loading: SavingJob) -> None:
    loading.begin("apart.0", lockstep=False)
    for rank in (2, 3):
        loading.fail(rank, "restore", step=5, ordered=True)
    loading.stand(2)
    assert loading.said[-1].summary.endswith("reading zip archive.")
    loading.row(2, 6)
    loading.row(3, 5)
    loading.detector.restore(json.loads(json.dumps(loading.detector.snapshot())))
    assert Change.CLOSE not in loading.changes
    loading.row(3, 6)
    assert loading.changes[-1] == Change.CLOSE


def test_of_ranks_that_fail_because_of_another_that_one_is_named_first(loading: SavingJob) -> None:
    loading.fail(0, "restore", **BROKEN, ordered=True)
    assert loading.said == []
    loading.fail(3, "restore", ordered=True)
    loading.stand(70)
    assert [finding.ranks for finding in loading.said] == [(3,), (3, 0)]


def test_a_restore_that_a_killed_rank_breaks_off_is_none(loading: SavingJob) -> None:
    loading.fail(0, "restore", **BROKEN, ordered=True)
    loading.hear("process_exit", 3, signal=9)
    loading.stand(300)
    assert loading.said == []


STEP_S = 2.0


def job(steps: int, saves: Iterable[int], tier: str = "local", step_s: float = STEP_S) -> list[Observation]:
    """Training that saves before these steps."""
    observations: list[Observation] = [AttemptStart(ATTEMPT, topology(2), 0.0)]
    due = set(saves)
    for step in range(steps):
        if step in due:
            fields = {"tier": tier}
            observations.append(Occurrence("checkpoint_saved", ATTEMPT, "node-1", step * step_s, 0, step, fields))
        observations.append(frame(step, {"step_time_s": [step_s] * 2}, time_s=step * step_s))
    return observations


def disk(host: str = "node-1", **fields: Any) -> Occurrence:
    """What an agent reports of the disk of the saves, before step 1,200."""
    return Occurrence("checkpoint_disk", ATTEMPT, host, 2400.0, None, None, fields)


def found(observations: list[Observation]) -> list[Finding]:
    return evaluate(observations, [CheckpointOverdueDetector(CheckpointOverdueConfig())])


def test_a_job_that_has_stopped_saving_is_reported_after_three_of_its_gaps() -> None:
    (first,) = found(job(2000, range(200, 1001, 200)))
    assert (first.severity, first.onset_step, first.detected_step) == (Severity.WARNING, 1200, 1600)
    assert first.evidence["steps_since"] == 600
    assert first.summary.startswith("No checkpoint was saved since step 1000, for 600 steps (20 min); usually")


@pytest.mark.parametrize(
    ("free", "save", "cause"), [(50_000, 60_000, "disk"), (70_000, 60_000, ""), (900, 0, "disk"), (50_000, 0, "")]
)
def test_the_disk_of_the_saves_is_named_and_is_the_cause_if_another_save_does_not_fit(free, save, cause):
    observations = job(2000, range(200, 1001, 200))
    fields = {"path": "/data/step-1000.pt", "free_bytes": free, "total_bytes": 1_000_000, "save_bytes": save}
    observations.insert(1200, disk(**fields))
    (finding,) = found(observations)
    assert finding.cause == cause
    assert finding.evidence["disk"] == {"host": "node-1", **fields}
    assert "/data/step-1000.pt on node-1" in finding.summary


def test_what_an_agent_reports_of_a_disk_and_cannot_be_read_says_nothing() -> None:
    observations = job(2000, range(200, 1001, 200))
    observations[1200:1200] = [
        disk(),
        disk(free_bytes="no", total_bytes=None, save_bytes=3),
        disk(free_bytes=-1, total_bytes=2, save_bytes=3),
    ]
    (finding,) = found(observations)
    assert finding.summary.endswith("(6 min 40 s).")


def test_a_full_disk_counts_until_its_own_host_reports_another() -> None:
    fields = {"path": "/local/1000", "total_bytes": 1_000_000, "save_bytes": 5_000}
    reports = [disk("node-7", free_bytes=10, **fields), disk("node-1", free_bytes=900_000, **fields)]
    for more, cause, host in (([], "disk", "node-7"), ([disk("node-7", free_bytes=800_000, **fields)], "", "node-7")):
        observations = job(2000, range(200, 1001, 200))
        observations[1200:1200] = [*reports, *more]
        (finding,) = found(observations)
        assert (finding.cause, finding.evidence["disk"]["host"]) == (cause, host)


def test_the_next_save_ends_it_and_is_learned() -> None:
    findings = found(job(5000, [*range(200, 1001, 200), 1800, 2600, 3400, 4200]))
    assert [end.detected_step for end in closed(findings)] == [1800]
    assert len(opened(findings)) == 1


@pytest.mark.parametrize(
    "observations",
    [
        pytest.param(job(3000, range(200, 3000, 200)), id="saves as usual"),
        pytest.param(job(3000, [100, 300, 350, 900, 1500, 2000]), id="irregular saves"),
        pytest.param(job(3000, [200, 400, 600]), id="too few saves"),
        pytest.param(job(3000, range(200, 1001, 200), tier="memory"), id="captures in memory"),
        pytest.param(job(3000, range(200, 1001, 200), step_s=0.1), id="minutes of training"),
    ],
)
def test_no_reason(observations: list[Observation]) -> None:
    assert found(observations) == []


def test_a_person_who_resolves_it_lets_the_job_be_learned_anew() -> None:
    observations = job(1700, range(200, 1001, 200))
    observations.append(Occurrence("accepted", ATTEMPT, "", 3400.0, None, None, {"kinds": ["checkpoint_overdue"]}))
    rows = [frame(step, {"step_time_s": [STEP_S] * 2}, time_s=step * STEP_S) for step in range(1700, 4000)]
    findings = found([*observations, *rows])
    assert (len(opened(findings)), len(closed(findings))) == (1, 1)


def test_what_was_learned_holds_for_the_next_launch_and_its_first_save_is_awaited_as_long() -> None:
    observations = job(900, range(200, 900, 200))
    observations.append(AttemptStart("m.0", topology(2), 2000.0))
    for step in range(800, 1800):
        row = frame(step, {"step_time_s": [STEP_S] * 2}, time_s=2000.0 + (step - 800) * STEP_S)
        observations.append(dataclasses.replace(row, attempt="m.0"))
    (finding,) = opened(found(observations))
    assert (finding.attempt, finding.detected_step) == ("m.0", 1400)
    assert "in this attempt" in finding.summary
