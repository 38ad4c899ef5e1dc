"""Saves that fail: what is reported, when it is over, and what is no reason to."""

from __future__ import annotations

import errno
import json
from typing import Any

import pytest

from rankwatch_detectors.base import Change, Occurrence, Severity
from rankwatch_detectors.progress.checkpoint_failed import (
    CheckpointFailedConfig,
    CheckpointFailedDetector,
    SaveParts,
    SavePartsConfig,
)
from tests.support.detection.failing_saves import BROKEN, NO_ROOM, SavingJob
from tests.support.values.presences import ATTEMPT


@pytest.fixture
def saving() -> SavingJob:
    job = SavingJob(CheckpointFailedDetector(CheckpointFailedConfig()))
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
        "Rank 0 could not save its checkpoint of /data/20.pt in step 20: OSError: [Errno 28] No space left on device; "
        "the newest one is of step 10."
    )
    told = {"rank": 0, "step": 20, "path": "/data/20.pt", "type": "OSError", "where": "train.py:40 in save"}
    assert told.items() <= finding.evidence.items()
    assert finding.evidence["newest_step"] == 10


def test_a_save_at_the_second_try_within_the_same_step_has_lost_nothing(saving: SavingJob) -> None:
    saving.fail(0)
    saving.fail(0)
    saving.save(0)
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
def test_a_save_that_succeeds_ends_it_whether_or_not_the_script_registers_it(
    saving: SavingJob, registers: bool
) -> None:
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


@pytest.mark.parametrize(
    ("free", "total", "said"),
    [
        (0, 3_145_728, "is full: 0.0 of 3.1 MB are free"),
        (71_100_000_000, 270_600_000_000, "has room: 71.1 of 270.6 GB are free"),
        (5_000_000_000_000, 9_000_000_000_000, "has room: 5.0 of 9.0 TB are free"),
    ],
    ids=["MB", "GB", "TB"],
)
def test_the_disk_of_a_save_with_a_path_is_told_in_units_that_fit(
    saving: SavingJob, free: int, total: int, said: str
) -> None:
    saving.hear("checkpoint_disk", path="/data/20.pt", free_bytes=free, total_bytes=total, save_bytes=100)
    saving.fail(0, location="/data/20.pt")
    saving.train(2)
    assert saving.said[-1].summary.endswith(f"The file system of /data/20.pt on node-1 {said}.")


def test_a_save_without_a_path_is_not_said_to_have_room(saving: SavingJob) -> None:
    saving.hear("checkpoint_disk", path="/data/10.pt", free_bytes=500, total_bytes=1_000, save_bytes=100)
    saving.fail(0, type="RuntimeError", message="unexpected pos 128 vs 22", errno=0)
    saving.train(2)
    assert "The path of the save is not known; the file system of the last save, /data/10.pt" in saving.said[-1].summary


def test_a_disk_with_room_is_evidence_and_no_cause(saving: SavingJob) -> None:
    saving.hear("checkpoint_disk", path="/data/10.pt", free_bytes=500, total_bytes=1_000, save_bytes=100)
    saving.fail(0, type="PermissionError", message="[Errno 13] Permission denied", errno=errno.EACCES)
    saving.train(2)
    (finding,) = saving.said
    assert (finding.cause, finding.evidence["disk"]["free_bytes"]) == ("", 500)


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


def test_captures_that_fail_end_with_a_capture(saving: SavingJob) -> None:
    saving.fail(1, tier="memory", type="MemoryError", message="")
    saving.train(2)
    assert "MemoryError; the newest" in saving.said[0].summary
    saving.save(1)
    assert saving.changes == [Change.OPEN]
    saving.save(1, tier="memory")
    assert saving.changes == [Change.OPEN, Change.CLOSE]


def test_saves_to_disk_that_fail_take_the_place_of_captures_that_do(saving: SavingJob) -> None:
    saving.fail(1, tier="memory", type="MemoryError", message="")
    saving.train(2)
    saving.fail(1, location="/data/22.pt")
    saving.train(2)
    assert (saving.said[-1].cause, saving.said[-1].evidence["path"]) == ("disk", "/data/22.pt")
    assert saving.said[-1].summary.startswith("Rank 1 could not save its checkpoint of /data/22.pt in step 22: OSError")
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


def test_a_failure_of_an_earlier_launch_that_is_told_in_the_next_one_ends_with_the_save_of_any_rank(
    saving: SavingJob,
) -> None:
    saving.fail(3)
    saving.begin("next.0", ranks=2)
    saving.stand(200)
    assert saving.changes == [Change.OPEN]
    saving.save(0)
    assert saving.changes == [Change.OPEN, Change.CLOSE]


def test_each_of_a_thousand_ranks_on_a_full_disk_counts_until_it_has_saved() -> None:
    job = SavingJob(CheckpointFailedDetector(CheckpointFailedConfig()))
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


def test_ranks_that_end_together_after_a_failed_save_are_told_together(saving: SavingJob) -> None:
    for rank in range(4):
        saving.fail(rank)
    for rank in range(4):
        saving.hear("exception", rank, **NO_ROOM, code=1)
    saving.stand(2)
    assert [finding.ranks for finding in saving.said] == [(0,), (0, 1, 2, 3)]


def test_an_error_without_a_word_is_left_out(saving: SavingJob) -> None:
    saving.fail(0, type="", message="")
    saving.train(2)
    assert saving.said[0].summary == "Rank 0 could not save its checkpoint in step 20; the newest one is of step 10."


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
    job = SavingJob(CheckpointFailedDetector(CheckpointFailedConfig()))
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
    job = SavingJob(CheckpointFailedDetector(CheckpointFailedConfig()))
    for step in (0, 100):
        job.save(0, 1, 2, 3, step=step, checkpoint=f"local:run.0:{step}")
        job.save(0, step=step, tier="remote", checkpoint=f"remote:run.0:{step}")
        job.train(500)
    assert job.said == []


def test_the_newest_save_is_one_of_which_as_many_parts_are_there_as_it_says() -> None:
    job = SavingJob(CheckpointFailedDetector(CheckpointFailedConfig()))
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
            parts.take(Occurrence("checkpoint_saved", ATTEMPT, "", step, rank, step, {"tier": "local"}), step)
    assert CountedRank.compared <= 2 * ranks
    assert (parts.missing(400.0), parts.missing(400.0)) == ([], [ranks - 1])


@pytest.mark.parametrize("reason", ["late", "another launch", "a rank has ended", "one saves for all"])
def test_a_part_that_is_not_missing(reason: str) -> None:
    job = SavingJob(CheckpointFailedDetector(CheckpointFailedConfig()))
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
    job = SavingJob(CheckpointFailedDetector(CheckpointFailedConfig()))
    job.save(0, step=0)
    job.train(200)
    job.save(1, step=0)
    job.train(10)
    job.save(0, step=210)
    job.train(599)
    assert job.said == []
    job.train(1)
    assert job.changes == [Change.OPEN]


def test_a_restore_that_fails_is_none(saving: SavingJob) -> None:
    saving.fail(0, "restore", ordered=True)
    saving.train(100)
    assert saving.said == []
