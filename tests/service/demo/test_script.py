from dataclasses import replace
from typing import Any

import pytest

from rankwatch_service.demo.rank_files import Injected
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
    ("played", "told"),
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
def test_a_scene_fails_by_the_one_thing_that_went_wrong(played: SceneResult, told: str) -> None:
    (what,) = wrong(checks(played))
    assert told in what


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
