"""The devices of a host while their driver fails: what the agent sends of them, and that nothing is left of it."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rankwatch import layout, wire
from rankwatch.agent.processes import NICENESS, take_lock
from tests.support.accelerator import DRIVER
from tests.support.agent.host import AgentProcess
from tests.support.agent.service import AgentService, until
from tests.support.host_tree import HostTree

pytestmark = pytest.mark.integration


class Driver:
    """The driver of the host, which a test spoils while the agent runs."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "nvml.json"
        self.environment = {"PYTHONPATH": str(DRIVER), "SIMULATED_NVML": str(self._file)}
        self.say()

    def say(self, **wrong: Any) -> None:
        fresh = self._file.with_suffix(".new")
        fresh.write_text(json.dumps(wrong))
        fresh.rename(self._file)


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    driver = Driver(tmp_path)
    yield driver
    driver.say()


@pytest.fixture
def agent(tmp_path: Path, service: AgentService, driver: Driver) -> Iterator[AgentProcess]:
    """The agent of a host with that driver."""
    with AgentProcess(tmp_path, service.environment | driver.environment) as agent:
        yield agent


def test_counters_errors_a_loss_and_silence_reach_the_service_while_ranks_are_reported_on(
    tmp_path, driver, service, rank, agent
):
    until(lambda: any(len(batch.devices) == 8 for batch in service.batches))
    driver.say(xids=[[3, 48]])
    until(lambda: service.events("device_error"))
    driver.say(xids=[[3, 48]], lost=[5])
    until(lambda: service.events("device_lost"))
    until(lambda: any(len(batch.devices) == 7 for batch in service.batches))
    driver.say(hangs=True)
    until(lambda: service.events("driver_silent"))
    rank.do("steps", 5)
    until(lambda: any(batch.steps is not None for batch in service.batches))
    (error,), (lost,) = service.events("device_error"), service.events("device_lost")
    assert (error.fields["device_uuid"], error.fields["xid"], error.rank) == ("GPU-3", 48, None)
    assert (lost.fields["serial"], lost.fields["index"]) == ("S5", 5)
    assert len(service.events("driver_silent")) == 1
    agent.kill()
    rank.close()
    until(lambda: is_free(layout.devices_lock_path(str(tmp_path), "gpt")))


def is_free(path: str) -> bool:
    """Whether no reader of devices is left."""
    lock = take_lock(Path(path))
    if lock is not None:
        os.close(lock)
    return lock is not None


def test_a_killed_worker_leaves_no_reader_beside_that_of_the_next_one(driver, service, rank, agent):
    until(lambda: any(batch.devices for batch in service.batches))
    agent.kill_worker()
    boots = {batch.boot for batch in service.batches}
    until(lambda: any(batch.devices and batch.boot not in boots for batch in service.batches))
    assert not service.events("driver_silent")


def test_the_worker_and_its_reader_yield_to_training_once_they_watch_it_and_the_supervisor_need_not(
    driver, service, rank, agent
):
    until(lambda: any(batch.devices for batch in service.batches))
    (reader,) = children(agent.worker)
    assert niceness(agent.supervisor.pid) == {os.getpriority(os.PRIO_PROCESS, 0)}
    assert niceness(agent.worker) == niceness(reader) == {NICENESS}


def children(pid: int) -> list[int]:
    return [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]


def niceness(pid: int) -> set[int]:
    """Of every thread of a process."""
    return {os.getpriority(os.PRIO_PROCESS, int(thread.name)) for thread in Path(f"/proc/{pid}/task").iterdir()}


def test_counters_of_the_host_and_its_ports_reach_the_service_on_a_host_without_devices(tmp_path, service, rank):
    tree = HostTree(tmp_path / "host")
    tree.rdma("mlx5_0")
    with AgentProcess(tmp_path, service.environment | {"RANKWATCH_HOST_ROOT": str(tree.root)}):
        until(lambda: {one.kind for batch in service.batches for one in batch.host_devices} == {wire.HOST, wire.PORT})
        tree.write("proc/meminfo", "MemTotal: 1024 kB\n")
        tree.rdma("mlx5_0", state="1: DOWN", downs=1)
        newest = Newest(service)
        until(lambda: newest(wire.HOST, "memory_total_bytes") == 2**20 and newest(wire.PORT, "link_up") == 0)


class Newest:
    """The newest value of a counter that the service was sent."""

    def __init__(self, service: AgentService) -> None:
        self._service = service

    def __call__(self, kind: str, counter: str) -> float | None:
        reported = [one for batch in self._service.batches for one in batch.host_devices if one.kind == kind]
        return reported[-1].counters.get(counter) if reported else None
