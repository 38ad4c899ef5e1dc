"""What jobs declare and what they get: the stream has state for what it was sent, and a restart decides the same."""

import numpy as np
import pytest
from sqlalchemy import select

from rankwatch import wire
from rankwatch_service.job import admission
from rankwatch_service.store import models
from rankwatch_service.stream.saved import pack
from tests.support.service.stream import Service
from tests.support.trials.selection import in_ci
from tests.support.values.batches import progress, table

METRICS = {f"m{number}": 1.0 for number in range(20)}


def rows(step: int, told: list[int], metrics: dict[str, float] = METRICS) -> wire.Table:
    return table([step] * len(told), told, **{name: [value] * len(told) for name, value in metrics.items()})


def infos(told: range, world_size: int) -> tuple[wire.RankInfo, ...]:
    return tuple(wire.RankInfo(rank, world_size, host=f"node-{rank // 8}", dp=rank) for rank in told)


def forge(service: Service, job: str) -> None:
    """530 bytes that declare 131,072 ranks."""
    service.send(job, attempt=f"{job}.0", ranks=infos(range(1), 131_072), steps=rows(1, [0]))


def limits(service: Service) -> list[str]:
    found = select(models.Incident.job).where(models.Incident.kind == "limit_reached")
    return service.column(found.order_by(models.Incident.job))


def test_what_a_batch_declares_and_does_not_bring_takes_no_memory_and_opens_an_incident(service, stream):
    for number in range(20):
        forge(service, f"forged-{number:02}")
    service.train(1)
    service.second(stream)
    assert limits(service) == [f"forged-{number:02}" for number in range(20)]
    assert service.column(select(models.DeadLetter.reason)) == ["limit"] * 20
    held = [job.allowed.cells for name, job in stream.partition.jobs.items() if name != "gpt"]
    assert held == [admission.RANK_CELLS] * 20
    service.second(stream, 3.0)
    assert service.column(select(models.Attempt.job)) == ["gpt"], "no other attempt has begun"


def test_a_job_of_16384_ranks_whose_hosts_introduce_themselves_within_seconds_starts_as_before(service, stream):
    for half in (range(8_192), range(8_192, 16_384)):
        for low in range(half.start, half.stop, 2_048):
            told = range(low, low + 2_048)
            service.send("wide", ranks=infos(told, 16_384), progress=tuple(progress(rank, 0) for rank in told[:8]))
        service.second(stream)
    service.second(stream)
    assert service.column(select(models.Attempt.attempt)) == ["l.0"]
    assert service.column(select(models.Job.world_size)) == [16_384]
    assert service.column(select(models.DeadLetter.reason)) == []


def test_beside_a_flood_a_large_job_starts_once_a_64th_of_its_ranks_introduced_itself(service, monkeypatch):
    monkeypatch.setattr(admission, "SILENT_CELLS_MAX", 0)
    stream = service.started()
    for low in range(0, 32, 8):
        service.send("wide", ranks=infos(range(low, low + 8), 2_048), steps=rows(1, list(range(low, low + 8))))
    service.second(stream)
    service.second(stream, 2.0)
    assert service.column(select(models.DeadLetter.reason)) == ["limit"] * 3
    assert limits(service) == ["wide"]
    (attempt,) = service.column(select(models.Attempt.topology))
    assert len(attempt["ranks"]) == 32, "who the ranks are is known from refused batches too"


def test_an_attempt_that_runs_goes_on_without_the_metrics_that_it_may_not_have(service, stream, monkeypatch):
    service.send("gpt", ranks=infos(range(4), 4), steps=rows(1, [0, 1, 2, 3], {"loss": 2.0}))
    service.second(stream)
    monkeypatch.setattr(admission, "CELLS_MAX", stream.partition.jobs["gpt"].allowed.cells)
    service.send("gpt", steps=rows(2, [0, 1, 2, 3], {"loss": 2.0, "more": 1.0}))
    service.second(stream)
    assert limits(service) == ["gpt"]
    assert service.column(select(models.DeadLetter.reason)) == []
    (job,) = service.column(select(models.Job.dropped))
    assert job == {"names": 4}
    assert service.column(select(models.Job.step)) == [2]


def test_the_next_launch_of_a_job_may_have_what_the_last_one_had(service, stream, monkeypatch):
    service.send("wide", attempt="a.0", ranks=infos(range(2_048), 2_048), steps=rows(1, list(range(2_048))))
    service.second(stream)
    monkeypatch.setattr(admission, "SILENT_CELLS_MAX", 0)
    service.send("wide", attempt="b.0", ranks=infos(range(8), 2_048))
    service.second(stream)
    service.second(stream, 2.0)
    service.second(stream, 6.0)
    assert service.column(select(models.Attempt.attempt).order_by(models.Attempt.number)) == ["a.0", "b.0"]


@pytest.mark.parametrize("seed", [0, *in_ci(range(1, 4))])
def test_a_replay_from_snapshots_of_different_times_allows_the_same(service, monkeypatch, seed):
    """Jobs grow, are relaunched and are refused in turn; some have snapshots, which are of different places."""
    monkeypatch.setattr(admission, "CELLS_MAX", 2_000)
    monkeypatch.setattr(admission, "RESERVED_CELLS", 400)
    monkeypatch.setattr(admission, "SMALL_CELLS", 100)
    monkeypatch.setattr(admission, "SILENT_CELLS_MAX", 500)
    random = np.random.default_rng(seed)
    stream = service.started()
    for step in range(1, 60):
        job = f"job-{random.integers(6)}"
        size = int(random.choice([1, 8, 70, 200]))
        launch = f"{job}-{size}-{step // 20}"
        names = {f"m{number}": 1.0 for number in range(int(random.integers(1, 6)))}
        told = range(min(size, int(random.choice([1, 8]))))
        service.send(job, attempt=f"{launch}.0", ranks=infos(told, size), steps=rows(step, list(told), names))
        if random.random() < 0.5:
            service.second(stream)
        if random.random() < 0.1 and stream.partition.jobs:
            stream.save(str(random.choice(sorted(stream.partition.jobs))))
    service.second(stream)
    assert "limit" in service.column(select(models.DeadLetter.reason))
    incidents = service.column(select(models.Incident.id))
    again = service.started()
    jobs = stream.partition.jobs
    assert again.partition.jobs.keys() == jobs.keys()
    assert {name: job.allowed for name, job in again.partition.jobs.items()} == {
        name: job.allowed for name, job in jobs.items()
    }
    for name, job in jobs.items():
        assert pack(again.partition.snapshot(name)) == pack(job.state()), name
    assert service.column(select(models.Incident.id)) == incidents
