"""Jobs that one token begins: so many at once and so many in all; known jobs are always accepted."""

from pathlib import Path

import pytest

from rankwatch import wire
from rankwatch_service.access.grants import Scope
from rankwatch_service.access.identities import Identity
from rankwatch_service.access.job_filter import JobFilter
from rankwatch_service.api.ingest import ACTIVE_JOBS_MAX, ACTIVE_S, NEW_JOBS_MAX, REPORT_S, NewJobs
from rankwatch_service.job.job import IDLE_AFTER_S
from rankwatch_service.policy.control_records import TelemetryRefused
from rankwatch_service.store.models import Job
from tests.support.clock import FakeClock
from tests.support.service.api import Api
from tests.support.store.database import add, job_row, new_database
from tests.support.values.batches import batch

MINE = Identity("t1", "ingest", "training", frozenset({"ingest"}), JobFilter(), None)
OTHER = Identity("t2", "ingest", "other team", frozenset({"ingest"}), JobFilter(), None)


class World:
    def __init__(self, folder: Path) -> None:
        self.clock = FakeClock()
        self.reported: list[tuple[str, TelemetryRefused]] = []
        engine = new_database(folder)
        self.jobs = NewJobs(engine, self.clock, lambda job, record: self.reported.append((job, record)))

    def begin(self, *names: str, who: Identity = MINE) -> list[bool]:
        return [self.jobs.wait_s(who, name) == 0 for name in names]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def names(count: int, what: str = "job") -> list[str]:
    return [f"{what}-{number}" for number in range(count)]


def test_a_token_begins_so_many_jobs_at_once_and_one_more_each_second(world: World) -> None:
    assert all(world.begin(*names(NEW_JOBS_MAX)))
    assert world.begin("one more", "another") == [False, False]
    world.clock.advance(1.0)
    assert world.begin("one more", "another") == [True, False]
    assert world.jobs.wait_s(MINE, "another") == 1


def test_jobs_that_are_known_and_other_tokens_are_not_limited(world: World) -> None:
    world.begin(*names(NEW_JOBS_MAX + 1))
    assert world.begin("job-0", "job-59") == [True, True]
    assert world.begin("job-0", "theirs", who=OTHER) == [True, True]


def test_a_token_has_so_many_active_jobs_and_more_once_some_are_idle(world: World) -> None:
    for name in names(ACTIVE_JOBS_MAX):
        world.clock.advance(1.0)
        assert world.begin(name) == [True]
    world.clock.advance(60.0)
    assert world.jobs.wait_s(MINE, "one more") == 60
    assert world.begin("theirs", who=OTHER) == [True]
    world.clock.advance(ACTIVE_S - 60.0 - ACTIVE_JOBS_MAX / 2)
    assert world.begin("one more") == [True]


def test_a_job_is_idle_here_when_the_stream_drops_it() -> None:
    assert ACTIVE_S == IDLE_AFTER_S


def test_the_newest_job_of_the_token_gets_one_record_for_many_refused_messages(world: World) -> None:
    world.begin(*names(NEW_JOBS_MAX + 5))
    world.jobs.report_due()
    world.begin(*names(NEW_JOBS_MAX + 5))
    world.jobs.report_due()
    fields = {"what": "new jobs of one token within a minute", "limit": 60, "figure": 61, "token": "training"}
    assert world.reported == [("job-59", TelemetryRefused("limit", {**fields, "count": 5}))]
    world.clock.advance(REPORT_S)
    world.jobs.report_due()
    assert world.reported[1:] == [("job-59", TelemetryRefused("limit", {**fields, "count": 5}))]
    world.jobs.report_due()
    assert len(world.reported) == 2


def test_jobs_that_were_active_before_a_restart_are_known(tmp_path: Path) -> None:
    api = Api(tmp_path, FakeClock())
    for name, age_s in (("running", 60), ("long gone", 2 * ACTIVE_S)):
        add(api.engine, Job, job_row(name, last_seen_unix_ns=api.clock.unix_ns() - int(age_s * 1e9)))
    jobs = NewJobs(api.engine, api.clock, lambda _job, _record: None)
    jobs.load()
    for name in names(NEW_JOBS_MAX):
        assert jobs.wait_s(MINE, name) == 0
    assert jobs.wait_s(MINE, "running") == 0
    assert jobs.wait_s(MINE, "long gone") > 0


def test_the_api_answers_429_with_retry_after_counts_it_and_tells_the_stream(tmp_path: Path) -> None:
    api = Api(tmp_path)
    token = api.token(Scope.INGEST)
    with api.client:

        def send(job: str):
            return api.send(wire.encode(batch(0, job=job)), token=token)

        for name in names(NEW_JOBS_MAX):
            assert send(name).status_code == 202
        answers = [send(name) for name in names(5, "flood")]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert len(refused) >= 3
        assert all(int(answer.headers["Retry-After"]) >= 1 for answer in refused)
        assert "has begun too many jobs" in refused[0].json()["detail"]
        assert send("job-3").status_code == 202
        metrics = api.ask("GET", "/metrics").text
    assert f'rankwatch_ingest_batches_total{{result="too_many_jobs"}} {len(refused)}.0' in metrics
    assert {record.kind for record in api.reported(TelemetryRefused)} == {"limit"}
