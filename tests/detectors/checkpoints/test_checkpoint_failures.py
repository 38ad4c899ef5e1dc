"""Saves and restores that fail: what is reported, when it is over, and what is no reason to."""

from __future__ import annotations

import errno
import json
from typing import Any

import pytest

from rankwatch_detectors.base import AttemptStart, Change, Finding, Observation, Occurrence, Severity, Tick
from rankwatch_detectors.dispatch import DispatchingDetector
from rankwatch_detectors.progress.checkpoint_failed import CheckpointFailedConfig, CheckpointFailedDetector
from rankwatch_detectors.progress.restore_failed import RestoreFailedConfig, RestoreFailedDetector
from tests.support.values.presences import ATTEMPT, frame, topology

NO_ROOM = {"type": "OSError", "message": "[Errno 28] No space left on device", "errno": errno.ENOSPC}
BROKEN = {"type": "RuntimeError", "message": "Connection closed by peer [::1]:4242"}
UNREADABLE = {"type": "RuntimeError", "message": "PytorchStreamReader failed reading zip archive"}


class Training:
    """A job of four ranks at a step a second, whose detector is asked after each event and each second."""

    def __init__(self, detector: DispatchingDetector) -> None:
        self.detector = detector
        self.attempt = ATTEMPT
        self.now_s = 0.0
        self.step = 0
        self.said: list[Finding] = []
        self.begin(ATTEMPT)

    def begin(self, attempt: str, ranks: int = 4) -> None:
        self.attempt = attempt
        self._observe(AttemptStart(attempt, topology(ranks), self.now_s))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self._observe(frame(self.step, {"step_time_s": [1.0] * 4}, attempt=self.attempt, time_s=self.now_s))
            self.step += 1
            self.stand(1)

    def stand(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_s += 1.0
            self._observe(Tick(self.now_s, None))

    def hear(self, kind: str, rank: int | None = None, step: int | None = None, **fields: Any) -> None:
        step = self.step if step is None else step
        self._observe(Occurrence(kind, self.attempt, "node-1", self.now_s, rank, step, fields))

    def fail(self, rank: int = 0, what: str = "save", **fields: Any) -> None:
        error = {} if "type" in fields else NO_ROOM if what == "save" else UNREADABLE
        # A step saves within itself; what is loaded, is loaded between two steps.
        self.hear("checkpoint_failed", rank, self.step - (what == "restore"), what=what, **error, **fields)

    def save(self, *ranks: int, step: int | None = None, **fields: Any) -> None:
        for rank in ranks or (0,):
            self.hear("checkpoint_saved", rank, step, **{"tier": "local", "shards": 0, **fields})

    def _observe(self, observation: Observation) -> None:
        self.said += self.detector.observe(observation)

    @property
    def changes(self) -> list[Change]:
        return [finding.change for finding in self.said]


@pytest.fixture
def saving() -> Training:
    job = Training(CheckpointFailedDetector(CheckpointFailedConfig()))
    job.train(10)
    job.save(0, shards=1)
    job.train(10)
    return job


def test_a_failed_save_is_reported_once_training_goes_on_without_it(saving: Training) -> None:
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


def test_a_save_at_the_second_try_within_the_same_step_has_lost_nothing(saving: Training) -> None:
    saving.fail(0)
    saving.fail(0)
    saving.save(0)
    saving.train(200)
    assert saving.said == []


def test_a_rank_that_tries_for_minutes_without_a_step_is_reported(saving: Training) -> None:
    saving.fail(0)
    saving.stand(119)
    assert saving.said == []
    saving.stand(1)
    assert saving.changes == [Change.OPEN]


def test_a_later_good_save_of_each_rank_that_failed_ends_it(saving: Training) -> None:
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


def test_a_rank_that_fails_later_joins(saving: Training) -> None:
    saving.fail(1)
    saving.train(10)
    saving.fail(3)
    saving.train(10)
    assert saving.changes == [Change.OPEN, Change.UPDATE]
    assert saving.said[-1].ranks == (1, 3)
    assert "and so did 1 other:" in saving.said[-1].summary


def test_the_disk_that_agents_report_after_it_is_its_cause(saving: Training) -> None:
    saving.fail(0, type="RuntimeError", message="unexpected pos 128 vs 22")
    saving.train(2)
    disk = {"path": "/data/10.pt", "free_bytes": 5, "total_bytes": 1_000, "save_bytes": 100}
    saving.hear("checkpoint_disk", **disk)
    saving.hear("checkpoint_disk", **disk)
    assert saving.changes == [Change.OPEN, Change.UPDATE]
    assert [finding.cause for finding in saving.said] == ["", "disk"]
    assert saving.said[-1].evidence["disk"] == {"host": "node-1", **disk}
    assert "/data/10.pt on node-1 is full" in saving.said[-1].summary


def test_a_disk_with_room_is_evidence_and_no_cause(saving: Training) -> None:
    saving.hear("checkpoint_disk", path="/data/10.pt", free_bytes=500, total_bytes=1_000, save_bytes=100)
    saving.fail(0, type="PermissionError", message="[Errno 13] Permission denied", errno=errno.EACCES)
    saving.train(2)
    (finding,) = saving.said
    assert (finding.cause, finding.evidence["disk"]["free_bytes"]) == ("", 500)


def test_an_exception_that_ends_the_process_is_reported_with_it(saving: Training) -> None:
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
def test_a_save_that_fails_while_the_job_ends_on_request_is_none(saving: Training, ends: list[Any]) -> None:
    saving.fail(0)
    for kind, rank, fields in ends:
        saving.hear(kind, rank, **fields)
    saving.stand(300)
    saving.begin("next.0")
    saving.train(20)
    assert saving.said == []


def test_the_save_of_a_rank_whose_peer_was_killed_has_not_failed_by_itself(saving: Training) -> None:
    saving.fail(0, **BROKEN)
    saving.hear("process_exit", 3, signal=9)
    saving.hear("exception", 0, **BROKEN, code=1)
    saving.stand(300)
    assert saving.said == []


def test_a_folder_with_the_name_of_a_network_is_no_lost_peer(saving: Training) -> None:
    saving.fail(0, type="RuntimeError", message="Parent directory /mnt/store/nccl does not exist.")
    saving.hear("exception", 0, type="RuntimeError", message="Parent directory", code=1)
    assert saving.changes == [Change.OPEN]


def test_it_outlasts_the_attempt_and_the_launch_until_any_rank_saves(saving: Training) -> None:
    saving.fail(3)
    saving.train(2)
    saving.begin("next.0", ranks=2)
    saving.detector.restore(json.loads(json.dumps(saving.detector.snapshot())))
    saving.save(0, tier="memory")
    assert saving.changes == [Change.OPEN]
    saving.save(0)
    assert saving.changes == [Change.OPEN, Change.CLOSE]


def test_captures_that_fail_end_with_a_capture(saving: Training) -> None:
    saving.fail(1, tier="memory", type="MemoryError", message="")
    saving.train(2)
    assert "MemoryError; the newest" in saving.said[0].summary
    saving.save(1)
    assert saving.changes == [Change.OPEN]
    saving.save(1, tier="memory")
    assert saving.changes == [Change.OPEN, Change.CLOSE]


def test_a_person_who_resolves_it_hears_of_the_next_failure(saving: Training) -> None:
    saving.fail(0)
    saving.train(2)
    saving.hear("accepted", kinds=["checkpoint_failed"])
    saving.train(5)
    saving.fail(0)
    saving.train(2)
    assert saving.changes == [Change.OPEN, Change.CLOSE, Change.OPEN]


def test_a_part_that_never_comes_is_reported_and_comes_with_the_next_save() -> None:
    job = Training(CheckpointFailedDetector(CheckpointFailedConfig()))
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


@pytest.mark.parametrize("reason", ["late", "another launch", "a rank has ended", "one saves for all"])
def test_a_part_that_is_not_missing(reason: str) -> None:
    job = Training(CheckpointFailedDetector(CheckpointFailedConfig()))
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
    job = Training(CheckpointFailedDetector(CheckpointFailedConfig()))
    job.save(0, step=0)
    job.train(200)
    job.save(1, step=0)
    job.train(10)
    job.save(0, step=210)
    job.train(599)
    assert job.said == []
    job.train(1)
    assert job.changes == [Change.OPEN]


# ---- restores --------------------------------------------------------------------------------------------------------


@pytest.fixture
def loading() -> Training:
    job = Training(RestoreFailedDetector(RestoreFailedConfig()))
    job.train(20)
    return job


def test_a_rollback_that_fails_on_a_rank_is_critical_until_a_step_is_trained_in_any_attempt(loading: Training) -> None:
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


def test_a_resume_that_fails_in_launch_after_launch_is_one_episode(loading: Training) -> None:
    for launch in ("second.0", "third.0"):
        loading.begin(launch)
        loading.fail(0, "restore", location="/data/12")
        loading.hear("exception", 0, **UNREADABLE, code=1)
        loading.stand(30)
    assert loading.changes == [Change.OPEN]


@pytest.mark.parametrize("then", ["trains", "loads another", "is asked to end"])
def test_a_restore_that_fails_and_does_not_keep_the_job_from_training_is_none(loading: Training, then: str) -> None:
    loading.begin("second.0")
    loading.fail(0, "restore")
    if then == "trains":
        loading.train(1)
    elif then == "loads another":
        loading.hear("checkpoint_loaded", 0)
    else:
        loading.hear("process_exit", 0, signal=15)
    loading.stand(300)
    assert loading.said == []


def test_the_steps_of_other_ranks_do_not_end_it(loading: Training) -> None:
    loading.fail(3, "restore", ordered=True)
    row = frame(30, {"step_time_s": [1.0] * 4}, time_s=loading.now_s)
    row.present["step_time_s"][3] = False
    loading.said += loading.detector.observe(row)
    assert loading.changes == [Change.OPEN]
    loading.begin("second.0", ranks=3)
    loading.said += loading.detector.observe(frame(12, {"step_time_s": [1.0] * 3}, attempt="second.0"))
    assert loading.changes == [Change.OPEN, Change.CLOSE]


def test_a_rank_that_neither_trains_nor_ends_after_it_is_reported_after_a_minute(loading: Training) -> None:
    loading.begin("second.0")
    loading.fail(2, "restore")
    loading.stand(59)
    assert loading.said == []
    loading.stand(1)
    assert loading.changes == [Change.OPEN]


def test_of_ranks_that_fail_because_of_another_that_one_is_named_first(loading: Training) -> None:
    loading.fail(0, "restore", **BROKEN, ordered=True)
    assert loading.said == []
    loading.fail(3, "restore", ordered=True)
    loading.stand(70)
    assert [finding.ranks for finding in loading.said] == [(3,), (3, 0)]


def test_a_restore_that_a_killed_rank_breaks_off_is_none(loading: Training) -> None:
    loading.fail(0, "restore", **BROKEN, ordered=True)
    loading.hear("process_exit", 3, signal=9)
    loading.stand(300)
    assert loading.said == []


def test_each_detector_hears_of_its_own_failures_alone(saving: Training, loading: Training) -> None:
    saving.fail(0, "restore", ordered=True)
    loading.fail(0, "save")
    saving.train(100)
    loading.train(100)
    assert (saving.said, loading.said) == ([], [])
