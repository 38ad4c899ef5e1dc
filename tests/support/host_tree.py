"""The /proc and /sys of a host, written by tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rankwatch.agent.host import ERRORS, RETRANSMISSIONS


class HostTree:
    """A host that is idle and healthy, until a test writes something else.

    Args:
        root: folder to write into.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        for resource in ("cpu", "memory", "io"):
            self.pressure(resource)
        self.processors()
        self.write("proc/meminfo", f"MemTotal: {64 * 1024**2} kB\nMemAvailable: {32 * 1024**2} kB\n")
        self.write("proc/self/cgroup", "0::/\n")
        self.throttled(periods=0, throttled=0)
        self.killed(0)
        self.disk("nvme0n1", requests=0, waited_ms=0, busy_ms=0)

    def write(self, path: str, text: str) -> None:
        """Write one file."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh = file.with_name(f".{file.name}")  # a reader sees the old text or the new one
        fresh.write_text(text)
        fresh.replace(file)

    def pressure(self, resource: str, some_us: int = 0, full_us: int = 0) -> None:
        """Time in which some or all tasks waited, since the start."""
        head = "avg10=0.00 avg60=0.00 avg300=0.00"
        self.write(f"proc/pressure/{resource}", f"some {head} total={some_us}\nfull {head} total={full_us}\n")

    def processors(self, user: int = 0, idle: int = 0, steal: int = 0) -> None:
        """Ticks since the start."""
        self.write("proc/stat", f"cpu  {user} 0 0 {idle} 0 0 0 {steal} 0 0\ncpu0 0 0 0 0\n")

    def throttled(self, periods: int, throttled: int, folder: str = "") -> None:
        """Periods of the control group's processor limit, and those in which it was reached."""
        self.write(f"sys/fs/cgroup{folder}/cpu.max", "200000 100000\n")
        self.write(f"sys/fs/cgroup{folder}/cpu.stat", f"usage_usec 1\nnr_periods {periods}\nnr_throttled {throttled}\n")

    def killed(self, count: int) -> None:
        """Processes that the kernel killed for want of memory."""
        self.write("proc/vmstat", f"nr_free_pages 1\noom_kill {count}\n")

    def disk(self, name: str, requests: int, waited_ms: int, busy_ms: int) -> None:
        """The only line of /proc/diskstats."""
        self.write("proc/diskstats", f" 259 0 {name} {requests} 0 0 {waited_ms} 0 0 0 0 0 {busy_ms} 0 0 0 0 0\n")

    def ethernet(
        self,
        name: str,
        received: int = 0,
        errors: int = 0,
        downs: int = 0,
        state: str = "up",
        megabits: str = "100000",
        flags: str = "0x1003",
    ) -> None:
        """A port that is hardware."""
        folder = f"sys/class/net/{name}"
        files = {"operstate": state, "speed": megabits, "flags": flags, "carrier_down_count": downs}
        files |= {"statistics/rx_bytes": received, "statistics/tx_bytes": 0, "device/vendor": "0x15b3"}
        files |= {"statistics/rx_errors": errors, "statistics/tx_errors": 0}
        for file, text in files.items():
            self.write(f"{folder}/{file}", f"{text}\n")

    def rdma(
        self,
        card: str,
        words: int = 0,
        state: str = "4: ACTIVE",
        downs: int = 0,
        errors: Mapping[str, int] | None = None,
        lost: Mapping[str, int] | None = None,
    ) -> None:
        """The first port of an InfiniBand card."""
        folder = f"sys/class/infiniband/{card}/ports/1"
        counts = dict.fromkeys(ERRORS, 0) | {"link_downed": downs, "port_rcv_data": words, "port_xmit_data": 0}
        hardware = dict.fromkeys(RETRANSMISSIONS, 0) | {"np_cnp_sent": 0}
        files: dict[str, object] = {"state": state, "rate": "400 Gb/sec (4X NDR)"}
        files |= {f"counters/{name}": value for name, value in (counts | dict(errors or {})).items()}
        files |= {f"hw_counters/{name}": value for name, value in (hardware | dict(lost or {})).items()}
        for file, text in files.items():
            self.write(f"{folder}/{file}", f"{text}\n")
