"""Counters of a host, its network ports and the disk of its checkpoints, and notices of cloud providers about it."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rankwatch import wire
from rankwatch.agent import host
from rankwatch.agent.cloud import TELL_AGAIN_S, CloudNotices, Notice, on_aws, on_azure, on_gcp
from rankwatch.agent.host import HostResources, HostSampler, NetworkPorts, PathDisk
from tests.support.clock import FakeClock
from tests.support.host_tree import HostTree


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
    assert PathDisk(tmp_path, tmp_path).request_s("/data") is None


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
    assert (counters["received_bytes_per_s"], counters["link_bits_per_s"]) == (1_000, 25e9)
    assert (counters["link_up"], counters["link_downs"], counters["port_errors"]) == (1, 2, 7)
    tree.ethernet("eth0", received=10)
    assert "received_bytes_per_s" not in ports.read(10.0)["eth0"], "a count that began anew has no rate"


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
    assert [(one.kind, one.name) for one in read] == [(wire.HOST, ""), (wire.PORT, "mlx5_0/1"), (wire.PORT, "eth0")]
    assert {one.time_unix_ns for one in read} == {clock.unix_ns()}


def test_a_folder_without_the_hosts_proc_and_sys_is_reported_once_in_the_log(tmp_path, caplog):
    sampler = HostSampler(tmp_path, FakeClock(), tmp_path)
    sampler.close()
    sampler.run()
    said = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert said == [f"{tmp_path} has no proc", f"{tmp_path} has no sys"]


def test_it_reads_this_host_and_ends_when_it_is_closed() -> None:
    sampler = HostSampler(Path("/"), FakeClock())
    sampler.start()
    sampler.close()
    sampler.join(30)
    assert not sampler.is_alive()
    assert sampler.take()[0].counters["memory_total_bytes"] > 0
    assert sampler.take() == ()


ROOT = "22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw"
NFS = "40 22 0:51 / /mnt/all\\040jobs rw shared:9 master:1 - nfs4 store:/jobs rw,vers=4.2"


def mount(tree: HostTree, *lines: str) -> None:
    tree.write("proc/self/mountinfo", "\n".join((ROOT, *lines)) + "\n")


def disks(tree: HostTree, **lines: tuple[str, int, int]) -> None:
    """By name: the numbers, how many writes have ended, and how long all of them took, in milliseconds."""
    text = "".join(
        f" {numbers} {name.replace('_', '-')} 0 0 0 0 {writes} 0 0 {waited_ms} 0 0 0\n"
        for name, (numbers, writes, waited_ms) in lines.items()
    )
    tree.write("proc/diskstats", text)


MOUNTS = {
    "a partition": ("/scratch/run", "30 22 8:17 / /scratch rw - xfs /dev/sdb1 rw"),
    "the nearest of several above it": ("/scratch/run/7", "30 22 8:17 / /scratch/run rw - xfs /dev/sdb1 rw"),
    "a logical volume with a number of its own": ("/data", "30 22 0:37 /jobs /data rw - btrfs /dev/mapper/fast rw"),
    "the newest of two on one point": (
        "/data",
        "30 22 259:2 / /data rw - ext4 /dev/nvme0n1p2 rw\n31 30 8:17 / /data rw - xfs /dev/sdb1 rw",
    ),
}


@pytest.mark.parametrize("of", MOUNTS)
def test_the_requests_are_those_of_the_disk_below_the_folder(tree: HostTree, of: str) -> None:
    folder, line = MOUNTS[of]
    mount(tree, line)
    tree.write("dev/sdb1", "")
    (tree.root / "dev/mapper").mkdir()
    (tree.root / "dev/mapper/fast").symlink_to("../sdb1")
    disk = PathDisk(tree.root, tree.root)
    disks(tree, nvme0n1p2=("259 2", 10, 10), sdb1=("8 17", 10, 10))
    assert disk.request_s(folder) is None
    disks(tree, nvme0n1p2=("259 2", 999, 999), sdb1=("8 17", 30, 2_010))
    assert disk.request_s(folder) == pytest.approx(0.1)
    assert disk.request_s(folder) is None


def test_where_the_folder_comes_to_lie_on_another_disk_their_counts_are_not_compared(tree: HostTree) -> None:
    """A folder whose name only begins like the mount point is not on it."""
    mount(tree)
    disk, beside = PathDisk(tree.root, tree.root), PathDisk(tree.root, tree.root)
    disks(tree, nvme0n1p2=("259 2", 1, 1), sdb1=("8 17", 900, 90_000))
    assert (disk.request_s("/data"), beside.request_s("/data2")) == (None, None)
    mount(tree, "30 22 8:17 / /data rw - xfs /dev/sdb1 rw")
    disks(tree, nvme0n1p2=("259 2", 2, 6), sdb1=("8 17", 901, 99_000))
    assert (disk.request_s("/data"), beside.request_s("/data2")) == (None, 0.005)


@pytest.mark.parametrize(
    "source",
    ["ceph 10.0.0.1:/sdb1 rw", "cifs //files/sdb1 rw", "tmpfs tmpfs rw", "overlay overlay rw", "nfs4 store:/jobs rw"],
)
def test_a_file_system_without_a_disk_or_counts_says_nothing(tree: HostTree, source: str) -> None:
    mount(tree, f"30 22 0:44 / /data rw - {source}")
    disk = PathDisk(tree.root, tree.root)
    for count in (0, 10):
        disks(tree, sdb1=("8 17", count, count))
        assert disk.request_s("/data/run") is None


def test_an_nfs_server_is_timed_by_reads_and_writes_of_this_mount(tree: HostTree) -> None:
    mount(tree, NFS)
    disk = PathDisk(tree.root, tree.root)

    def answered(reads: int, writes: int, execute_ms: int) -> None:
        lines = (
            "device /dev/nvme0n1p2 mounted on / with fstype ext4",
            "device store:/jobs mounted on /mnt/all\\040jobs with fstype nfs4 statvers=1.1",
            "\tage:\t100",
            "\tper-op statistics",
            "\t        NULL: 1 1 0 44 24 0 0 9999 0",
            f"\t        READ: {reads} {reads} 0 5 5 0 1 0 0",
            f"\t       WRITE: {writes} {writes} 0 5 5 3 7 {execute_ms} 0",
            "device store:/home mounted on /home with fstype nfs4 statvers=1.1",
            "\t        READ: 9 9 0 5 5 0 1 9999 0",
        )
        tree.write("proc/self/mountstats", "\n".join(lines) + "\n")

    answered(10, 10, 100)
    assert disk.request_s("/mnt/all jobs/7") is None
    answered(20, 20, 1_100)
    assert disk.request_s("/mnt/all jobs/7") == pytest.approx(0.05)


def test_the_sampler_tells_of_the_checkpoints_disk_once_one_was_saved(tree: HostTree) -> None:
    mount(tree)
    disks(tree, nvme0n1p2=("259 2", 0, 0))
    sampler = HostSampler(tree.root, FakeClock(), tree.root)
    assert not any(name.startswith("checkpoint") for name in sampler.sample()[0].counters)
    sampler.watch_checkpoints("/data", 5_000)
    assert sampler.sample()[0].counters["checkpoint_free_bytes"] == 5_000
    disks(tree, nvme0n1p2=("259 2", 4, 8))
    assert sampler.sample()[0].counters["checkpoint_request_s"] == 0.002


AWS, GCP = "/latest/meta-data", "/computeMetadata/v1/instance"
AZURE = "/metadata/scheduledevents?api-version=2020-07-01"


class Metadata:
    """A metadata service; `answers` has its bodies by path, all else is 404."""

    def __init__(self) -> None:
        self.answers: dict[str, str] = {}
        self.headers: dict[str, dict[str, str]] = {}
        reported = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                reported.headers[self.path] = {name.lower(): value for name, value in self.headers.items()}
                body = reported.answers.get(self.path)
                self.send_response(404 if body is None else 200)
                self.end_headers()
                self.wfile.write((body or "").encode())

            def do_PUT(self) -> None:
                self.do_GET()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.base = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[Metadata]:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # must not be asked
    service = Metadata()
    yield service
    service.close()


def test_an_interrupted_spot_instance_and_scheduled_events_of_aws(metadata: Metadata) -> None:
    metadata.answers["/latest/api/token"] = "secret"
    assert on_aws(metadata.base) is None
    when = "21 Jan 2027 09:00:43 GMT"
    stop = {"Code": "instance-stop", "State": "active", "NotBefore": when, "Description": "retired"}
    events = [{"Code": "system-reboot", "State": "completed"}, stop]
    metadata.answers[f"{AWS}/events/maintenance/scheduled"] = json.dumps(events)
    reported = {"what": "maintenance", "action": "instance-stop", "at": when, "detail": "retired"}
    assert on_aws(metadata.base) == reported
    metadata.answers[f"{AWS}/spot/instance-action"] = json.dumps({"action": "terminate", "time": when})
    assert on_aws(metadata.base) == {"what": "preemption", "action": "terminate", "at": when}
    assert metadata.headers[f"{AWS}/spot/instance-action"]["x-aws-ec2-metadata-token"] == "secret"


def test_preemption_and_maintenance_of_google(metadata: Metadata) -> None:
    metadata.answers |= {f"{GCP}/preempted": "FALSE", f"{GCP}/maintenance-event": "NONE"}
    assert on_gcp(metadata.base) is None
    metadata.answers[f"{GCP}/maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
    assert on_gcp(metadata.base) == {"what": "maintenance", "action": "TERMINATE_ON_HOST_MAINTENANCE"}
    metadata.answers[f"{GCP}/preempted"] = "TRUE"
    assert on_gcp(metadata.base) == {"what": "preemption", "action": "terminate"}
    assert metadata.headers[f"{GCP}/preempted"]["metadata-flavor"] == "Google"


def test_events_of_this_machine_of_azure_and_what_ends_it_first(metadata: Metadata) -> None:
    metadata.answers["/metadata/instance/compute/name?api-version=2021-02-01&format=text"] = "vm-3"
    metadata.answers[AZURE] = json.dumps({"DocumentIncarnation": 1, "Events": []})
    assert on_azure(metadata.base) is None
    when = "Mon, 19 Sep 2027 18:29:47 GMT"
    other = {"EventType": "Preempt", "Resources": ["vm-1"], "NotBefore": when}
    freeze = {"EventType": "Freeze", "Resources": ["vm-1", "vm-3"], "NotBefore": when}
    metadata.answers[AZURE] = json.dumps({"Events": [other]})
    assert on_azure(metadata.base) is None
    preempt = {"EventType": "Preempt", "Resources": ["vm-3"], "NotBefore": when, "Description": "evicted"}
    metadata.answers[AZURE] = json.dumps({"Events": [other, freeze, preempt]})
    assert on_azure(metadata.base) == {"what": "preemption", "action": "Preempt", "at": when, "detail": "evicted"}
    metadata.answers[AZURE] = json.dumps({"Events": [freeze]})
    assert on_azure(metadata.base) == {"what": "maintenance", "action": "Freeze", "at": when, "detail": ""}


def test_a_notice_is_reported_each_minute_and_its_withdrawal_once_and_silence_changes_nothing(caplog):
    said: list[Notice | Exception | None] = []

    def look() -> Notice | None:
        answer = said.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    caplog.set_level("INFO")
    clock = FakeClock()
    notices = CloudNotices("fake", clock, {"fake": look})
    preempted: Notice = {"what": "preemption"}
    for answer in (None, preempted, preempted, OSError("no route"), ValueError("not JSON"), preempted):
        said.append(answer)
        notices.look()
    assert [event.fields for event in notices.take_events()] == [{"what": "preemption"}]
    assert caplog.text.count("does not answer") == 1
    clock.advance(TELL_AGAIN_S)
    for answer in (preempted, None, None):
        said.append(answer)
        notices.look()
    assert [event.fields for event in notices.take_events()] == [{"what": "preemption"}, {"what": ""}]
    assert notices.take_events() == []


@pytest.mark.parametrize("provider", ["", "elsewhere"])
def test_without_a_known_provider_nobody_is_asked(provider: str, caplog: pytest.LogCaptureFixture) -> None:
    notices = CloudNotices(provider, FakeClock())
    notices.start()
    notices.join(30)
    assert not notices.is_alive()
    assert ("elsewhere" in caplog.text) is bool(provider)
