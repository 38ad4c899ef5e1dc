"""A synthetic job of 64 ranks on 8 hosts is pushed through HTTP at 10 steps a second for half a minute."""

import os
import threading
import time
from collections import defaultdict
from pathlib import Path

import httpx2
import numpy as np
import pytest
from sqlalchemy import select

from rankwatch import wire
from rankwatch_service.demo.service import ServiceProcess
from rankwatch_service.series.query import heat_map
from rankwatch_service.series.rollups import ValueMark
from rankwatch_service.simulate.batches import batches
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job
from rankwatch_service.store import models
from rankwatch_service.store.engine import open_engine, read
from tests.support.service.process import until

RANKS = 64
STEPS = 300
STEP_S = 0.1
SETTLED_S = 15.0
GROWTH_MAX = 0.05

pytestmark = [pytest.mark.integration, pytest.mark.ci, pytest.mark.timeout(400)]


def tree(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(found for child in children for found in tree(int(child)))]


def resident_bytes(pid: int) -> int:
    """What a process tree holds; shared pages are divided among those who share them."""
    total = 0
    for each in tree(pid):
        for line in Path(f"/proc/{each}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


class Agent(threading.Thread):
    """One host's agent: sends its batches in order, at their times, each until it is accepted."""

    def __init__(self, url: str, token: str, messages: list, began_s: float) -> None:
        super().__init__()
        self._client = httpx2.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=30)
        self._messages = messages
        self._began_s = began_s
        self.refusals: list[str] = []

    def run(self) -> None:
        for message in self._messages:
            time.sleep(max(0.0, self._began_s + message.time_s - time.monotonic()))
            body = wire.encode(message.batch)
            while True:
                answer = self._client.post(
                    "/api/v1/telemetry", content=body, headers={"Content-Type": "application/msgpack"}
                )
                if answer.status_code == 202:
                    break
                if answer.status_code not in (429, 503):
                    self.refusals.append(answer.text)
                    return
                time.sleep(0.2)
        self._client.close()


def test_nothing_of_64_ranks_is_lost_and_memory_does_not_grow(tmp_path):
    by_host = defaultdict(list)
    for message in batches("big", generate(Job(world_size=RANKS, steps=STEPS, step_s=STEP_S, seed=5))):
        if message.time_s <= STEPS * STEP_S + 1:
            by_host[message.batch.host].append(message)
    sent = sum(len(messages) for messages in by_host.values())

    service = ServiceProcess(tmp_path / "data", 0, {**os.environ, "XDG_CONFIG_HOME": str(tmp_path / "config")})
    service.start()
    try:
        token = (tmp_path / "data" / "ingest-token").read_text().strip()
        began_s = time.monotonic()
        agents = [Agent(service.url, token, messages, began_s) for messages in by_host.values()]
        for agent in agents:
            agent.start()
        time.sleep(SETTLED_S)
        settled = resident_bytes(service._process.pid)
        for agent in agents:
            agent.join()
        grown = resident_bytes(service._process.pid)
        assert [agent.refusals for agent in agents] == [[]] * len(by_host)

        engine = open_engine(f"sqlite:///{tmp_path}/data/rankwatch.db")

        def everything_is_committed() -> bool:
            with read(engine) as connection:
                end = connection.scalar(select(models.LogPartition.next_position)) or 0
                return end >= sent and connection.scalar(select(models.StreamPosition.position)) == end

        def every_step_is_stored() -> bool:
            found = heat_map(engine, "big", "busy_s", columns=4_000)
            return found.mark.shape == (RANKS, STEPS) and bool(np.all(found.mark == ValueMark.FINITE))

        until("the stream is at the end of the log", everything_is_committed)
        until("every step of every rank is stored", every_step_is_stored)
        with read(engine) as connection:
            job = connection.execute(select(models.Job.__table__).where(models.Job.name == "big")).one()
            assert job.world_size == RANKS
            # On a busy machine some hosts' batches are late: they count for the charts only, and none is lost.
            assert set(job.dropped) <= {"late", "incomplete"}
            assert connection.execute(select(models.DeadLetter.reason)).all() == []
            assert connection.execute(select(models.Incident.summary)).all() == []
        engine.dispose()

        shown = service.get("/api/v1/jobs/big/heatmap", metric="busy_s", columns="300")
        assert len(shown["high"]) == RANKS
        assert all(mark == ValueMark.FINITE for row in shown["mark"] for mark in row)
        assert grown < settled * (1 + GROWTH_MAX), f"{settled / 1e6:.0f} MB grew to {grown / 1e6:.0f} MB"
    finally:
        service.stop()
