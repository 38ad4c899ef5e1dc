"""A tuning holds from its place in the log on, for running jobs too, and every replay decides the same."""

from sqlalchemy import select

from rankwatch_service.job.detection import DetectionPipeline
from rankwatch_service.job.effects import Effects
from rankwatch_service.names import ALL_JOBS
from rankwatch_service.store import models
from rankwatch_service.store.engine import read
from rankwatch_service.stream.saved import pack
from rankwatch_service.tuning import TuningSet, read_tunings
from tests.support.values.batches import table

DEAF = {"settings": {"straggler.wall.ratio_min": 5}}


def tunings(version, *documents):
    return TuningSet(version, read_tunings(list(documents)))


def train(service, stream, steps, slow=1.0, job="gpt"):
    """Steps of both ranks, twenty in a batch; rank 1 computes `slow` times as long."""
    steps = list(steps)
    for part in (steps[start : start + 20] for start in range(0, len(steps), 20)):
        rows = [(step, rank) for step in part for rank in (0, 1)]
        busy = [(0.2 + 0.001 * (step * 7 % 5)) * (slow if rank else 1.0) for step, rank in rows]
        service.send(job, steps=table(*map(list, zip(*rows, strict=True)), busy_s=busy, step_time_s=[0.5] * len(rows)))
        service.clock.advance(0.5 * len(part))
        stream.step()


def found(service):
    """Kind, onset and tuning version of every incident."""
    incident = models.Incident
    with read(service.engine) as connection:
        query = select(incident.job, incident.kind, incident.onset_step, incident.evidence).order_by(
            incident.detected_unix_ns
        )
        return [(*row[:3], row.evidence.get("tuning_version")) for row in connection.execute(query)]


def test_a_tuning_holds_from_its_place_on_and_says_its_version(service, stream):
    train(service, stream, range(100))
    service.tell(ALL_JOBS, tunings(1, {"jobs": "g*", **DEAF}))
    train(service, stream, range(100, 112), slow=1.5)
    train(service, stream, range(112, 170))
    assert found(service) == []
    service.tell(ALL_JOBS, tunings(2, {"jobs": "g*", "profile": "sensitive"}))
    train(service, stream, range(170, 182), slow=1.5)
    assert found(service) == [("gpt", "straggler", 170, 2)]
    train(service, stream, range(182, 250))
    service.tell(ALL_JOBS, tunings(3))
    train(service, stream, range(250, 262), slow=1.5)
    assert found(service)[1:] == [("gpt", "straggler", 250, None)]


def test_another_value_restarts_no_baseline(service, stream):
    train(service, stream, range(100))
    before = stream.partition.jobs["gpt"].state()["bank"]
    service.tell(ALL_JOBS, tunings(1, {"profile": "quiet"}))
    service.clock.advance(0.01)
    stream.partition.control(service.controls.read(0, 9)[-1], Effects())
    assert pack(stream.partition.jobs["gpt"].state()["bank"]) == pack(before)


def test_jobs_that_do_not_match_go_on_as_they_are(service, stream):
    service.tell(ALL_JOBS, tunings(1, {"jobs": "bert-*", **DEAF}))
    train(service, stream, range(100))
    train(service, stream, range(100, 112), slow=1.5)
    assert found(service) == [("gpt", "straggler", 100, None)]


def test_a_job_that_begins_later_has_the_tuning(service, stream):
    service.tell(ALL_JOBS, tunings(4, {"jobs": "late", **DEAF}))
    train(service, stream, range(10))
    train(service, stream, range(100), job="late")
    train(service, stream, range(100, 112), slow=1.5, job="late")
    assert found(service) == []


def test_a_change_is_among_what_happened_before_an_incident(service, stream):
    train(service, stream, range(100))
    service.tell(ALL_JOBS, tunings(1, {"jobs": "gpt", "profile": "sensitive"}))
    train(service, stream, range(100, 110))
    train(service, stream, range(110, 122), slow=1.5)
    (changes,) = service.column(select(models.Incident.changes_before))
    assert "tuning: version 1" in [change["what"] for change in changes]
    (configuration,) = service.column(select(models.Job.configuration))
    assert [(change["what"], change["step"]) for change in configuration] == [("tuning: version 1", 99)]


def test_detectors_are_made_anew_only_if_the_tuning_is_another_one():
    made = []
    pipeline = DetectionPipeline("gpt", lambda *config: made.append(config) or [])
    one = {"jobs": "g*", "profile": "quiet"}
    answers = [pipeline.tune(tunings(n, *these)) for n, these in enumerate([[], [one], [one, one], []])]
    assert answers == [False, True, False, True]
    assert len(made) == 3
