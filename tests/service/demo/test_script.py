from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rankwatch_service.demo.rank_files import Injected, Journal, JournalReader
from rankwatch_service.demo.script import SCENES, SceneCheck, SceneResult, checks, mixed_weights, unexpected, webhooks
from rankwatch_service.demo.service import Received

SLOW, NAN, BIT_FLIP, HANG, KILL = SCENES


def outcome(scene: Any = NAN, **changes: Any) -> SceneResult:
    """A scene in which all went well."""
    incident = {"id": f"inc_{scene.kind}", "kind": scene.kind, "ranks": [scene.rank], "state": "resolved"}
    incident["evidence"] = {"stack": "File faulty_rank.py, line 1 in loop_forever"}
    played = SceneResult(
        scene,
        state="recovered",
        injected=Injected("job-0.1", 200, 0),
        incident=incident,
        found_steps=0,
        found_s=0.5,
        noticed_s=0.6,
        step_time_s=0.1,
        applied_step=210,
        applied_s=0.5,
        recovered_s=9.0,
    )
    return replace(played, **changes)


def wrong(results: list[SceneCheck]) -> list[str]:
    return [check.what for check in results if not check.right]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.kind)
def test_a_scene_in_which_all_went_well_passes(scene: Any) -> None:
    assert wrong(checks(outcome(scene))) == []


@pytest.mark.parametrize(
    ("played", "reported"),
    [
        (SceneResult(NAN, state="no nonfinite incident within 30 s"), "found"),
        (outcome(incident=outcome().incident | {"ranks": [0]}), "rank 1 named"),
        (outcome(incident=outcome().incident | {"ranks": [1, 0]}), "rank 1 named"),
        (outcome(found_steps=1), "found in its step"),
        (outcome(BIT_FLIP, found_steps=11), "found within 10 steps"),
        (outcome(SLOW, found_steps=31), "found within 30 steps"),
        (outcome(SLOW, found_steps=-1), "found within 30 steps"),
        (outcome(HANG, found_s=40.1), "found"),
        (outcome(HANG, incident=outcome(HANG).incident | {"evidence": {}}), "Python stack"),
        (outcome(noticed_s=7.6), "the webhook came"),
        (outcome(KILL, noticed_s=12.6), "the webhook came"),
        (outcome(applied_s=3.1), "rollback applied"),
        (outcome(recovered_s=None), "recovered"),
        (outcome(incident=outcome().incident | {"state": "open"}), "recovered"),
    ],
)
def test_a_scene_fails_by_the_one_thing_that_went_wrong(played: SceneResult, reported: str) -> None:
    (what,) = wrong(checks(played))
    assert reported in what


def test_an_incident_that_no_scene_made_is_reported() -> None:
    other = {"id": "inc_other", "kind": "loss_spike", "scope": "job", "summary": "loss 9"}
    played = outcome()
    (check,) = unexpected([dict(played.incident), other], [played])
    assert not check.right
    assert "loss_spike" in check.measured
    assert unexpected([dict(played.incident)], [played])[0].right


def delivered(played: SceneResult) -> list[Received]:
    incident = played.incident["id"]
    return [
        Received("msg_1", "incident.opened", incident, 1, True, 1),
        Received("msg_2", "incident.resolved", incident, 2, True, 2),
    ]


def test_genuine_webhooks_that_came_once_pass() -> None:
    assert wrong(webhooks(delivered(outcome()), [outcome()])) == []


def test_webhooks_fail_when_forged_doubled_or_missing() -> None:
    opened, resolved = delivered(outcome())
    assert wrong(webhooks([opened, replace(resolved, verified=False)], [outcome()])) == [
        "all webhooks have a valid signature"
    ]
    assert "no webhook was received twice" in wrong(webhooks([opened, opened, resolved], [outcome()]))
    assert wrong(webhooks([opened], [outcome()])) == ["one incident.resolved webhook for each incident"]
    assert len(wrong(webhooks([opened, resolved], []))) == 2


def test_replicas_may_differ_after_the_flipped_bit_of_their_attempt_only() -> None:
    played = [outcome(BIT_FLIP)]
    assert mixed_weights([("job-0.1", 200), ("job-0.1", 207)], played)[0].right
    assert not mixed_weights([("job-0.1", 199)], played)[0].right
    assert not mixed_weights([("job-0.2", 207)], played)[0].right
    assert not mixed_weights([("job-0.1", 207)], [outcome(NAN)])[0].right


class FakeClock:
    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def unix_ns(self) -> int:
        self.now_ns += 100_000_000
        return self.now_ns

    def monotonic_s(self) -> float:
        raise AssertionError("a journal needs the wall clock only")

    def sleep(self, seconds: float) -> None:
        raise AssertionError("a journal never waits")


def test_progress_is_that_of_the_slowest_rank_in_the_newest_attempt(tmp_path: Path) -> None:
    clock = FakeClock()
    journals = JournalReader(tmp_path, world_size=2)
    first, second = (Journal(tmp_path, "job-0", rank, clock) for rank in range(2))
    first.write("job-0.0", 7, 42)
    journals.look()
    assert (journals.attempt, journals.step) == ("job-0.0", -1)
    second.write("job-0.0", 7, 42)
    first.write("job-0.0", 8, 43)
    journals.look()
    assert (journals.attempt, journals.step) == ("job-0.0", 7)
    second.write("job-0.1", 5, 44)
    first.write("job-0.1", 5, 44)
    second.write("job-0.1", 6, 44)
    journals.look()
    assert (journals.attempt, journals.step) == ("job-0.1", 5)


def test_the_tenth_launch_is_newer_than_the_ninth(tmp_path: Path) -> None:
    journals = JournalReader(tmp_path, world_size=1)
    for number in (10, 9):
        Journal(tmp_path, f"job-{number}", 0, FakeClock()).write(f"job-{number}.0", number, 1)
    journals.look()
    assert journals.attempt == "job-10.0"


def test_a_step_ends_when_its_last_rank_ends_it(tmp_path: Path) -> None:
    clock = FakeClock()
    journals = JournalReader(tmp_path, world_size=2)
    ranks = [Journal(tmp_path, "job-0", rank, clock) for rank in range(2)]
    for step in range(3):
        for rank in ranks:
            rank.write("job-0.0", step, step)
    journals.look()
    assert journals.ended_unix_ns("job-0.0", 0) == 1_200_000_000
    assert journals.ended_unix_ns("job-0.0", 3) is None
    assert journals.step_time_s() == 0.2


def test_weights_that_differ_at_one_step_of_one_attempt_are_mixed(tmp_path: Path) -> None:
    journals = JournalReader(tmp_path, world_size=2)
    first, second = (Journal(tmp_path, "job-0", rank, FakeClock()) for rank in range(2))
    for journal in (first, second):
        journal.write("job-0.0", 1, 10)
    first.write("job-0.0", 2, 11)
    second.write("job-0.0", 2, 12)
    first.write("job-0.1", 2, 11)
    journals.look()
    assert journals.mixed() == [("job-0.0", 2)]


def test_a_step_that_one_rank_did_not_make_is_ragged_but_an_attempts_last_one_is_not(tmp_path: Path) -> None:
    journals = JournalReader(tmp_path, world_size=2)
    first, second = (Journal(tmp_path, "job-0", rank, FakeClock()) for rank in range(2))
    for step in (1, 2, 3):
        first.write("job-0.0", step, step)
    for step in (1, 3):
        second.write("job-0.0", step, step)
    journals.look()
    assert journals.ragged() == [("job-0.0", 2)]
    first.write("job-0.0", 4, 4)
    for journal in (first, second):
        journal.write("job-0.1", 2, 2)
    first.write("job-0.1", 3, 3)
    journals.look()
    assert journals.ragged() == [("job-0.0", 2)]
