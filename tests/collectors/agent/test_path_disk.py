"""The time of requests to the disk of the checkpoints: which disk is below a folder, and what it counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankwatch.agent.host import HostSampler, PathDisk
from tests.support.clock import FakeClock
from tests.support.host.tree import HostTree

ROOT = "22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw"
NFS = "40 22 0:51 / /mnt/all\\040jobs rw shared:9 master:1 - nfs4 store:/jobs rw,vers=4.2"


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    return HostTree(tmp_path)


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


def test_a_folder_whose_name_begins_like_a_mount_point_is_not_on_it(tree: HostTree) -> None:
    mount(tree, "30 22 8:17 / /data rw - xfs /dev/sdb1 rw")
    disk = PathDisk(tree.root, tree.root)
    disks(tree, nvme0n1p2=("259 2", 0, 0), sdb1=("8 17", 0, 0))
    disk.request_s("/data2")
    disks(tree, nvme0n1p2=("259 2", 1, 5), sdb1=("8 17", 1, 9_000))
    assert disk.request_s("/data2") == 0.005


def test_where_the_folder_comes_to_lie_on_another_disk_their_counts_are_not_compared(tree: HostTree) -> None:
    mount(tree)
    disk = PathDisk(tree.root, tree.root)
    disks(tree, nvme0n1p2=("259 2", 1, 1), sdb1=("8 17", 900, 90_000))
    disk.request_s("/data")
    mount(tree, "30 22 8:17 / /data rw - xfs /dev/sdb1 rw")
    assert disk.request_s("/data") is None


@pytest.mark.parametrize(
    "line",
    [
        "30 22 0:44 / /data rw - ceph 10.0.0.1:/sdb1 rw",
        "30 22 0:44 / /data rw - cifs //files/sdb1 rw",
        "30 22 0:44 / /data rw - tmpfs tmpfs rw",
        "30 22 0:44 / /data rw - overlay overlay rw",
        NFS.replace("/mnt/all\\040jobs", "/data"),
    ],
)
def test_a_file_system_without_a_disk_or_counts_says_nothing(tree: HostTree, line: str) -> None:
    mount(tree, line)
    disk = PathDisk(tree.root, tree.root)
    for count in (0, 10):
        disks(tree, sdb1=("8 17", count, count))
        assert disk.request_s("/data/run") is None


def test_a_host_without_these_files_says_nothing(tmp_path: Path) -> None:
    assert PathDisk(tmp_path, tmp_path).request_s("/data") is None


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
