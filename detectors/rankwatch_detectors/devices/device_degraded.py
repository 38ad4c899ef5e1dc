"""Reports devices that the hardware throttles, because of heat or its power supply, and those whose counters say that
they do less than they can, or than their peers.

Agents report once a minute which of their devices are throttled, and when it is over. It is information from the first
whole minute on, so that a slow rank has its cause, and a warning once it was so in six of ten minutes, whether or not
training has felt it yet. Counters are judged by `GpuRules`: by the device's own limits, and by devices of the same kind
under the same load. Stages and roles load devices differently from the first step on. So a device is compared with what
it usually is among its peers: its share of their median, which it learns while nothing is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np

from rankwatch_detectors.base import Bools, DeviceCounters, Finding, Floats, Kind, Occurrence, Severity
from rankwatch_detectors.devices.counter_detector import (
    MINUTE_S,
    SLOT_S,
    CounterDetector,
    DeviceProblem,
    HeldRules,
    column,
    grown,
)
from rankwatch_detectors.scope import IncidentScope

KIND: Final = "memory_total_bytes"
"""Devices with equal memory count as one kind: agents do not report their names."""

POWER_CAP: Final = 0x4
"""Bit of NVML's clocks event reasons: an operator's power cap, under which a heavier load lowers the clock."""

BITS_PER_S: Final = {1: 2.5e9, 2: 5e9, 3: 8e9, 4: 16e9, 5: 32e9, 6: 64e9}
"""Bits per second of a lane, by generation of PCIe."""
BIT_ERRORS: Final = 1e-12
"""Share of bits that may be wrong by the specification of PCIe, each of which costs a replay: DCGM's limit too."""

FLAGS: Final = {"remap": "remap_failed", "pending": "remap_pending", "recovery": "recovery_action"}
"""Counters by which the driver itself says that something is wrong, if they are not 0, by rule."""


@dataclass(frozen=True, slots=True)
class GpuRulesConfig:
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
    """The problem is over from this share on."""
    steady: float = 0.1
    """While the peers' own median is further off from its past, as in an evaluation, nobody is compared."""
    learning_slots: int = 24
    """Slots of a device, and of its peers, before it is compared; what is usual then follows over so many."""
    kinds_max: int = 16
    """Kinds of devices in a job; further ones are not compared."""
    unequal: float = 0.8
    """Share of its own highest clock, times that of its peers, below which a device is reported that was slow from the
    first steps on: no load that keeps within its power cap lowers a clock so far."""
    unequal_slots: int = 24
    """Slots in a row of that: two minutes, in which jobs warm up."""
    replay_readings: int = 6
    """Readings in a row, one every ten seconds, with more replays on the PCIe link than its specification allows."""
    held_slots: int = 5
    """Slots in a row after which it is reported, and after which it is over: any half a minute has so many whole
    ones."""
    links_readings: int = 2
    """Readings in a row with fewer active NVLinks: one is read every ten seconds, and a reset takes less."""
    nvlink_errors: int = 3
    """Readings with new replays or recoveries of NVLinks, after which these are a warning."""
    quiet_slots: int = 30
    """Slots without new errors after which these are over."""
    warning_slots: int = 60
    """Slots after which a low clock is a warning. Low power alone never is: a device that has less to do draws less."""


class GpuRules(HeldRules):
    """Judges a job's GPUs slot by slot. Memory: linear in devices."""

    STATE: ClassVar[str] = "_kind _top_clock _usual _seen _level _links _replays"

    def __init__(self, config: GpuRulesConfig) -> None:
        super().__init__()
        self._config = config
        self._kind: Floats = np.zeros(0)
        self._top_clock: Floats = np.zeros(0)
        self._replays: dict[str, Any] = {"count": None, "slot": None}
        """Of each device, the newest count of replays, and its slot; below 0: none."""
        self._links: Any = None
        """The most NVLinks that each device had active."""
        self._usual: dict[str, Any] = {}
        """Its usual share of its peers' median, by rule and device."""
        self._seen: dict[str, Any] = {}
        self._level: dict[str, list[float]] = {}
        """Usual median of the peers, and slots that it was learned from, by rule and kind."""

    def _rules(self, counters: DeviceCounters) -> Iterator[DeviceProblem]:
        size = len(counters.devices)
        kind, reported = column(counters, KIND, size)
        self._kind = grown(self._kind, size)
        self._kind[reported] = kind[reported]
        use, reported = column(counters, "utilization_ratio", size)
        busy = ~reported | (use >= self._config.busy)
        yield from self._below_peers("power", "power_w", self._config.power, math.inf, counters, busy)
        yield from self._below_peers(
            "clock", "sm_clock_hz", self._config.clock, self._config.warning_slots, counters, busy
        )
        yield from self._unequal_clocks(counters, busy)
        for what, name in (("link", "pcie_width"), ("speed", "pcie_generation")):
            yield from self._lessened(what, name, counters, busy)
        yield from self._replayed(counters)
        for what, name in FLAGS.items():
            value, reported = column(counters, name, size)
            yield from self._evaluate(what, reported & (value > 0), reported & (value == 0), 1, {name: value})
        value, reported = column(counters, "temperature_margin_celsius", size)
        evidence = {"temperature_margin_celsius": value}
        yield from self._evaluate(
            "margin", reported & (value <= 0), reported & (value > 0), self._config.held_slots, evidence
        )
        quiet = self._config.quiet_slots
        yield from self._rising("ecc", ("ecc_uncorrected",), 1, counters, quiet_slots=quiet)
        yield from self._inactive_links(counters)
        links = ("nvlink_replay_errors", "nvlink_recovery_errors", "nvlink_errors", "nvlink_recoveries")
        yield from self._rising("nvlink", links, self._config.nvlink_errors, counters, quiet_slots=quiet)

    def _lessened(self, what: str, name: str, counters: DeviceCounters, busy: Bools) -> Iterator[DeviceProblem]:
        """A property of the PCIe link that is less than it can be, under load: idle links save power."""
        size = len(counters.devices)
        value, reported = column(counters, name, size)
        most, most_reported = column(counters, f"{name}_max", size)
        reported &= most_reported
        less = reported & (value < most)
        evidence = {name: value, f"{name}_max": most}
        yield from self._evaluate(what, less & busy, reported & ~less, self._config.held_slots, evidence)

    def _unequal_clocks(self, counters: DeviceCounters, busy: Bools) -> Iterator[DeviceProblem]:
        """Devices that run further below their own highest clock than their peers, and always have."""
        config, size = self._config, len(busy)
        top, reported = column(counters, "sm_clock_max_hz", size)
        self._top_clock = grown(self._top_clock, size)
        self._top_clock[reported] = top[reported]
        clock, reported = column(counters, "sm_clock_hz", size)
        reasons, why_reported = column(counters, "throttle_reasons", size)
        capped = ~why_reported | (reasons.astype(np.int64) & POWER_CAP > 0)
        here = reported & busy & (self._top_clock > 0) & (clock > 0)
        share = np.divide(clock, self._top_clock, out=np.zeros(size), where=self._top_clock > 0)
        bad, good, peers = np.zeros(size, dtype=bool), np.zeros(size, dtype=bool), np.zeros(size)
        usual = grown(self._usual.get("clock"), size)
        for kind in np.unique(self._kind[here]):
            group = here & (self._kind == kind)
            if not self._trains or np.count_nonzero(group) < config.peers_min:
                continue
            peers[group] = level = float(np.median(share[group]))
            low = group & (share < config.unequal * level)
            # One whose clock has fallen is below what is usual for it.
            bad |= low & ~capped & (usual <= config.unequal)
            good |= group & (share >= config.recovered * level)
        evidence = {"sm_clock_hz": clock, "sm_clock_max_hz": self._top_clock, "peers_share": peers}
        yield from self._evaluate("unequal", bad, good, config.unequal_slots, evidence, config.warning_slots)

    def _replayed(self, counters: DeviceCounters) -> Iterator[DeviceProblem]:
        """PCIe links that repeat more than their specification allows in the time between two readings."""
        size = len(counters.devices)
        count, reported = column(counters, "pcie_replays", size)
        width, width_reported = column(counters, "pcie_width", size)
        generation, generation_reported = column(counters, "pcie_generation", size)
        before = self._replays["count"] = grown(self._replays["count"], size, -1.0)
        since = self._replays["slot"] = grown(self._replays["slot"], size, -1.0)
        seconds = SLOT_S * (counters.slot - since)
        known = reported & width_reported & generation_reported & (before >= 0) & (count >= before)
        speed = np.array([BITS_PER_S.get(round(one), BITS_PER_S[6]) for one in generation.tolist()])
        allowed = BIT_ERRORS * speed * width * MINUTE_S
        per_minute = np.where(known, count - before, 0.0) * MINUTE_S / np.maximum(seconds, SLOT_S)
        before[reported], since[reported] = count[reported], counters.slot
        many = known & (per_minute > allowed)
        evidence = {"pcie_replays_per_minute": per_minute, "allowed_per_minute": allowed}
        hold = self._config.replay_readings
        yield from self._evaluate("replays", many, known & ~many, hold, evidence, self._config.warning_slots)

    def _inactive_links(self, counters: DeviceCounters) -> Iterator[DeviceProblem]:
        """NVLinks that the device had before, or that most of its kind have."""
        size = len(counters.devices)
        active, reported = column(counters, "nvlinks_active", size)
        self._links = most = grown(self._links, size)
        most[reported] = np.maximum(most, active)[reported]
        usual = most.copy()
        for kind in np.unique(self._kind[reported]):
            group = reported & (self._kind == kind)
            if np.count_nonzero(group) >= self._config.peers_min:
                usual[group] = np.maximum(usual, np.median(active[group]))[group]
        few = reported & (active < usual)
        evidence = {"nvlinks_active": active, "usual_nvlinks_active": usual}
        yield from self._evaluate("links", few, reported & ~few, self._config.links_readings, evidence)

    def _below_peers(
        self, what: str, name: str, share: float, warning: float, counters: DeviceCounters, busy: Bools
    ) -> Iterator[DeviceProblem]:
        config, size = self._config, len(busy)
        value, reported = column(counters, name, size)
        usual = self._usual[what] = grown(self._usual.get(what), size)
        seen = self._seen[what] = grown(self._seen.get(what), size)
        bad, good = np.zeros(size, dtype=bool), np.zeros(size, dtype=bool)
        relative, peers = np.zeros(size), np.zeros(size)
        here = reported & busy & (value > 0)
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
        yield from self._evaluate(what, bad, good, config.held_slots, evidence, warning)

    def _is_steady(self, name: str, level: float) -> bool:
        """Whether the peers' median is near its own past."""
        if name not in self._level and len(self._level) >= 2 * self._config.kinds_max:
            return False
        usual, slots = self._level.get(name, [level, 0])
        slots += 1
        near = slots > self._config.learning_slots and abs(level - usual) <= self._config.steady * usual
        self._level[name] = [usual + (level - usual) / min(slots, self._config.learning_slots), slots]
        return near


RECOVERY: Final = {1: "reset the GPU", 2: "restart the host", 3: "drain P2P", 4: "drain and reset"}
"""NVML's recovery actions."""
MINUTES_MAX: Final = 10
"""Minutes that an agent looks back on."""


@dataclass(frozen=True, slots=True)
class DeviceDegradedConfig:
    """Settings of the device_degraded detector; which minutes count is up to the agent (`agent/devices.py`)."""

    often: int = 6
    """Minutes of the last ten from which on it is a warning: gpud's figure."""
    counters: GpuRulesConfig = field(default_factory=GpuRulesConfig)


class DeviceDegradedDetector(CounterDetector):
    """Episodes by GPU: scope "rank:N" of the rank that runs on it, "host:NAME" where that is not known."""

    DEVICES: ClassVar[str] = "gpu"
    CAUSE: ClassVar[str] = "device"
    NAMED: ClassVar[str] = "device_uuid"
    WELL: ClassVar[str] = "The device is back to its usual state."

    def __init__(self, config: DeviceDegradedConfig) -> None:
        super().__init__(Kind.DEVICE_DEGRADED, 8, GpuRules(config.counters))
        self._config = config

    def _on_occurrence(self, occurrence: Occurrence) -> Sequence[Finding]:
        same_launch = occurrence.attempt.rpartition(".")[0] == self.attempt.rpartition(".")[0]
        scope = self._places.scope_of(occurrence) if occurrence.kind == "device_throttled" and same_launch else None
        if scope is None:
            return ()
        fields = occurrence.fields
        device = str(fields.get("device_uuid") or fields.get("pci_bus_id") or fields.get("index"))
        minutes = fields.get("minutes")
        if not isinstance(minutes, int) or minutes <= 0:
            return self._over(scope, {device}, "The hardware does not slow the device down any more.")
        evidence = {name: value for name, value in occurrence.fields.items() if value not in (None, "", -1)}
        severity = Severity.WARNING if minutes >= self._config.often else Severity.INFO
        summary = _throttled(scope, minutes, occurrence.host, evidence)
        since_s = self.now_s - MINUTE_S * min(minutes, MINUTES_MAX)
        return self._report(scope, device, severity, summary, {**evidence, "host": occurrence.host}, since_s)

    def _scope_at(self, host: str, device: str) -> IncidentScope | None:
        return self._places.scope_at(host, device)

    def _sentence(self, scope: IncidentScope, problem: DeviceProblem, host: str, device: str) -> str:
        return _reported(scope, problem, host, device)


def _throttled(scope: IncidentScope, minutes: int, host: str, evidence: Mapping[str, Any]) -> str:
    name = evidence.get("device_uuid") or evidence.get("pci_bus_id") or "a device"
    where = _where(scope, host)
    reasons = evidence.get("reasons")
    why = f" ({', '.join(map(str, reasons))})" if isinstance(reasons, list | tuple) and reasons else ""
    # Neither temperature nor clock: the evidence has them as of its newest report, and a summary is read later.
    during = "for the last minute" if minutes == 1 else f"in {minutes} of the last ten minutes"
    return f"The hardware has slowed {name} of {where} down{why} {during}."


def _reported(scope: IncidentScope, trouble: DeviceProblem, host: str, uuid: str) -> str:
    figure = dict(trouble.evidence or {})
    name = f"{uuid or 'a device'} of {_where(scope, host)}"
    match trouble.what:
        case "power":
            return (
                f"{name} draws {figure['power_w']:.0f} W under load, where {figure['usual_power_w']:.0f} W are usual "
                f"for it; its peers draw {figure['peers_power_w']:.0f} W."
            )
        case "clock":
            return (
                f"{name} runs at {figure['sm_clock_hz'] / 1e6:,.0f} MHz under load, where "
                f"{figure['usual_sm_clock_hz'] / 1e6:,.0f} MHz are usual for it; its peers run at "
                f"{figure['peers_sm_clock_hz'] / 1e6:,.0f} MHz."
            )
        case "link":
            return (
                f"The PCIe link of {name} has {figure['pcie_width']:.0f} of {figure['pcie_width_max']:.0f} lanes: "
                "copies to and from it are slower."
            )
        case "speed":
            return (
                f"The PCIe link of {name} runs at generation {figure['pcie_generation']:.0f} under load, where it can "
                f"{figure['pcie_generation_max']:.0f}: copies to and from it are slower."
            )
        case "replays":
            return (
                f"The PCIe link of {name} repeats {figure['pcie_replays_per_minute']:,.0f} packets a minute; "
                f"{figure['allowed_per_minute']:.0f} are within its specification."
            )
        case "unequal":
            share = figure["sm_clock_hz"] / figure["sm_clock_max_hz"]
            return (
                f"{name} runs at {figure['sm_clock_hz'] / 1e6:,.0f} MHz under load, {100 * share:.0f} % of its highest "
                f"clock, and has since it was first seen; its peers run at {100 * figure['peers_share']:.0f} %."
            )
        case "margin":
            return f"{name} is at the temperature at which the hardware slows it down."
        case "remap":
            return f"{name} could not replace bad rows of its memory by spare ones."
        case "pending":
            return f"{name} has bad rows of memory that are replaced at its next reset."
        case "ecc":
            return f"{name} counts {figure['ecc_uncorrected']:.0f} errors of its memory that could not be corrected."
        case "links":
            return (
                f"{name} has {figure['nvlinks_active']:.0f} active NVLinks, where "
                f"{figure['usual_nvlinks_active']:.0f} are usual."
            )
        case "nvlink":
            return f"NVLinks of {name} had {figure['new_errors']:.0f} new errors, replays or recoveries."
    action = RECOVERY.get(round(figure["recovery_action"]), "another recovery action")
    return f"The driver recommends for {name}: {action}."


def _where(scope: IncidentScope, host: str) -> str:
    return f"host {host}" if scope.host is not None else f"rank {scope.number} on {host}"
