"""Counters of the host and its network ports, from trees of /proc and /sys as kernels have them."""

import shutil
from pathlib import Path

import pytest

from rankwatch import wire
from rankwatch.agent import host
from rankwatch.agent.host import HostResources, HostSampler, NetworkPorts
from tests.support.clock import FakeClock
from tests.support.host.tree import HostTree


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    return HostTree(tmp_path)


def test_shares_of_time_are_those_since_the_reading_before(tree: HostTree) -> None:
    resources = HostResources(tree.root, tree.root)
    first = resources.read(100.0)
    assert not any(name.startswith("cpu") for name in first)
    assert (first["memory_total_bytes"], first["oom_kills"]) == (64 * 1024**3, 0)
    tree.pressure("memory", full_us=500_000)
    tree.pressure("cpu", some_us=2_500_000)
    tree.processors(user=150, idle=250, steal=100)
    tree.throttled(periods=50, throttled=10)
    tree.disk("nvme0n1", requests=100, waited_ms=400, busy_ms=1_000)
    read = resources.read(105.0)
    assert read["memory_pressure_ratio"] == pytest.approx(0.1)
    assert read["cpu_pressure_ratio"] == pytest.approx(0.5)
    assert (read["cpu_utilization_ratio"], read["cpu_steal_ratio"]) == (0.5, 0.2)
    assert read["cpu_throttled_ratio"] == 0.2
    assert (read["disk_busy_ratio"], read["disk_request_s"]) == (0.2, 0.004)


def test_partitions_and_what_is_stacked_on_disks_count_nothing_twice(tree: HostTree) -> None:
    resources = HostResources(tree.root, tree.root)
    resources.read(0.0)
    for name in ("sda1", "nvme0n1p1", "dm-0", "loop0"):
        tree.disk(name, requests=1, waited_ms=9, busy_ms=900)
    assert "disk_busy_ratio" not in resources.read(1.0)


def test_a_host_that_tells_nothing_has_no_counters(tmp_path: Path) -> None:
    assert HostResources(tmp_path, tmp_path).read(0.0) == {}
    assert NetworkPorts(tmp_path).read(0.0) == {}


def test_processes_that_were_killed_elsewhere_on_the_machine_are_not_those_of_the_container(tree: HostTree) -> None:
    tree.write("sys/fs/cgroup/memory.max", "1073741824\n")
    tree.write("sys/fs/cgroup/memory.events", "low 0\noom 4\noom_kill 1\n")
    tree.killed(7)
    assert HostResources(tree.root, tree.root).read(0.0)["oom_kills"] == 1
    tree.write("sys/fs/cgroup/memory.max", "max\n")
    assert HostResources(tree.root, tree.root).read(0.0)["oom_kills"] == 7


@pytest.mark.parametrize("group", ["/", "/kubepods/pod1/box", "/not/there"])
def test_the_limit_of_the_container_is_found_wherever_it_stands(tree: HostTree, group: str) -> None:
    tree.write("proc/self/cgroup", f"0::{group}\n")
    folder = group if group.startswith("/kubepods") else ""
    tree.throttled(periods=0, throttled=0, folder=folder)
    resources = HostResources(tree.root, tree.root)
    resources.read(0.0)
    tree.throttled(periods=10, throttled=10, folder=folder)
    assert resources.read(1.0)["cpu_throttled_ratio"] == 1.0


def test_rates_of_an_ethernet_port_its_errors_and_its_speed(tree: HostTree) -> None:
    tree.ethernet("eth0", received=1_000, downs=1)
    tree.write("sys/class/net/lo/operstate", "unknown\n")
    ports = NetworkPorts(tree.root)
    assert list(ports.read(0.0)) == ["eth0"]
    tree.ethernet("eth0", received=6_000, errors=7, downs=2, megabits="25000")
    (counters,) = ports.read(5.0).values()
    assert counters["received_bytes_per_s"] == 1_000
    assert (counters["link_up"], counters["link_downs"], counters["port_errors"]) == (1, 2, 7)
    assert counters["link_bits_per_s"] == 25e9


def test_a_port_that_is_not_in_use_is_not_reported_until_it_is(tree: HostTree) -> None:
    tree.ethernet("eth1", state="down", downs=9)
    tree.ethernet("eth2", flags="0x1002")
    tree.rdma("mlx5_1", state="1: DOWN", downs=3)
    ports = NetworkPorts(tree.root)
    assert ports.read(0.0) == {}
    tree.rdma("mlx5_1", downs=3)
    assert ports.read(2.5)["mlx5_1/1"]["link_up"] == 1


@pytest.mark.parametrize("state", ["1: DOWN", "2: INIT", ""])
def test_a_port_that_was_up_is_down_whatever_becomes_of_it(tree: HostTree, state: str) -> None:
    tree.rdma("mlx5_0")
    ports = NetworkPorts(tree.root)
    ports.read(0.0)
    if state:
        tree.rdma("mlx5_0", state=state)
    else:
        shutil.rmtree(tree.root / "sys/class/infiniband")
    assert ports.read(2.5) == {"mlx5_0/1": {"link_up": 0}}


def test_a_driver_that_does_not_tell_the_state_tells_its_counts_and_an_unknown_speed_is_none(tree: HostTree) -> None:
    tree.ethernet("eth0", state="unknown", megabits="4294967295", errors=2)
    (counters,) = NetworkPorts(tree.root).read(0.0).values()
    assert (counters.get("link_up"), counters.get("link_bits_per_s"), counters["port_errors"]) == (None, None, 2)


def test_a_count_that_cannot_be_read_for_a_while_makes_no_sum_jump(tree: HostTree) -> None:
    tree.rdma("mlx5_0", errors={"symbol_error": 5, "port_rcv_errors": 100})
    ports = NetworkPorts(tree.root)
    assert ports.read(0.0)["mlx5_0/1"]["port_errors"] == 105
    tree.write("sys/class/infiniband/mlx5_0/ports/1/counters/port_rcv_errors", "N/A")
    assert "port_errors" not in ports.read(2.5)["mlx5_0/1"]


def test_an_rdma_port_counts_words_errors_and_retransmissions(tree: HostTree) -> None:
    tree.rdma("mlx5_0", words=0)
    ports = NetworkPorts(tree.root)
    ports.read(0.0)
    tree.rdma("mlx5_0", words=1_000, errors={"symbol_error": 2, "port_rcv_errors": 1}, lost={"packet_seq_err": 40})
    counters = ports.read(2.0)["mlx5_0/1"]
    assert (counters["received_bytes_per_s"], counters["link_bits_per_s"]) == (2_000, 400e9)
    assert (counters["port_errors"], counters["retransmissions_per_s"]) == (3, 20)


def test_a_count_that_began_anew_has_no_rate(tree: HostTree) -> None:
    tree.ethernet("eth0", received=9_000)
    ports = NetworkPorts(tree.root)
    ports.read(0.0)
    tree.ethernet("eth0", received=10)
    assert "received_bytes_per_s" not in ports.read(5.0)["eth0"]


def test_more_ports_than_servers_have_are_left_out(tree: HostTree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "PORTS_MAX", 2)
    for number in range(3):
        tree.ethernet(f"eth{number}")
    tree.rdma("mlx5_0")
    ports = NetworkPorts(tree.root)
    assert list(ports.read(0.0)) == ["mlx5_0/1", "eth0"]
    assert ports.left_out == 2


def test_the_sampler_tells_of_the_host_and_of_each_port_by_kind_and_name(tree: HostTree) -> None:
    tree.ethernet("eth0")
    tree.rdma("mlx5_0")
    clock = FakeClock()
    read = HostSampler(tree.root, clock, tree.root).sample()
    assert [(one.kind, one.name) for one in read] == [
        (wire.HOST, ""), (wire.PORT, "mlx5_0/1"), (wire.PORT, "eth0")
    ]  # fmt: skip
    assert {one.time_unix_ns for one in read} == {clock.unix_ns()}


def test_a_folder_without_the_hosts_proc_and_sys_is_told_once_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = HostSampler(tmp_path, FakeClock(), tmp_path)
    sampler.close()
    sampler.run()
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        f"{tmp_path} has no proc", f"{tmp_path} has no sys"
    ]  # fmt: skip


def test_it_reads_this_host_and_ends_when_it_is_closed() -> None:
    sampler = HostSampler(Path("/"), FakeClock())
    sampler.start()
    sampler.close()
    sampler.join(30)
    assert not sampler.is_alive()
    assert sampler.take()[0].counters["memory_total_bytes"] > 0
    assert sampler.take() == ()
