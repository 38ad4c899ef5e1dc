"""What counters say of a device: judged by its own limits, and by devices of the same kind under the same load. Pure.

Stages and roles load devices differently from the first step on. So a device is compared with what it usually is among
its peers: its share of their median, which it learns while nothing is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from rankwatch_detectors.base import Bools, DeviceCounters, Floats, Severity
from rankwatch_detectors.state import Stateful

KIND: Final = "memory_total_bytes"
"""Devices with equal memory are taken for one kind: agents do not tell their names."""

FLAGS: Final = {"remap": "remap_failed", "pending": "remap_pending", "recovery": "recovery_action"}
"""By rule: counters by which the driver itself says that something is wrong, if they are not 0."""


@dataclass(frozen=True, slots=True)
class CounterRulesConfig:
    """Settings of the rules; a slot is 5 s."""

    busy: float = 0.9
    """Utilization from which on a device is compared: all of a job's devices are busy, also those that wait for others
    in a collective."""
    peers_min: int = 4
    """Busy devices of one kind without which none is compared."""
    power: float = 0.75
    """Power below this share of what is usual for the device: as the labels of MLPerf's power logs have it."""
    clock: float = 0.85
    """Clock below this share of what is usual for the device."""
    recovered: float = 0.9
    """From this share on it is over."""
    steady: float = 0.1
    """While the peers' own median is further off from its past, as in an evaluation, nobody is compared."""
    learning_slots: int = 24
    """Slots of a device, and of its peers, before it is compared; what is usual then follows over so many."""
    kinds_max: int = 16
    """Kinds of devices in a job; further ones are not compared."""
    held_slots: int = 5
    """Slots in a row after which it is told, and after which it is over: any half a minute has so many whole ones."""
    nvlink_errors: int = 3
    """Readings with new replays or recoveries of NVLinks, after which these are a warning."""
    quiet_slots: int = 30
    """Slots without new errors after which these are over."""
    warning_slots: int = 60
    """Slots after which a low clock is a warning. Low power alone never is: a device that has less to do draws less."""


@dataclass(frozen=True, slots=True)
class DeviceProblem:
    """Something that is wrong with a device, in the newest slot."""

    number: int
    """Of the device."""
    what: str
    """power, clock, link, margin, remap, pending, recovery, ecc or nvlink."""
    slots: int
    """Since how many slots it has been so; 0: it is over."""
    severity: Severity = Severity.INFO
    evidence: Mapping[str, Any] | None = None


class CounterRules(Stateful):
    """Judges a job's devices slot by slot. Memory: linear in devices."""

    STATE: ClassVar[tuple[str, ...]] = (
        "_slot",
        "_kind",
        "_held",
        "_since",
        "_calm",
        "_open",
        "_usual",
        "_seen",
        "_level",
        "_last",
        "_hit",
    )

    def __init__(self, config: CounterRulesConfig) -> None:
        self._config = config
        self._slot = -1
        self._kind: Floats = np.zeros(0)
        self._held: dict[str, Any] = {}
        """By rule and device: readings in a row in which it was bad."""
        self._since: dict[str, Any] = {}
        """By rule and device: the slot of the first of them; some counters are not read in every slot."""
        self._calm: dict[str, Any] = {}
        self._open: dict[str, Any] = {}
        self._usual: dict[str, Any] = {}
        """By rule and device: its usual share of its peers' median."""
        self._seen: dict[str, Any] = {}
        self._level: dict[str, list[float]] = {}
        """By rule and kind: usual median of the peers, and slots that it was learned from."""
        self._last: dict[str, Any] = {}
        """By counter and device: the newest value of a count; -1: none."""
        self._hit: dict[str, Any] = {}
        """By rule and device: the slot in which a count last rose."""

    def see(self, counters: DeviceCounters) -> Iterator[DeviceProblem]:
        """Take the next slot; one that is older than the newest is not judged.

        Returns:
            What is wrong with which device: in each slot as long as it lasts, and once when it is over.
        """
        if counters.slot <= self._slot:
            return
        self._slot = counters.slot
        size = len(counters.devices)
        kind, told = _column(counters, KIND, size)
        self._kind = _grown(self._kind, size)
        self._kind[told] = kind[told]
        use, told = _column(counters, "utilization_ratio", size)
        busy = ~told | (use >= self._config.busy)
        yield from self._below_peers("power", "power_w", self._config.power, math.inf, counters, busy)
        yield from self._below_peers(
            "clock", "sm_clock_hz", self._config.clock, self._config.warning_slots, counters, busy
        )
        yield from self._narrow_links(counters, busy)
        for what, name in FLAGS.items():
            value, told = _column(counters, name, size)
            yield from self._judge(what, told & (value > 0), told & (value == 0), 1, {name: value})
        value, told = _column(counters, "temperature_margin_celsius", size)
        evidence = {"temperature_margin_celsius": value}
        yield from self._judge("margin", told & (value <= 0), told & (value > 0), self._config.held_slots, evidence)
        yield from self._rising("ecc", ("ecc_uncorrected",), 1, counters)
        yield from self._rising(
            "nvlink", ("nvlink_replay_errors", "nvlink_recovery_errors"), self._config.nvlink_errors, counters
        )

    def _narrow_links(self, counters: DeviceCounters, busy: Bools) -> Iterator[DeviceProblem]:
        size = len(counters.devices)
        width, told = _column(counters, "pcie_width", size)
        widest, most_told = _column(counters, "pcie_width_max", size)
        told &= most_told
        evidence = {"pcie_width": width, "pcie_width_max": widest}
        narrow = told & (width < widest)
        yield from self._judge("link", narrow & busy, told & ~narrow, self._config.held_slots, evidence)

    def _below_peers(
        self, what: str, name: str, share: float, warning: float, counters: DeviceCounters, busy: Bools
    ) -> Iterator[DeviceProblem]:
        config, size = self._config, len(busy)
        value, told = _column(counters, name, size)
        usual = self._usual[what] = _grown(self._usual.get(what), size)
        seen = self._seen[what] = _grown(self._seen.get(what), size)
        bad, good = np.zeros(size, dtype=bool), np.zeros(size, dtype=bool)
        relative, peers = np.zeros(size), np.zeros(size)
        here = told & busy & (value > 0)
        for kind in np.unique(self._kind[here]):
            group = here & (self._kind == kind)
            if np.count_nonzero(group) < config.peers_min:
                continue
            level = float(np.median(value[group]))
            steady = self._is_steady(f"{what}/{kind:.0f}", level)
            relative[group], peers[group] = value[group] / level, level
            known = group & (seen >= config.learning_slots)
            well = ~known | (relative >= config.recovered * usual)
            if steady:
                bad |= known & (relative < share * usual)
                good |= known & well
            learn = group & well
            seen[learn] += 1
            usual[learn] += (relative - usual)[learn] / np.minimum(seen[learn], config.learning_slots)
        evidence = {name: value, f"peers_{name}": peers, f"usual_{name}": usual * peers}
        yield from self._judge(what, bad, good, config.held_slots, evidence, warning)

    def _is_steady(self, name: str, level: float) -> bool:
        """Whether the peers' median is near its own past."""
        if name not in self._level and len(self._level) >= 2 * self._config.kinds_max:
            return False
        usual, slots = self._level.get(name, [level, 0])
        slots += 1
        near = slots > self._config.learning_slots and abs(level - usual) <= self._config.steady * usual
        self._level[name] = [usual + (level - usual) / min(slots, self._config.learning_slots), slots]
        return near

    def _rising(
        self, what: str, names: Sequence[str], warning: int, counters: DeviceCounters
    ) -> Iterator[DeviceProblem]:
        """Counts of errors: each rise is told, and it is over when they have stood still for a while."""
        size = len(counters.devices)
        rise, read = np.zeros(size), np.zeros(size, dtype=bool)
        evidence = dict[str, Floats]()
        for name in names:
            evidence[name], told = _column(counters, name, size)
            last = self._last[name] = _grown(self._last.get(name), size, -1.0)
            rise += np.where(told & (last >= 0), np.maximum(evidence[name] - last, 0), 0)
            last[told] = evidence[name][told]
            read |= told
        held = self._held[what] = _grown(self._held.get(what), size)
        hit = self._hit[what] = _grown(self._hit.get(what), size)
        over = read & (rise == 0) & (held > 0) & (counters.slot - hit >= self._config.quiet_slots)
        held[over] = 0
        held[rise > 0] += 1
        hit[rise > 0] = counters.slot
        for number in np.flatnonzero(over).tolist():
            yield DeviceProblem(number, what, 0)
        for number in np.flatnonzero(rise > 0).tolist():
            severity = Severity.WARNING if held[number] >= warning else Severity.INFO
            figures = {name: float(f"{value[number]:.6g}") for name, value in evidence.items()}
            yield DeviceProblem(number, what, 1, severity, {**figures, "new_errors": float(rise[number])})

    def _judge(
        self, what: str, bad: Bools, good: Bools, hold: int, figures: Mapping[str, Floats], warning: float = 0
    ) -> Iterator[DeviceProblem]:
        """Devices that are neither bad nor good stay as they are: they were not read, or nothing can be said."""
        held = self._held[what] = _grown(self._held.get(what), len(bad))
        calm = self._calm[what] = _grown(self._calm.get(what), len(bad))
        is_open = self._open[what] = _grown(self._open.get(what), len(bad))
        since = self._since[what] = _grown(self._since.get(what), len(bad))
        since[bad & (held == 0)] = self._slot
        held[bad] += 1
        calm[bad] = 0
        calm[good] += 1
        held[good & (is_open == 0)] = 0
        over = good & (is_open > 0) & (calm >= hold)
        held[over] = is_open[over] = 0
        is_open[bad & (held >= hold)] = 1
        for number in np.flatnonzero(over).tolist():
            yield DeviceProblem(number, what, 0)
        for number in np.flatnonzero(bad & (is_open > 0)).tolist():
            slots = self._slot - int(since[number]) + 1
            severity = Severity.WARNING if slots >= warning else Severity.INFO
            evidence = {name: float(f"{value[number]:.6g}") for name, value in figures.items()}
            yield DeviceProblem(number, what, slots, severity, evidence)


def _column(counters: DeviceCounters, name: str, size: int) -> tuple[Floats, Bools]:
    """A counter of all devices, and who told a finite value."""
    if name not in counters.values:
        return np.zeros(size), np.zeros(size, dtype=bool)
    told = counters.present[name] & np.isfinite(counters.values[name])
    return np.where(told, counters.values[name], 0.0), told


def _grown(array: Any, size: int, fill: float = 0.0) -> Floats:
    """The array with room for so many devices."""
    grown = np.full(size, fill)
    if array is not None:
        grown[: len(array)] = array
    return grown
