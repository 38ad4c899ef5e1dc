"""A job that has stopped saving: when that is reported, and what is no reason to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest

from rankwatch_detectors.base import AttemptStart, Finding, Observation, Occurrence, Severity
from rankwatch_detectors.progress.checkpoint_overdue import CheckpointOverdueConfig, CheckpointOverdueDetector
from tests.support.detection.verdicts import closed, judge, opened
from tests.support.values.presences import ATTEMPT, frame, topology

STEP_S = 2.0


def saved(step: int, time_s: float, tier: str = "local", attempt: str = ATTEMPT) -> Occurrence:
    return Occurrence("checkpoint_saved", attempt, "node-1", time_s, 0, step, {"tier": tier})


def job(steps: int, saves: Iterable[int], tier: str = "local", step_s: float = STEP_S) -> list[Observation]:
    """Training that saves before these steps."""
    observations: list[Observation] = [AttemptStart(ATTEMPT, topology(2), 0.0)]
    due = set(saves)
    for step in range(steps):
        if step in due:
            observations.append(saved(step, step * step_s, tier))
        observations.append(frame(step, {"step_time_s": [step_s] * 2}, time_s=step * step_s))
    return observations


def found(observations: list[Observation]) -> list[Finding]:
    return judge(observations, [CheckpointOverdueDetector(CheckpointOverdueConfig())])


def test_a_job_that_has_stopped_saving_is_reported_after_three_of_its_gaps() -> None:
    (first,) = found(job(2000, range(200, 1001, 200)))
    assert (first.severity, first.onset_step, first.detected_step) == (Severity.WARNING, 1200, 1600)
    assert first.evidence["steps_since"] == 600
    assert first.summary.startswith("No checkpoint was saved since step 1000, for 600 steps (20 min); usually")


@pytest.mark.parametrize(
    ("free", "save", "cause"), [(50_000, 60_000, "disk"), (70_000, 60_000, ""), (900, 0, "disk"), (50_000, 0, "")]
)
def test_the_disk_of_the_saves_is_named_and_is_the_cause_if_another_save_does_not_fit(
    free: int, save: int, cause: str
) -> None:
    observations = job(2000, range(200, 1001, 200))
    fields = {"path": "/data/step-1000.pt", "free_bytes": free, "total_bytes": 1_000_000, "save_bytes": save}
    observations.insert(1200, Occurrence("checkpoint_disk", ATTEMPT, "node-1", 2400.0, None, None, fields))
    (finding,) = found(observations)
    assert finding.cause == cause
    assert finding.evidence["disk"] == {"host": "node-1", **fields}
    assert "/data/step-1000.pt on node-1" in finding.summary


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"free_bytes": "no", "total_bytes": None, "save_bytes": 3},
        {"free_bytes": -1, "total_bytes": 2, "save_bytes": 3},
    ],
)
def test_what_an_agent_reports_of_a_disk_and_cannot_be_read_says_nothing(fields: dict[str, Any]) -> None:
    observations = job(2000, range(200, 1001, 200))
    observations.insert(1200, Occurrence("checkpoint_disk", ATTEMPT, "node-1", 2400.0, None, None, fields))
    (finding,) = found(observations)
    assert finding.summary.endswith("min).")


def test_a_full_disk_counts_until_its_own_host_reports_another() -> None:
    observations = job(2000, range(200, 1001, 200))
    for place, (host, free) in enumerate([("node-7", 10), ("node-1", 900_000)]):
        fields = {"path": "/local/1000", "free_bytes": free, "total_bytes": 1_000_000, "save_bytes": 5_000}
        told = Occurrence("checkpoint_disk", ATTEMPT, host, 2400.0, None, None, {**fields, "host": "another"})
        observations.insert(1200 + place, told)
    (finding,) = found(observations)
    assert (finding.cause, finding.evidence["disk"]["host"]) == ("disk", "node-7")
    room = Occurrence("checkpoint_disk", ATTEMPT, "node-7", 2400.0, None, None, {**fields, "free_bytes": 800_000})
    (finding,) = found([*observations[:1202], room, *observations[1202:]])
    assert finding.cause == ""


def test_the_next_save_ends_it_and_is_learned() -> None:
    findings = found(job(5000, [*range(200, 1001, 200), 1800, 2600, 3400, 4200]))
    (end,) = closed(findings)
    assert end.detected_step == 1800
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
