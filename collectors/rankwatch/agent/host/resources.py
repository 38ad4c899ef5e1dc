"""Counters of the host as a whole: its processors, memory and disks, as the kernel counts them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from rankwatch.agent.host.files import as_number, known, rate, table_of, text_of

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

        told = dict[str, float | None]()
        for name in PRESSURES:
            told[name] = share(name, 1e-6)
        cpu_s = {name: counts.get(name, 0.0) - before.get(name, 0.0) for name in _CPU_TIMES}
        total = sum(cpu_s.values())
        if before and total > 0:
            told["cpu_utilization_ratio"] = 1 - sum(cpu_s[name] for name in _IDLE) / total
            told["cpu_steal_ratio"] = cpu_s["steal"] / total
        periods = rate(counts.get("periods"), before.get("periods"), seconds)
        throttled = rate(counts.get("throttled"), before.get("throttled"), seconds)
        if periods and throttled is not None:
            told["cpu_throttled_ratio"] = min(throttled / periods, 1.0)
        memory = table_of(self._proc / "meminfo")
        for name, key in (("memory_total_bytes", "MemTotal"), ("memory_available_bytes", "MemAvailable")):
            told[name] = memory[key] * KB if key in memory else None
        told["oom_kills"] = counts.get("oom_kills")
        told |= self._disks(counts, before, seconds)
        self._before, self._before_s = counts, now_s
        return known(told)

    def _counts(self) -> dict[str, float]:
        """What the kernel has counted since it started."""
        counts = dict[str, float | None]()
        for name, (file, line) in PRESSURES.items():
            found = re.search(rf"^{line} .*total=(\d+)", text_of(self._proc / "pressure" / file) or "", re.MULTILINE)
            counts[name] = float(found[1]) if found else None
        first = (text_of(self._proc / "stat") or "").partition("\n")[0].split()
        counts |= zip(_CPU_TIMES, map(as_number, first[1:]), strict=False)
        # The machine counts the kills of all its containers; those of this one are told by its own group.
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
        """Of the disk that is busiest, and of the one whose requests take longest."""
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
