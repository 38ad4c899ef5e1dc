"""Restores that fail: what is reported, when it is over, and what is no reason to."""

from __future__ import annotations

import errno
import json

import pytest

from rankwatch_detectors.base import Change, Severity
from rankwatch_detectors.progress.restore_failed import RestoreFailedConfig, RestoreFailedDetector
from tests.support.detection.failing_saves import BROKEN, UNREADABLE, SavingJob
from tests.support.values.presences import frame


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


@pytest.mark.parametrize("then", ["trains", "loads another", "loads its own", "is asked to end"])
def test_a_restore_that_fails_and_does_not_keep_the_job_from_training_is_none(loading: SavingJob, then: str) -> None:
    loading.begin("second.0")
    loading.fail(0, "restore")
    if then == "trains":
        loading.train(1)
    elif then == "loads another":
        loading.hear("checkpoint_loaded", 0)
    elif then == "loads its own":
        loading.hear("checkpoint_succeeded", 0, what="restore", tier="")
    else:
        loading.hear("process_exit", 0, signal=15)
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
def test_a_rank_that_neither_trains_nor_ends_is_reported_when_it_would_hang(
    loading: SavingJob, step: int, limit_s: int
) -> None:
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


def test_a_script_that_ends_because_there_is_nothing_to_load_is_reported(loading: SavingJob) -> None:
    loading.begin("second.0")
    loading.fail(0, "restore", step=-1, **ABSENT)
    loading.hear("exception", 0, **ABSENT, code=1)
    assert loading.changes == [Change.OPEN]


def test_a_checkpoint_that_is_gone_when_an_ordered_rollback_loads_it_is_reported_at_once(loading: SavingJob) -> None:
    loading.begin("second.0")
    loading.fail(0, "restore", step=-1, ordered=True, **ABSENT)
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


def test_an_error_without_a_word_is_left_out(loading: SavingJob) -> None:
    loading.fail(0, "restore", type="", message="", ordered=True)
    assert loading.said[0].summary == "Rank 0 could not load the checkpoint. The job stands still."


def test_a_save_that_fails_is_none(loading: SavingJob) -> None:
    loading.fail(0, "save")
    loading.train(100)
    assert loading.said == []
