"""What ends by itself and comes back is one incident, reported once; what stays away resolves as of when it ended."""

import pytest

from rankwatch_detectors.base import Change, Kind, Severity
from rankwatch_service.incidents.correlator import FLAPPING_QUIET_S, PROGRESS_FRAMES, QUIET_S, Correlator
from rankwatch_service.incidents.model import TransitionKind
from tests.support.values.incidents import finding, topology_state

TOPOLOGY = topology_state()


def begins(correlator, at_s, kind=Kind.HANG, **fields):
    times = {"onset_time_s": at_s - 5, "detected_time_s": at_s}
    return correlator.evaluate([finding(kind, **(times | {"severity": Severity.CRITICAL} | fields))], TOPOLOGY)


def ends(correlator, at_s, kind=Kind.HANG, **fields):
    return correlator.evaluate([finding(kind, Change.CLOSE, detected_time_s=at_s, **fields)], TOPOLOGY)


def what(reported):
    return [news.what for news in reported]


@pytest.fixture
def over(correlator):
    """A hang from 1,000 to 1,010 s that was reported as over."""
    begins(correlator, 1_000.0)
    ends(correlator, 1_010.0)
    (incident,) = correlator.open
    correlator.resolve_ended(1_010.0 + QUIET_S)
    return incident


@pytest.fixture
def away(correlator):
    """A hang from 1,000 s that ended by itself at 1,004 s and may come back."""
    begins(correlator, 1_000.0)
    ends(correlator, 1_004.0)
    (incident,) = correlator.open
    return incident


def test_nine_hangs_in_a_minute_are_one_incident_that_opens_once_and_resolves_once(correlator):
    reported = []
    for at_s in range(1_000, 1_060, 7):
        reported += begins(correlator, at_s, onset_step=at_s)
        reported += correlator.resolve_ended(at_s + 3)
        reported += ends(correlator, at_s + 4, detected_step=at_s)
    reported += correlator.resolve_ended(1_060 + FLAPPING_QUIET_S - 2)
    reported += correlator.resolve_ended(1_060 + FLAPPING_QUIET_S)
    assert [moment for moment in what(reported) if moment is not TransitionKind.EVIDENCE] == [
        TransitionKind.OPENED,
        TransitionKind.RESOLVED,
    ]
    (incident,) = {news.incident.id: news.incident for news in reported}.values()
    assert incident.evidence["flaps"] == 8
    assert (incident.resolved_step, incident.resolved_time_s) == (1_056, 1_060.0)


def test_a_hang_that_stays_away_resolves_after_a_quiet_time_as_of_when_it_ended(correlator):
    begins(correlator, 1_000.0)
    assert what(ends(correlator, 1_010.0, detected_step=120)) == [TransitionKind.EVIDENCE]
    (incident,) = correlator.open
    assert not incident.goes_on
    assert correlator.resolve_ended(1_010.0 + QUIET_S - 1) == []
    assert what(correlator.resolve_ended(1_010.0 + QUIET_S)) == [TransitionKind.RESOLVED]
    assert (incident.resolved_step, incident.resolved_time_s) == (120, 1_010.0)


def test_a_hang_that_was_over_before_the_job_ended_lasted_until_it_ended_by_itself(correlator):
    begins(correlator, 1_000.0)
    ends(correlator, 1_010.0, detected_step=120)
    (incident,) = correlator.open
    (reported,) = correlator.finish(125, 1_014.0)
    assert (reported.what, reported.text) == (TransitionKind.RESOLVED, "Hang had ended by itself; the job ended")
    assert (incident.resolved_step, incident.resolved_time_s) == (120, 1_010.0)
    assert "ended_with_job" not in incident.evidence
    assert "The job has ended" not in incident.summary
    assert what(begins(correlator, 1_020.0)) == [TransitionKind.OPENED]
    assert correlator.open != [incident]


def test_what_has_ended_by_itself_says_so_until_it_is_back(correlator):
    begins(correlator, 1_000.0)
    (incident,) = correlator.open
    summary = incident.summary
    ends(correlator, 1_010.0)
    assert incident.summary == f"{summary} It has ended by itself after 10 s."
    begins(correlator, 1_020.0)
    assert incident.summary == summary


@pytest.mark.parametrize(
    ("lasted_s", "said"), [(5.2, "5.2 s"), (59.6, "1 min"), (90.4, "1 min 30 s"), (3_725.0, "1 h 2 min")]
)
def test_how_long_it_really_lasted_is_reported_at_its_end(correlator, lasted_s, said):
    begins(correlator, 1_004.0)
    ends(correlator, 1_000.0 + lasted_s, evidence={"age_s": lasted_s})
    (incident,) = correlator.open
    assert incident.summary.endswith(f"It has ended by itself after {said}.")
    assert incident.evidence["age_s"] == lasted_s


def test_one_that_was_reported_as_over_opens_again_under_its_own_id(correlator, over):
    assert what(begins(correlator, 1_500.0)) == [TransitionKind.OPENED]
    assert correlator.open == [over]
    assert (over.state, over.resolved_time_s) == ("open", None)
    ends(correlator, 1_510.0)
    assert correlator.resolve_ended(1_510.0 + QUIET_S) == []


def test_one_that_opens_again_is_no_graver_than_what_came_back_until_it_is(correlator, over):
    begins(correlator, 1_500.0, severity=Severity.INFO)
    assert over.severity is Severity.INFO
    graver = finding(Kind.HANG, Change.UPDATE, detected_time_s=1_502.0, severity=Severity.CRITICAL)
    assert what(correlator.evaluate([graver], TOPOLOGY)) == [TransitionKind.UPDATED]
    assert over.severity is Severity.CRITICAL


def test_what_comes_back_much_later_is_another_incident(correlator, over):
    begins(correlator, 1_011.0 + FLAPPING_QUIET_S)
    (after,) = correlator.open
    assert after.id != over.id


def test_an_acknowledged_incident_stays_acknowledged_while_it_flaps(correlator, away):
    away.state, away.acknowledged_by = "acknowledged", "ada"
    assert what(begins(correlator, 1_010.0)) == [TransitionKind.EVIDENCE]
    assert (away.state, away.acknowledged_by) == ("acknowledged", "ada")


def test_a_flap_that_is_graver_than_before_is_reported(correlator):
    begins(correlator, 1_000.0, severity=Severity.INFO)
    ends(correlator, 1_004.0)
    assert what(begins(correlator, 1_010.0, severity=Severity.CRITICAL)) == [TransitionKind.UPDATED]


def test_what_a_person_has_resolved_is_not_opened_again(correlator, away):
    correlator.resolve(away, 100, 1_005.0)
    assert what(begins(correlator, 1_010.0)) == [TransitionKind.OPENED]
    (after,) = correlator.open
    assert after.id != away.id


def test_a_hang_that_was_ended_by_a_relaunch_resolves_as_soon_as_training_goes_on(correlator):
    begins(correlator, 1_000.0)
    correlator.begin("m.0")
    reported = [
        news for step in range(101, 101 + PROGRESS_FRAMES) for news in correlator.progress("m.0", step, 1_020.0)
    ]
    assert what(reported) == [TransitionKind.RESOLVED]


def test_a_loss_spike_that_follows_another_is_another_incident(correlator):
    for at_s in (1_000.0, 1_030.0):
        assert what(begins(correlator, at_s, Kind.LOSS_SPIKE)) == [TransitionKind.OPENED]
        assert what(ends(correlator, at_s + 2, Kind.LOSS_SPIKE)) == [TransitionKind.RESOLVED]


def test_a_correlator_restored_between_two_flaps_goes_on_as_if_it_had_not_been_away(correlator, away):
    again = Correlator("gpt")
    again.restore(correlator.state())
    for one in (correlator, again):
        assert what(begins(one, 1_010.0)) == [TransitionKind.EVIDENCE]
        ends(one, 1_014.0)
    assert again.state() == correlator.state()
