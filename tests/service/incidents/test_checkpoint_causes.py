"""Saves and restores that fail, and what they bring about: one incident for each cause."""

import pytest

from rankwatch_detectors.base import Change, Finding, Kind
from rankwatch_service.incidents.correlator import PROGRESS_FRAMES, Correlator
from tests.support.values.findings import finding, topology_state

SAVE = finding(Kind.CHECKPOINT_FAILED, ranks=(3,))
RESTORE = finding(Kind.RESTORE_FAILED, ranks=(3,))


@pytest.fixture
def correlator() -> Correlator:
    made = Correlator("gpt")
    made.begin("l.0")
    return made


def judge(correlator: Correlator, *findings: Finding) -> list[tuple[str, str]]:
    """(what, kind of the incident) of everything told."""
    return [(str(told.what), str(told.incident.kind)) for told in correlator.judge(findings, topology_state())]


@pytest.mark.parametrize(
    ("cause", "effect"),
    [
        pytest.param(SAVE, finding(Kind.RANK_LOST, scope="rank:3"), id="the exception ends the rank"),
        pytest.param(SAVE, finding(Kind.HANG, ranks=(1,)), id="others wait for the rank"),
        pytest.param(SAVE, finding(Kind.CHECKPOINT_OVERDUE, onset_step=900, onset_time_s=9_000.0), id="overdue"),
        pytest.param(RESTORE, finding(Kind.RANK_LOST, scope="rank:3"), id="the load ends the rank"),
        pytest.param(RESTORE, finding(Kind.HANG, ranks=(1,)), id="others wait for the load"),
    ],
)
def test_what_follows_joins_and_pages_nobody(correlator, cause, effect):
    assert judge(correlator, cause) == [("opened", str(cause.kind))]
    assert judge(correlator, effect) == [("evidence", str(cause.kind))]
    (incident,) = correlator.open
    assert [one.kind for one in incident.version().consequences] == [effect.kind]


def test_a_rank_that_is_lost_minutes_after_a_failed_save_has_another_cause(correlator):
    judge(correlator, SAVE)
    lost = finding(Kind.RANK_LOST, scope="rank:3", onset_time_s=1_100.0, detected_time_s=1_101.0)
    assert judge(correlator, lost) == [("opened", "rank_lost")]


def test_a_job_whose_saves_were_overdue_before_one_failed_has_one_incident(correlator):
    judge(correlator, finding(Kind.CHECKPOINT_OVERDUE))
    failed = finding(Kind.CHECKPOINT_FAILED, ranks=(3,), onset_time_s=1_500.0, onset_step=600, cause="disk")
    assert judge(correlator, failed) == [("updated", "checkpoint_failed")]
    (incident,) = correlator.open
    assert (incident.ranks, incident.cause) == ((3,), "disk")
    assert judge(correlator, finding(Kind.CHECKPOINT_OVERDUE, Change.CLOSE)) == []
    assert judge(correlator, finding(Kind.CHECKPOINT_FAILED, Change.CLOSE)) == [("resolved", "checkpoint_failed")]


def test_a_restore_that_fails_in_launch_after_launch_is_the_cause_of_what_they_end_with(correlator):
    judge(correlator, RESTORE)
    for launch in ("m.0", "n.0"):
        correlator.begin(launch)
        lost = finding(Kind.RANK_LOST, scope="rank:3", attempt=launch, onset_step=None, onset_time_s=1_060.0)
        assert judge(correlator, lost) == [("evidence", "restore_failed")]
    for step in range(PROGRESS_FRAMES):
        assert correlator.progress("n.0", step, 2_000.0) == []
    assert [incident.kind for incident in correlator.open] == [Kind.RESTORE_FAILED]
