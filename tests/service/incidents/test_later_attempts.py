"""What a later attempt ended says so: a rollback, or another launch, and from which step on it made its steps again."""

import pytest

from rankwatch_detectors.base import Kind
from rankwatch_service.incidents.correlator import PROGRESS_FRAMES, Correlator
from tests.support.values.findings import finding, topology_state


@pytest.fixture
def correlator():
    made = Correlator("gpt")
    made.begin("l.0")
    return made


def go_on(correlator, attempt, frames, from_step=100) -> list[str]:
    steps = range(from_step, from_step + frames)
    return [str(told.what) for step in steps for told in correlator.progress(attempt, step, 2_000.0)]


@pytest.mark.parametrize(
    ("attempt", "said"),
    [("l.1", " The job was rolled back to step 90."), ("m.0", " The job was relaunched from step 90.")],
)
def test_what_a_later_attempt_ended_says_from_which_step_on_it_made_its_steps_again(correlator, attempt, said):
    correlator.judge([finding(Kind.NONFINITE, scope="rank:3")], topology_state())
    (incident,) = correlator.open
    summary = incident.summary
    correlator.begin(attempt)
    go_on(correlator, attempt, PROGRESS_FRAMES - 1, from_step=90)
    restored = Correlator("gpt")
    restored.restore(correlator.state())
    (incident,) = restored.open
    assert go_on(restored, attempt, 1, from_step=100) == ["resolved"]
    assert incident.summary == summary + said
