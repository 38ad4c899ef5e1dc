"""Counters of the host itself and of its network ports, from /proc and /sys.

Small files of /proc and /sys as numbers. What is missing, unreadable or of another form is None.

Counters of the host as a whole: its processors, memory and disks, as the kernel counts them.

Counters of the host's network ports: of Ethernet devices that are hardware, and of InfiniBand and RoCE ports.

How long requests to the disk below one folder take: the folder in which a job saves its checkpoints.

Reads the counters of the host and its network ports in a thread: a file that does not answer stops it alone.

What can be read of this host and its network ports, as JSON: a process of its own for `rankwatch doctor`.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from rankwatch import wire
from rankwatch.agent.clock import AgentClock


def missing_under(root: Path) -> list[str]:
    """Which of /proc and /sys are not under this folder; nothing that they contain can be reported."""
    return [name for name, some in (("proc", "proc/stat"), ("sys", "sys/class/net")) if not (root / some).exists()]


def text_of(path: Path) -> str | None:
    """The content without the white space around it; None if it cannot be read, as some cannot while a link is down."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def number_of(path: Path) -> float | None:
    """The content as a number."""
    return as_number(text_of(path))


def as_number(text: str | None) -> float | None:
    """The number that a text is."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def table_of(path: Path) -> dict[str, float]:
    """Lines of "name value" or "name: value unit", such as /proc/meminfo has them, by name."""
    found = {}
    for line in (text_of(path) or "").splitlines():
        words = line.replace(":", " ").split()
        if len(words) > 1 and (value := as_number(words[1])) is not None:
            found[words[0]] = value
    return found


def rate(now: float | None, before: float | None, seconds: float) -> float | None:
    """What a count has grown by in a second; None if it is not known, or began anew."""
    if now is None or before is None or now < before or seconds <= 0:
        return None
    return (now - before) / seconds


def known(counters: dict[str, float | None]) -> dict[str, float]:
    """The counters that could be read."""
    return {name: value for name, value in counters.items() if value is not None}


PRESSURES: Final = {
    "cpu_pressure_ratio": ("cpu", "some"),
    "memory_pressure_ratio": ("memory", "full"),
    "io_pressure_ratio": ("io", "full"),
}
"""By counter: file of /proc/pressure and line of it. *some*: the share of time in which a task waited for it; *full*:
in which all tasks that were not idle did."""
_DISK: Final = re.compile(r"(?:[shv]d[a-z]+|xvd[a-z]+|nvme\d+n\d+|mmcblk\d+)$")
"""Whole disks, without their partitions and what is stacked on them."""
_CPU_TIMES: Final = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
_IDLE: Final = ("idle", "iowait")
KB: Final = 1024


class HostResources:
    """Reads the counters; shares of time are those since the reading before, so that the first one has none.

    Args:
        root: folder in which the host's /proc is.
        own: folder in which this process's own /proc and /sys are, where its control group is looked for.
    """

    def __init__(self, root: Path, own: Path) -> None:
        self._proc = root / "proc"
        groups = _groups(own)
        self._cpu_group = _limited(groups, "cpu.max")
        self._memory_group = _limited(groups, "memory.max")
        self._before: dict[str, float] = {}
        self._before_s = 0.0

    def read(self, now_s: float) -> dict[str, float]:
        """The counters that this host has, by name; units are part of the names.

        Args:
            now_s: of a clock that never goes back.
        """
        counts = self._counts()
        before, seconds = self._before, now_s - self._before_s

        def share(name: str, of_s: float = 1.0) -> float | None:
            found = rate(counts.get(name), before.get(name), seconds)
            return None if found is None else min(found * of_s, 1.0)

        reported = dict[str, float | None]()
        for name in PRESSURES:
            reported[name] = share(name, 1e-6)
        cpu_s = {name: counts.get(name, 0.0) - before.get(name, 0.0) for name in _CPU_TIMES}
        total = sum(cpu_s.values())
        if before and total > 0:
            reported["cpu_utilization_ratio"] = 1 - sum(cpu_s[name] for name in _IDLE) / total
            reported["cpu_steal_ratio"] = cpu_s["steal"] / total
        periods = rate(counts.get("periods"), before.get("periods"), seconds)
        throttled = rate(counts.get("throttled"), before.get("throttled"), seconds)
        if periods and throttled is not None:
            reported["cpu_throttled_ratio"] = min(throttled / periods, 1.0)
        memory = table_of(self._proc / "meminfo")
        for name, key in (("memory_total_bytes", "MemTotal"), ("memory_available_bytes", "MemAvailable")):
            reported[name] = memory[key] * KB if key in memory else None
        reported["oom_kills"] = counts.get("oom_kills")
        reported |= self._disks(counts, before, seconds)
        self._before, self._before_s = counts, now_s
        return known(reported)

    def _counts(self) -> dict[str, float]:
        """What the kernel has counted since it started."""
        counts = dict[str, float | None]()
        for name, (file, line) in PRESSURES.items():
            found = re.search(rf"^{line} .*total=(\d+)", text_of(self._proc / "pressure" / file) or "", re.MULTILINE)
            counts[name] = float(found[1]) if found else None
        first = (text_of(self._proc / "stat") or "").partition("\n")[0].split()
        counts |= zip(_CPU_TIMES, map(as_number, first[1:]), strict=False)
        # The machine counts the kills of all its containers; those of this one are counted by its own group.
        if self._memory_group is not None:
            counts["oom_kills"] = table_of(self._memory_group / "memory.events").get("oom_kill")
        else:
            counts["oom_kills"] = table_of(self._proc / "vmstat").get("oom_kill")
        if self._cpu_group is not None:
            usage = table_of(self._cpu_group / "cpu.stat")
            counts["periods"], counts["throttled"] = usage.get("nr_periods"), usage.get("nr_throttled")
        for line in (text_of(self._proc / "diskstats") or "").splitlines():
            words = line.split()
            if len(words) >= 14 and _DISK.match(words[2]):
                figures = [as_number(word) or 0.0 for word in words[3:14]]
                disk = f"disk {words[2]}"
                counts[f"{disk} done"], counts[f"{disk} waited_ms"] = figures[0] + figures[4], figures[3] + figures[7]
                counts[f"{disk} busy_ms"] = figures[9]
        return known(counts)

    def _disks(self, counts: dict[str, float], before: dict[str, float], seconds: float) -> dict[str, float | None]:
        """Counters of the busiest disk, and of the one whose requests take longest."""
        busy, waits = list[float](), list[float]()
        for disk in {name.removesuffix(" done") for name in counts if name.endswith(" done")}:
            used, done, waited = (
                rate(counts[f"{disk} {what}"], before.get(f"{disk} {what}"), seconds)
                for what in ("busy_ms", "done", "waited_ms")
            )
            if used is not None:
                busy.append(min(used / 1e3, 1.0))
            if done and waited is not None:
                waits.append(waited / done / 1e3)
        return {"disk_busy_ratio": max(busy, default=None), "disk_request_s": max(waits, default=None)}


def _groups(root: Path) -> list[Path]:
    """The control groups (version 2) above this process, nearest first."""
    top = root / "sys/fs/cgroup"
    for line in (text_of(root / "proc/self/cgroup") or "").splitlines():
        if line.startswith("0::/"):
            # A container may see its own group as the top, whatever the line says.
            parts = Path(line[4:]).parts
            return [top.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return []


def _limited(groups: list[Path], file: str) -> Path | None:
    """The nearest group that limits this resource."""
    return next((group for group in groups if not (text_of(group / file) or "max").startswith("max")), None)


PORTS_MAX: Final = 64
"""Ports read on one host: four times what the largest servers have."""
WORD_BYTES: Final = 4
"""InfiniBand counts data in words."""

ERRORS: Final = (
    "symbol_error",
    "port_rcv_errors",
    "port_rcv_remote_physical_errors",
    "local_link_integrity_errors",
    "link_error_recovery",
)
"""Counters of an RDMA port that rise with a bad cable, transceiver or switch port; congestion raises none of them."""
RETRANSMISSIONS: Final = (
    "out_of_sequence",
    "packet_seq_err",
    "local_ack_timeout_err",
    "rnr_nak_retry_err",
    "roce_adp_retrans",
)
"""Hardware counters of an RDMA port that rise as packets are lost on the way, or their receiver is not ready."""
_GIGABITS: Final = re.compile(r"([\d.]+) Gb/sec")


class NetworkPorts:
    """Reads the counters of each port in use; rates are those since the reading before, so that the first one has none.

    Args:
        root: folder in which the host's /sys is.
    """

    def __init__(self, root: Path) -> None:
        self._ethernet_folder = root / "sys/class/net"
        self._rdma_folder = root / "sys/class/infiniband"
        self._before: dict[str, dict[str, float]] = {}
        self._before_s = 0.0
        self._was_up: set[str] = set()
        self._summed: dict[Path, tuple[Path, ...]] = {}
        """The counts that were there at the first reading, by folder."""
        self.left_out = 0
        """Ports in use for which there was no room."""

    def read(self, now_s: float) -> dict[str, dict[str, float]]:
        """By port (eth0, mlx5_0/1): the counters that it has, by name; units are part of the names.

        A port that was up once is reported as down as long as it is anything else.

        Args:
            now_s: of a clock that never goes back.
        """
        reported, seconds = dict[str, dict[str, float]](), now_s - self._before_s
        counts = {**{port: {"link_up": 0.0} for port in sorted(self._was_up)}, **self._counts()}
        self.left_out = max(0, len(counts) - PORTS_MAX)
        for port, now in list(counts.items())[:PORTS_MAX]:
            before = self._before.get(port, {})
            rates = {f"{name}_per_s": rate(now.get(name), before.get(name), seconds) for name in _RATES}
            reported[port] = {name: value for name, value in now.items() if name not in _RATES} | known(rates)
            if now.get("link_up"):
                self._was_up.add(port)
        self._before, self._before_s = counts, now_s
        return reported

    def _counts(self) -> dict[str, dict[str, float]]:
        """Counters of the ports in use; ports of collectives come first."""
        found = dict[str, dict[str, float]]()
        for card in _below(self._rdma_folder):
            for port in _below(card / "ports"):
                found[f"{card.name}/{port.name}"] = self._rdma(port)
        for folder in _below(self._ethernet_folder):
            if (folder / "device").exists():
                found[folder.name] = self._ethernet(folder)
        return {name: counters for name, counters in found.items() if counters}

    def _ethernet(self, folder: Path) -> dict[str, float]:
        """Nothing of a port that nobody has enabled, or that has no cable."""
        state, flags = text_of(folder / "operstate"), text_of(folder / "flags") or ""
        if flags[-1:] in _NOT_ENABLED or state not in ("up", "unknown"):
            return {}
        megabits = number_of(folder / "speed")
        statistics = folder / "statistics"
        return known(
            {
                # Some drivers do not report it.
                "link_up": 1.0 if state == "up" else None,
                "link_bits_per_s": megabits * 1e6 if megabits is not None and 0 < megabits < _UNKNOWN_SPEED else None,
                "link_downs": number_of(folder / "carrier_down_count"),
                "received_bytes": number_of(statistics / "rx_bytes"),
                "sent_bytes": number_of(statistics / "tx_bytes"),
                "port_errors": self._sum(statistics, ("rx_errors", "tx_errors")),
            }
        )

    def _rdma(self, folder: Path) -> dict[str, float]:
        """State "4: ACTIVE", rate "400 Gb/sec (4X NDR)"."""
        if as_number((text_of(folder / "state") or "").partition(":")[0]) != _ACTIVE:
            return {}
        gigabits = _GIGABITS.match(text_of(folder / "rate") or "")
        counters, hardware = folder / "counters", folder / "hw_counters"
        received, sent = number_of(counters / "port_rcv_data"), number_of(counters / "port_xmit_data")
        return known(
            {
                "link_up": 1.0,
                "link_bits_per_s": float(gigabits[1]) * 1e9 if gigabits else None,
                "link_downs": number_of(counters / "link_downed"),
                "received_bytes": None if received is None else received * WORD_BYTES,
                "sent_bytes": None if sent is None else sent * WORD_BYTES,
                "port_errors": self._sum(counters, ERRORS),
                "retransmissions": self._sum(hardware, RETRANSMISSIONS),
                "congestion_notifications": number_of(hardware / "np_cnp_sent"),
            }
        )

    def _sum(self, folder: Path, names: tuple[str, ...]) -> float | None:
        """The sum of the counts that there are; None while one of them cannot be read: the sum must not jump."""
        if folder not in self._summed:
            self._summed[folder] = tuple(folder / name for name in names if number_of(folder / name) is not None)
        found = [number_of(path) for path in self._summed[folder]]
        whole = [value for value in found if value is not None]
        return sum(whole) if whole and len(whole) == len(found) else None


_RATES: Final = ("received_bytes", "sent_bytes", "retransmissions", "congestion_notifications")
_NOT_ENABLED: Final = frozenset("02468ace")
"""Last hexadecimal digits of flags without their lowest bit, IFF_UP."""
_UNKNOWN_SPEED: Final = 2**31
_ACTIVE: Final = 4


def _below(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


_OCTAL: Final = re.compile(r"\\([0-7]{3})")
_NFS: Final = frozenset({"nfs", "nfs4"})
_MOUNT_POINT, _DEVICE = 4, 2
"""Fields of a line of mountinfo."""


class _FileSystem(NamedTuple):
    point: str
    """As the kernel writes it, with white space as octal numbers."""
    device: str
    """Major and minor number."""
    kind: str
    source: str


class _Requests(NamedTuple):
    """Since the file system was mounted, or the host started."""

    disk: str
    done: float
    waited_ms: float


class PathDisk:
    """Reads the mean time of requests to the disk, partition or volume below a folder, or to its NFS server.

    Args:
        root: folder in which the host's /proc is.
        own: folder in which this process's own /proc and /dev are: it sees the folder as this process does.
    """

    def __init__(self, root: Path, own: Path) -> None:
        self._diskstats = root / "proc/diskstats"
        self._own = own
        self._before: _Requests | None = None

    def request_s(self, folder: str) -> float | None:
        """Mean seconds of the requests that ended since the call before.

        Args:
            folder: absolute, without symbolic links.

        Returns:
            None if there were none, the folder has come to lie on another disk, or its file system does not tell.
        """
        now, before = self._requests(folder), self._before
        self._before = now
        if now is None or before is None or now.disk != before.disk:
            return None
        done, waited_ms = now.done - before.done, now.waited_ms - before.waited_ms
        return waited_ms / done / 1e3 if done > 0 and waited_ms >= 0 else None

    def _requests(self, folder: str) -> _Requests | None:
        mount = self._mount_of(folder)
        if mount is None:
            return None
        return self._requests_by_nfs(mount) if mount.kind in _NFS else self._requests_of_disk(mount)

    def _mount_of(self, folder: str) -> _FileSystem | None:
        """The file system that the folder is on: of the longest mount point above it, the newest mount."""
        found: _FileSystem | None = None
        for line in (text_of(self._own / "proc/self/mountinfo") or "").splitlines():
            head, _, tail = line.partition(" - ")
            fields, kind_and_source = head.split(), tail.split()
            if len(fields) <= _MOUNT_POINT or len(kind_and_source) < 2:
                continue
            point = fields[_MOUNT_POINT]
            is_above = Path(folder).is_relative_to(_as_path(point))
            if is_above and (found is None or len(_as_path(point)) >= len(_as_path(found.point))):
                found = _FileSystem(point, fields[_DEVICE], *kind_and_source[:2])
        return found

    def _requests_of_disk(self, mount: _FileSystem) -> _Requests | None:
        # Some file systems, such as btrfs, have a device number of their own: their disk is known by its name alone.
        source = _as_path(mount.source)
        name = (self._own / source[1:]).resolve().name if source.startswith("/dev/") else ""
        for line in (text_of(self._diskstats) or "").splitlines():
            words = line.split()
            if len(words) < 11 or (":".join(words[:2]) != mount.device and words[2] != name):
                continue
            reads, _, _, reading_ms, writes, _, _, writing_ms = (as_number(word) or 0.0 for word in words[3:11])
            return _Requests(words[2], reads + writes, reading_ms + writing_ms)
        return None

    def _requests_by_nfs(self, mount: _FileSystem) -> _Requests | None:
        """Reads and writes, from when they were queued until they were answered."""
        done, waited_ms, is_it = 0.0, 0.0, False
        for line in (text_of(self._own / "proc/self/mountstats") or "").splitlines():
            words = line.split()
            if words[:1] == ["device"]:
                is_it = words[1:5] == [mount.source, "mounted", "on", mount.point]
            elif is_it and words[:1] in (["READ:"], ["WRITE:"]) and len(words) > 8:
                done += as_number(words[1]) or 0.0
                waited_ms += as_number(words[8]) or 0.0
        return _Requests(mount.source, done, waited_ms) if done else None


def _as_path(text: str) -> str:
    return _OCTAL.sub(lambda found: chr(int(found[1], 8)), text)


_log = logging.getLogger(__name__)

READ_EVERY_S: Final = 2.5
"""Twice in each slot of the service's series."""


class HostSampler(threading.Thread):
    """Has the newest counters of this host and its network ports.

    Args:
        root: folder in which the host's /proc and /sys are: "/" except in a container that has them elsewhere.
        clock: for shares of time and the time of samples.
        own: folder in which this process's own /proc and /sys are.
    """

    def __init__(self, root: Path, clock: AgentClock, own: Path = Path("/")) -> None:
        super().__init__(name="host", daemon=True)
        self._root = root
        self._resources = HostResources(root, own)
        self._ports = NetworkPorts(root)
        self._disk = PathDisk(root, own)
        self._checkpoints: tuple[str, int] | None = None
        self._clock = clock
        self._closed = threading.Event()
        self._samples: tuple[wire.HostDeviceSample, ...] = ()

    def take(self) -> tuple[wire.HostDeviceSample, ...]:
        """The newest counters, once; empty if none were read since the last call."""
        samples, self._samples = self._samples, ()
        return samples

    def watch_checkpoints(self, folder: str, free_bytes: int) -> None:
        """From now on report the disk on which the job saves its checkpoints.

        Args:
            folder: in which it saves; absolute, without symbolic links.
            free_bytes: of its file system, which may be too slow to be asked here.
        """
        self._checkpoints = folder, free_bytes

    def close(self) -> None:
        """Read no more."""
        self._closed.set()

    def run(self) -> None:
        """Read once, and until closed. Not for callers."""
        for name in missing_under(self._root):
            _log.warning(
                "%s has no %s: its counters are not reported (RANKWATCH_HOST_ROOT names the folder)", self._root, name
            )
        self._samples = self.sample()
        while not self._closed.wait(READ_EVERY_S):
            self._samples = self.sample()

    def sample(self) -> tuple[wire.HostDeviceSample, ...]:
        """Read everything once: of the host, then of each port that is or was in use."""
        now_s, unix_ns = self._clock.monotonic_s(), self._clock.unix_ns()
        host = self._resources.read(now_s)
        ports = self._ports.read(now_s)
        if self._ports.left_out:
            host["ports_left_out"] = float(self._ports.left_out)
        if self._checkpoints is not None:
            folder, free_bytes = self._checkpoints
            host["checkpoint_free_bytes"] = float(free_bytes)
            host |= known({"checkpoint_request_s": self._disk.request_s(folder)})
        read = [(wire.HOST, "", host), *((wire.PORT, name, counters) for name, counters in ports.items())]
        return tuple(wire.HostDeviceSample(kind, name, unix_ns, counters) for kind, name, counters in read if counters)


class HostSurvey(msgspec.Struct, frozen=True):
    """A host, as JSON for `rankwatch doctor`."""

    missing: tuple[str, ...]
    """Those of /proc and /sys that are not under the folder."""
    counters: tuple[str, ...]
    """Counters of the host that one reading has; rates need two."""
    ports: tuple[str, ...]
    """Those in use."""


def survey(root: Path) -> HostSurvey:
    """Read everything once; `root` as for `HostSampler`."""
    counters = HostResources(root, Path("/")).read(0.0)
    return HostSurvey(tuple(missing_under(root)), tuple(counters), tuple(NetworkPorts(root).read(0.0)))


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(survey(Path(sys.argv[1]))))
