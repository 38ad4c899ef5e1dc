"""Whenever the stream is killed or stopped, what follows is what an undisturbed one does: a table of scenarios."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from rankwatch import wire
from rankwatch_detectors.metric_rule import Condition, MetricRule
from rankwatch_service.incidents.correlator import QUIET_S
from rankwatch_service.job.detection import JUDGED
from rankwatch_service.job.job import IDLE_AFTER_S
from rankwatch_service.names import ALL_JOBS
from rankwatch_service.policy.control_records import (
    AlertsReceived,
    IncidentReview,
    JobDeleted,
    JobOwnership,
    PrecisionSet,
    ReportedAlert,
    RulesSet,
)
from rankwatch_service.policy.policy import Mode, Policy, PolicyLimits, Rule, policy_record
from rankwatch_service.store import models
from rankwatch_service.stream.loop import Stream
from rankwatch_service.stream.saved import pack
from rankwatch_service.tuning import TuningSet, read_tunings
from tests.support.recordings.recording import results
from tests.support.service.stream import Charted, Service
from tests.support.store.database import new_database
from tests.support.values.batches import progress, ranks, table

Moments = Iterator[float | None]
"""After each moment stream gets its turn, some seconds later (None: one)."""


def alerts(service: Service) -> Moments:
    def report(*states: tuple[str, str], name: str = "DiskFull") -> None:
        reported = [ReportedAlert(key, name, state, "critical", "full", ("node-1:9100",)) for key, state in states]
        service.append("gpt", AlertsReceived(tuple(reported)))

    report(("a", "firing"))  # of a job that stream does not know
    yield None
    service.send()
    yield None
    report(("a", "firing"), ("b", "firing"))
    yield None
    report(("a", "resolved"))
    report(("c", "firing"), name="LinkDown")
    yield None
    report(("b", "expired"))
    yield None
    yield QUIET_S


def projects(service: Service) -> Moments:
    service.append("gpt", JobOwnership("gpt", "nlp", "ann"))
    service.append("waits", JobOwnership("waits", "vision"))
    yield None
    service.train(*range(10))
    yield None
    service.ill()
    yield None
    service.train(*range(10), job="waits")
    service.ill("waits")
    yield None
    yield IDLE_AFTER_S
    yield IDLE_AFTER_S
    service.ill(attempt="m.0", step=3)
    yield None


def precision(service: Service) -> Moments:
    rule = Rule("r1", Mode.ACT, kind="nonfinite", action="pause")
    service.append(ALL_JOBS, policy_record(Policy((rule,), PolicyLimits(precision_min=0.6))))
    service.able()
    service.train(0)
    yield None
    service.ill(step=2)
    yield None
    service.append(ALL_JOBS, PrecisionSet({"nonfinite": (3, 2)}))
    yield None
    service.able("later")
    service.train(0, job="later")
    yield None
    service.ill("later", step=2)
    yield None


def rules(service: Service) -> Moments:
    def log(*values: float, first: int, job: str = "gpt") -> Moments:
        for step, value in enumerate(values, first):
            service.send(job, steps=table([step] * 2, [0, 1], memory=[value] * 2, step_time_s=[0.5] * 2))
            yield None

    held = MetricRule("held", "memory", Condition.ABOVE, 10.0, hold_s=2.0)
    service.append(ALL_JOBS, RulesSet((held,)))
    yield from log(5.0, *[11.0] * 4, first=0)
    service.append(ALL_JOBS, RulesSet(()))
    yield from log(11.0, first=5)
    yield IDLE_AFTER_S
    yield IDLE_AFTER_S
    service.append(ALL_JOBS, RulesSet((held,)))
    yield None
    yield from log(*[11.0] * 4, first=6)


def deletions(service: Service) -> Moments:
    for job in ("gpt", "other"):
        service.train(*range(10), job=job)
        service.ill(job)
    yield None
    service.append("gpt", JobDeleted("gpt"))
    service.append("nobody", JobDeleted("nobody"))
    yield None
    service.seq.pop("gpt")
    service.train(*range(5))
    yield None
    service.ill(step=5)
    yield None
    yield IDLE_AFTER_S
    yield IDLE_AFTER_S
    service.append("other", JobDeleted("other"))
    yield None
    service.seq.pop("other")
    service.train(*range(5), job="other")
    yield None


def idle(service: Service) -> Moments:
    service.train(*range(10))
    service.ill()
    yield None
    yield IDLE_AFTER_S
    yield IDLE_AFTER_S
    service.train(*range(5), job="other")
    yield None
    (incident,) = service.column(select(models.Incident.id))
    service.append("gpt", IncidentReview(incident, "resolved", "ann"))
    yield None
    service.send(attempt="m.0", ranks=ranks(2))
    service.ill(attempt="m.0", step=3)
    yield None
    service.send(attempt="m.1", ranks=ranks(2))
    service.ill(attempt="m.1", step=5)
    yield None


def limits(service: Service) -> Moments:
    """A few bytes declare 131,072 ranks, which get no memory."""
    for step in range(3):
        forged = (wire.RankInfo(0, 131_072, host="node-0"),)
        service.send("forged", attempt="f.0", ranks=forged, steps=table([step], [0], loss=[1.0]))
        service.train(step)
        yield None


def tuned(service: Service) -> Moments:
    def tell(version: int, *documents: dict[str, Any]) -> None:
        service.append(ALL_JOBS, TuningSet(version, read_tunings(list(documents))))

    def train(steps: range, slow: float = 1.0) -> Moments:
        """Both ranks, forty steps in a batch; rank 1 computes `slow` times as long."""
        for part in (steps[start : start + 40] for start in range(0, len(steps), 40)):
            rows = [(step, rank) for step in part for rank in (0, 1)]
            busy = [(0.2 + 0.001 * (step * 7 % 5)) * (slow if rank else 1.0) for step, rank in rows]
            reported = table(*map(list, zip(*rows, strict=True)), busy_s=busy, step_time_s=[0.5] * len(rows))
            service.send(steps=reported)
            yield 0.5 * len(part)

    yield from train(range(60))
    tell(1, {"jobs": "gpt", "profile": "sensitive"})
    yield from train(range(60, 100))
    yield from train(range(100, 112), slow=1.5)
    tell(2, {"jobs": "gpt", "settings": {"straggler.wall.ratio_min": 5}})
    yield from train(range(112, 120))
    yield from train(range(120, 132), slow=1.5)
    tell(3)
    yield from train(range(132, 200))
    yield from train(range(200, 212), slow=1.5)


SCENARIOS: dict[Callable[[Service], Moments], set[str]] = {
    alerts: {"alert"},
    projects: {"nonfinite"},
    precision: {"nonfinite"},
    rules: {"metric"},
    deletions: {"nonfinite"},
    idle: {"nonfinite"},
    limits: {"limit_reached"},
    tuned: {"straggler"},
}
"""With the kinds of the incidents in it."""


def killed(stream: Stream, number: int) -> None:
    """Now and then one job was saved before, so that snapshots are of different places."""
    if (names := sorted(stream.partition.jobs)) and number % 3 == 1:
        stream.save(names[number % len(names)])


def stopped(stream: Stream, number: int) -> None:
    stream.close()


def lived(folder: Path, scenario: Callable[[Service], Moments], ends: Callable[[Stream, int], object] | None) -> Any:
    """What there is to see after a scenario, and the state; with `ends` the stream is begun anew after each moment."""
    service = Charted(new_database(folder))
    stream = service.started()
    for number, seconds in enumerate(scenario(service)):
        service.second(stream, 1.0 if seconds is None else seconds)
        stream.save_due()
        if ends is not None:
            ends(stream, number)
            stream = service.started()
    found = results(service.engine)
    stream.close()
    series = service.column(select(models.SeriesChunk.job).distinct().order_by(models.SeriesChunk.job))
    service.engine.dispose()
    jobs = {
        name: {part: pack(one) for part, one in job.state().items() if part != JUDGED}
        for name, job in stream.partition.jobs.items()
    }
    return found, jobs, series, pack(stream.partition.settings.state())


@pytest.fixture(scope="module", params=SCENARIOS, ids=lambda scenario: scenario.__name__)
def undisturbed(request, tmp_path_factory):
    """A scenario, and what it leaves."""
    whole = lived(tmp_path_factory.mktemp("whole"), request.param, None)
    assert {row["kind"] for row in whole[0]["incident"]} == SCENARIOS[request.param]
    return request.param, whole


@pytest.mark.parametrize("ends", [killed, stopped], ids=lambda ends: ends.__name__)
def test_a_stream_that_ends_after_each_moment_leaves_what_an_undisturbed_one_leaves(tmp_path, undisturbed, ends):
    scenario, (tables, *rest) = undisturbed
    found, *also_found = lived(tmp_path, scenario, ends)
    for name, rows in tables.items():
        assert repr(found[name]) == repr(rows), name
    assert also_found == rest


def dead_jobs(service: Service) -> Stream:
    """A stream that has seen four jobs die, each in its way."""
    stream = service.started()
    hosts = (*ranks(2, "node-0", [0]), *ranks(2, "node-1", [1]))
    for step in range(40):
        for job in ("silent", "hung", "lost", "spoilt"):
            loss = math.nan if (job, step) == ("spoilt", 39) else 2.0
            rows = table([step] * 2, [0, 1], loss=[loss, 2.0], step_time_s=[1.0] * 2)
            known = {"ranks": hosts} if step == 0 else {}
            service.send(job, progress=(progress(0, step), progress(1, step)), steps=rows, **known)
        service.second(stream)
    ended = {"code": None, "signal": 9, "how": "pidfd", "error": ""}
    service.send("lost", events=(wire.Event("process_exit", 1, rank=1, step=40, fields=ended),))
    for age_s in range(1, 16):
        ages = {"phase_age_s": float(age_s), "step_age_s": float(age_s)}
        service.send("hung", progress=(progress(0, 39, **ages), progress(1, 39, **ages)))
        service.second(stream)
    for _ in range(30):
        service.second(stream)
    return stream


def test_what_is_open_of_dead_jobs_stays_as_it_is_over_restarts(service):
    stream = dead_jobs(service)
    for job, incident in service.rows(select(models.Incident.job, models.Incident.id)):
        if job in ("silent", "lost"):
            service.append(job, IncidentReview(incident, "acknowledged", "ada"))
    for _ in range(70):  # nobody answers with a stack, which is said after a minute
        service.second(stream)
    open_ = select(models.Incident.job, models.Incident.kind, models.Incident.state, models.Incident.transitions)
    before = sorted(service.rows(open_))
    assert [row[:3] for row in before] == [
        ("hung", "hang", "open"),
        ("lost", "rank_lost", "acknowledged"),
        ("silent", "telemetry_lost", "acknowledged"),
        ("spoilt", "nonfinite", "open"),
        ("spoilt", "telemetry_lost", "open"),
    ]
    for down_s in (2, 30, 900):
        stream.close()
        service.clock.advance(down_s)
        stream = service.started()
        for _ in range(20):
            service.second(stream)
    assert sorted(service.rows(open_)) == before
