"""Explanations reach the transitions of incidents, and can do no harm to what they explain."""

from rankwatch_detectors.base import AttemptStart, Kind
from rankwatch_detectors.dispatch import DispatchingDetector
from rankwatch_detectors.explanation import ExplainedDetector
from rankwatch_service.incidents.correlator import WHY
from rankwatch_service.job.detection import DetectionPipeline
from tests.support.values.findings import finding, topology_state
from tests.support.values.presences import ATTEMPT, frame, topology


class Speechless(ExplainedDetector):
    """Finds a spike in step 3, and cannot explain it."""

    kind = Kind.LOSS_SPIKE
    name = "speechless"
    version = 1

    def _on_frame(self, frame):
        return [finding(Kind.LOSS_SPIKE, attempt=ATTEMPT)] if frame.step == 3 else []

    def suspects(self, frame):
        raise ZeroDivisionError(frame.step)

    def _rows_of_steps(self, counts):
        return {}

    crossed = needed = detectable = suspects


class Hanging(DispatchingDetector):
    """Finds a standstill."""

    kind = Kind.HANG
    name = "hanging"
    version = 1

    def _on_frame(self, frame):
        told = {"age_s": 12.0, "deadline_s": 8.0}
        return [finding(Kind.HANG, attempt=ATTEMPT, evidence=told)] if frame.step == 3 else []


def run(detector):
    pipeline = DetectionPipeline("gpt", lambda: [detector])
    pipeline.observe(AttemptStart(ATTEMPT, topology(2), 0.0), topology_state())
    updates, failures = [], []
    for step in range(5):
        told, failed = pipeline.observe(frame(step, {"loss": [2.0, 2.0]}), topology_state())
        updates += told
        failures += failed
    return updates, failures


def test_what_cannot_be_explained_is_reported_all_the_same():
    updates, failures = run(Speechless())
    assert [str(one.what) for one in updates] == ["opened"]
    assert WHY not in updates[0].fields
    assert {one.detector for one in failures} == {"explanation"}
    assert not any(one.off for one in failures)


def test_a_standstill_is_explained_by_its_deadline():
    (update,), failures = run(Hanging())
    assert failures == []
    (told,) = update.fields[WHY]
    assert (told["statistic"], told["unit"]) == ("seconds_without_progress", "s")
    assert told["points"]["value"] == [0.0, 12.0]
    assert told["points"]["threshold"] == [8.0, 8.0]
    assert told["points"]["step"] == [None, None]
    assert told["why"] == "The time without progress in seconds reached 12; its threshold is 8."
