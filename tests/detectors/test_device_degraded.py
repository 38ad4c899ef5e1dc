"""Devices judged by the reports of agents and by their counters: each rule at its edge, and nothing of healthy ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rankwatch_detectors.base import AttemptStart, Change, DeviceCounters, Finding, Kind, Occurrence, Severity, Tick
from rankwatch_detectors.devices.counter_detector import SILENT_S
from rankwatch_detectors.devices.device_degraded import (
    DeviceDegradedConfig,
    DeviceDegradedDetector,
    GpuRules,
    GpuRulesConfig,
)
from tests.support.trials.selection import long_trial
from tests.support.values.presences import frame, topology

CONFIG = DeviceDegradedConfig()
HOT: dict[str, Any] = {"device_uuid": "GPU-1", "reasons": ["heat"], "temperature_celsius": 91, "sm_clock_hz": 1.2e9}


class Host:
    """A job of four ranks on two hosts."""

    def __init__(self, *, devices: bool = True) -> None:
        self.detector = DeviceDegradedDetector(CONFIG)
        self.devices = devices
        self.now_s = 0.0
        self.launch("a.0")
        self.detector.observe(frame(41, {"loss": [1.0] * 4}, attempt="a.0", time_s=0.0))

    def launch(self, attempt: str) -> list[Finding]:
        self.attempt = attempt
        start = AttemptStart(attempt, topology(4, hosts=2, devices=self.devices), self.now_s)
        return [*self.detector.observe(start)]

    def throttled(self, minutes: Any, host: str = "host-0", **fields: Any) -> list[Finding]:
        self.now_s += 60.0
        reported = {**HOT, **fields, "minutes": minutes}
        return [
            *self.detector.observe(Occurrence("device_throttled", self.attempt, host, self.now_s, None, None, reported))
        ]


def test_it_is_information_from_the_first_minute_and_a_warning_once_it_is_usual() -> None:
    job = Host()
    (first,) = job.throttled(1)
    assert (first.kind, first.severity) == (Kind.DEVICE_DEGRADED, Severity.INFO)
    assert (first.ranks, first.cause) == ((1,), "device")
    assert first.summary == ("The hardware has slowed GPU-1 of rank 1 on host-0 down (heat) for the last minute.")
    later = [finding for minutes in range(2, CONFIG.often) for finding in job.throttled(minutes)]
    assert {(one.change, one.severity) for one in later} == {(Change.UPDATE, Severity.INFO)}
    (usual,) = job.throttled(CONFIG.often)
    assert (usual.change, usual.severity) == (Change.UPDATE, Severity.WARNING)
    (milder,) = job.throttled(CONFIG.often - 1)
    assert (milder.change, milder.severity) == (Change.UPDATE, Severity.WARNING)
    (over,) = job.throttled(0)
    assert over.change is Change.CLOSE
    assert over.evidence["minutes"] == CONFIG.often - 1


def test_it_ends_with_the_launch_or_with_the_agent_that_tells_it_and_goes_on_through_a_rollback() -> None:
    job = Host()
    job.throttled(3)
    assert job.launch("a.1") == []
    (ended,) = job.launch("b.0")
    assert ended.change is Change.CLOSE
    job.throttled(3)
    assert [*job.detector.observe(Tick(job.now_s + SILENT_S - 1, None))] == []
    (silent,) = job.detector.observe(Tick(job.now_s + SILENT_S, None))
    assert silent.change is Change.CLOSE


def test_where_ranks_have_not_told_their_devices_the_host_is_named_until_the_last_of_its_devices_is_well() -> None:
    job = Host(devices=False)
    (finding,) = job.throttled(1, device_uuid="GPU-a")
    assert (str(finding.scope), finding.ranks) == ("host:host-0", ())
    (second,) = job.throttled(1, device_uuid="GPU-b")
    assert (second.change, len(second.evidence["besides"])) == (Change.UPDATE, 1)
    (other,) = job.throttled(0, device_uuid="GPU-a")
    assert (other.change, "GPU-b" in other.summary) == (Change.UPDATE, True)
    (over,) = job.throttled(0, device_uuid="GPU-b")
    assert over.change is Change.CLOSE


def test_devices_and_hosts_that_the_job_does_not_use_say_nothing() -> None:
    assert Host().throttled(3, device_uuid="GPU-9") == []
    assert Host().throttled(3, host="elsewhere") == []


@pytest.mark.parametrize("minutes", [None, "3", -1, 2.5])
def test_fields_that_nobody_would_send_open_nothing(minutes: Any) -> None:
    assert Host().throttled(minutes) == []
    assert len(Host().throttled(3, reasons=7, temperature_celsius="hot", sm_clock_hz=None)) == 1


RULES = GpuRulesConfig()
SLOT_S = 5.0
SICK = 3
BUSY: dict[str, Any] = {"utilization_ratio": 1.0, "power_w": 600.0, "sm_clock_hz": 1.98e9, "pcie_width": 16.0}
BUSY |= {"pcie_width_max": 16.0, "remap_failed": 0.0, "recovery_action": 0.0, "memory_total_bytes": 8e10}
BUSY |= {"remap_pending": 0.0, "temperature_margin_celsius": 20.0, "ecc_uncorrected": 5.0}
BUSY |= {"nvlink_replay_errors": 7.0, "nvlink_recovery_errors": 0.0, "nvlinks_active": 18.0}
Counters = Mapping[str, Any]


class Fleet:
    """A job of eight ranks on two hosts, each on a device of its own."""

    def __init__(self, *, devices: bool = True) -> None:
        self.detector = DeviceDegradedDetector(DeviceDegradedConfig())
        self.detector.observe(AttemptStart("a.0", topology(8, hosts=2, devices=devices), 0.0))
        self.slot = 0

    def see(self, slots: int = 1, sick: Counters | None = None, peers: Counters | None = None) -> list[Finding]:
        """So many slots in which all devices are busy; `sick` changes device 3, `peers` all others."""
        findings: list[Finding] = []
        for _ in range(slots):
            self.slot += 1
            values = {name: np.full(8, usual) for name, usual in {**BUSY, **(peers or {})}.items()}
            for name, value in (sick or {}).items():
                values[name][SICK] = value
            present = {name: np.ones(8, dtype=bool) for name in values}
            now_s = self.slot * SLOT_S
            named = tuple((f"host-{rank // 4}", f"GPU-{rank}") for rank in range(8))
            findings += self.detector.observe(DeviceCounters(self.slot, now_s, named, values, present))
            findings += self.detector.observe(Tick(now_s, None))
        return findings


def learned(**how: bool) -> Fleet:
    fleet = Fleet(**how)
    assert fleet.see(RULES.learning_slots + 1) == []
    return fleet


def training() -> Fleet:
    fleet = Fleet()
    fleet.detector.observe(frame(0, {"loss": [1.0] * 8}, attempt="a.0", time_s=0.0))
    return fleet


BELOW_PEERS = [("power_w", RULES.power), ("sm_clock_hz", RULES.clock)]


@pytest.mark.parametrize(("name", "share"), BELOW_PEERS)
def test_a_device_below_what_is_usual_for_it_is_reported_after_half_a_minute(name, share):
    fleet = learned()
    low = {name: BUSY[name] * (share - 0.01)}
    assert fleet.see(RULES.held_slots - 1, low) == []
    (finding,) = fleet.see(1, low)
    assert (finding.change, finding.severity) == (Change.OPEN, Severity.INFO)
    assert (finding.ranks, finding.cause) == ((SICK,), "device")
    assert finding.detected_time_s - finding.onset_time_s == (RULES.held_slots - 1) * SLOT_S
    assert finding.evidence[f"peers_{name}"] == finding.evidence[f"usual_{name}"] == BUSY[name]
    assert fleet.see(RULES.held_slots - 1) == []
    (over,) = fleet.see(1)
    assert (over.change, over.summary) == (Change.CLOSE, "The device is back to its usual state.")


def test_the_onset_is_the_step_that_training_had_made_when_it_began():
    fleet = Fleet()

    def train(sick: Counters | None = None) -> list[Finding]:
        step, values = 10 * fleet.slot, {"loss": [1.0] * 8}
        fleet.detector.observe(frame(step, values, attempt="a.0", time_s=fleet.slot * SLOT_S))
        return fleet.see(1, sick)

    for _ in range(RULES.learning_slots + 1):
        assert train() == []
    began_step, low = 10 * (fleet.slot + 1), {"sm_clock_hz": 1e9}
    for _ in range(RULES.held_slots - 1):
        assert train(low) == []
    (finding,) = train(low)
    assert finding.onset_step == began_step
    assert finding.detected_step == began_step + 10 * (RULES.held_slots - 2)


def test_a_low_clock_is_a_warning_after_five_minutes_and_low_power_alone_is_none():
    fleet = learned()
    (first,) = fleet.see(RULES.warning_slots - 1, {"sm_clock_hz": 1e9})
    (worse,) = fleet.see(1, {"sm_clock_hz": 1e9})
    assert (first.severity, worse.change, worse.severity) == (Severity.INFO, Change.UPDATE, Severity.WARNING)
    assert [one.severity for one in learned().see(10 * RULES.warning_slots, {"power_w": 100.0})] == [Severity.INFO]


@pytest.mark.parametrize(("name", "share"), BELOW_PEERS)
def test_at_the_edge_and_for_less_than_half_a_minute_nothing_is_said(name, share):
    fleet = learned()
    assert fleet.see(20, {name: BUSY[name] * (share + 0.01)}) == []
    for _ in range(10):
        assert fleet.see(RULES.held_slots - 1, {name: 1.0}) == []
        assert fleet.see(1) == []


def test_the_message_says_what_is_usual_and_what_peers_do():
    (power,) = learned().see(RULES.held_slots, {"power_w": 240.0})
    assert power.summary == (
        "GPU-3 of rank 3 on host-0 draws 240 W under load, where 600 W are usual for it; its peers draw 600 W."
    )
    (clock,) = learned().see(RULES.held_slots, {"sm_clock_hz": 1.2e9})
    assert "runs at 1,200 MHz under load, where 1,980 MHz are usual for it" in clock.summary


def test_a_device_that_is_loaded_less_from_the_first_step_on_is_so_by_its_role():
    fleet = Fleet()
    assert fleet.see(300, {"power_w": 300.0}) == []
    (finding,) = fleet.see(RULES.held_slots, {"power_w": 200.0})
    assert finding.evidence["usual_power_w"] == 300.0


def test_a_device_that_is_not_busy_is_not_compared_and_what_all_do_together_is_no_trouble_of_one():
    fleet = learned()
    assert fleet.see(100, {"power_w": 100.0, "utilization_ratio": RULES.busy - 0.01}) == []
    for _ in range(5):
        assert fleet.see(12, {"power_w": 200.0}, {"power_w": 250.0}) == []
        assert fleet.see(40) == []


def test_without_peers_of_its_kind_nobody_is_compared():
    fleet = Fleet()
    odd = {"memory_total_bytes": 4e10}
    assert fleet.see(60, odd) == []
    assert fleet.see(60, odd | {"power_w": 100.0}) == []


def test_lanes_that_a_link_lost_are_a_warning_with_the_device():
    fleet = Fleet()
    assert fleet.see(RULES.held_slots - 1, {"pcie_width": 8.0}) == []
    (finding,) = fleet.see(1, {"pcie_width": 8.0})
    assert (finding.severity, finding.ranks) == (Severity.WARNING, (SICK,))
    assert finding.summary == (
        "The PCIe link of GPU-3 of rank 3 on host-0 has 8 of 16 lanes: copies to and from it are slower."
    )


CLOCKED = {"sm_clock_max_hz": 1.98e9, "throttle_reasons": 0.0}
SLOW_CLOCK = CLOCKED | {"sm_clock_hz": 1.98e9 * (RULES.unequal - 0.01)}


def test_a_device_whose_clock_was_low_from_the_first_step_on_is_reported_after_two_minutes():
    assert Fleet().see(100, SLOW_CLOCK, CLOCKED) == [], "before the first step it is none"
    fleet = training()
    assert fleet.see(RULES.unequal_slots - 1, SLOW_CLOCK, CLOCKED) == []
    (finding,) = fleet.see(1, SLOW_CLOCK, CLOCKED)
    assert (finding.severity, finding.ranks, finding.evidence["rule"]) == (Severity.INFO, (SICK,), "unequal")
    assert "runs at 1,564 MHz under load, 79 % of its highest clock" in finding.summary
    (graver,) = fleet.see(RULES.warning_slots - RULES.unequal_slots, SLOW_CLOCK, CLOCKED)
    assert graver.severity is Severity.WARNING
    assert [one.change for one in fleet.see(RULES.unequal_slots, CLOCKED, CLOCKED)] == [Change.CLOSE]


@pytest.mark.parametrize(
    ("sick", "peers"),
    [
        (SLOW_CLOCK | {"sm_clock_hz": 1.98e9 * (RULES.unequal + 0.01)}, CLOCKED),
        (SLOW_CLOCK | {"throttle_reasons": 4.0}, CLOCKED),
        (SLOW_CLOCK | {"throttle_reasons": np.nan}, CLOCKED),
        (SLOW_CLOCK | {"sm_clock_max_hz": SLOW_CLOCK["sm_clock_hz"]}, CLOCKED),
        (SLOW_CLOCK | {"utilization_ratio": RULES.busy - 0.01}, CLOCKED),
        (SLOW_CLOCK, SLOW_CLOCK),
        (SLOW_CLOCK | {"memory_total_bytes": 4e10}, CLOCKED),
    ],
    ids=["edge", "power cap", "reasons unknown", "another model", "not busy", "all alike", "no peers"],
)
def test_a_clock_that_its_load_or_its_model_explains_is_not_low(sick: Counters, peers: Counters):
    assert training().see(100, sick, peers) == []


def test_a_clock_that_falls_is_reported_once_and_not_as_one_that_was_always_low():
    fleet = training()
    assert fleet.see(RULES.learning_slots + 1, CLOCKED, CLOCKED) == []
    reported = fleet.see(2 * RULES.unequal_slots, CLOCKED | {"sm_clock_hz": 1e9}, CLOCKED)
    assert {one.evidence["rule"] for one in reported} == {"clock"}


LINK = {"pcie_generation": 5.0, "pcie_generation_max": 5.0}


def test_a_link_below_its_generation_under_load_is_a_warning():
    fleet, slow = Fleet(), LINK | {"pcie_generation": 3.0}
    assert fleet.see(RULES.held_slots - 1, slow, LINK) == []
    (finding,) = fleet.see(1, slow, LINK)
    assert (finding.severity, finding.evidence["rule"]) == (Severity.WARNING, "speed")
    assert "runs at generation 3 under load, where it can 5" in finding.summary
    assert Fleet().see(20, slow | {"utilization_ratio": 0.0}, LINK) == []


def replays(per_minute: float) -> list[Finding]:
    """A link with so many replays, counted in each slot of five seconds."""
    fleet, reported = Fleet(), list[Finding]()
    for slot in range(RULES.replay_readings + 1):
        reported += fleet.see(1, LINK | {"pcie_replays": 100.0 + slot * per_minute / 12}, LINK | {"pcie_replays": 0.0})
    return reported


@pytest.mark.parametrize(("generation", "allowed"), [(5, 30.72), (4, 15.36), (3, 7.68)])
def test_replays_of_a_link_are_reported_beyond_its_specification_and_not_at_its_edge(monkeypatch, generation, allowed):
    monkeypatch.setitem(LINK, "pcie_generation", float(generation))
    monkeypatch.setitem(LINK, "pcie_generation_max", float(generation))
    assert replays(allowed - 0.01) == []
    (finding,) = replays(allowed + 0.01)
    assert (finding.severity, finding.evidence["rule"]) == (Severity.INFO, "replays")
    assert f"{allowed:.0f} are within its specification" in finding.summary


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("remap_failed", 1.0, "GPU-3 of rank 3 on host-0 could not replace bad rows of its memory by spare ones."),
        ("remap_pending", 2.0, "GPU-3 of rank 3 on host-0 has bad rows of memory that are replaced at its next reset."),
        ("recovery_action", 1.0, "The driver recommends for GPU-3 of rank 3 on host-0: reset the GPU."),
        ("recovery_action", 77.0, "The driver recommends for GPU-3 of rank 3 on host-0: another recovery action."),
    ],
)
def test_what_the_driver_itself_calls_bad_is_a_warning_at_once(name, value, text):
    (finding,) = Fleet().see(3, {name: value})
    assert (finding.severity, finding.summary) == (Severity.WARNING, text)


def test_a_device_at_its_limit_of_temperature_is_a_warning_once_it_stays_there():
    fleet = Fleet()
    assert fleet.see(50, {"temperature_margin_celsius": 1.0}) == []
    assert fleet.see(RULES.held_slots - 1, {"temperature_margin_celsius": 0.0}) == []
    (finding,) = fleet.see(1, {"temperature_margin_celsius": -1.0})
    assert (finding.severity, finding.evidence["temperature_margin_celsius"]) == (Severity.WARNING, -1.0)


def test_memory_errors_are_a_warning_when_they_are_counted_not_for_being_there():
    fleet = Fleet()
    assert fleet.see(20) == []
    (finding,) = fleet.see(1, {"ecc_uncorrected": 6.0})
    assert (finding.severity, finding.ranks) == (Severity.WARNING, (SICK,))
    assert finding.summary == ("GPU-3 of rank 3 on host-0 counts 6 errors of its memory that could not be corrected.")
    assert fleet.see(RULES.quiet_slots - 1, {"ecc_uncorrected": 6.0}) == []
    (over,) = fleet.see(1, {"ecc_uncorrected": 6.0})
    assert (over.change, over.summary) == (Change.CLOSE, "The device is back to its usual state.")
    assert fleet.see(3, {"ecc_uncorrected": 0.0}) == []  # a reset counts anew


def test_a_device_with_fewer_nvlinks_than_it_had_or_than_its_peers_have_is_a_warning():
    fleet = learned()
    fewer = {"nvlinks_active": 17.0}
    assert fleet.see(RULES.links_readings - 1, fewer) == []
    (finding,) = fleet.see(1, fewer)
    assert (finding.severity, finding.ranks) == (Severity.WARNING, (SICK,))
    assert finding.summary == "GPU-3 of rank 3 on host-0 has 17 active NVLinks, where 18 are usual."
    assert fleet.see(RULES.links_readings - 1) == []
    assert [one.change for one in fleet.see(1)] == [Change.CLOSE]
    fresh = Fleet()
    assert fresh.see(RULES.links_readings, fewer)


def test_an_nvlink_that_replays_is_information_and_a_warning_when_it_goes_on():
    fleet = Fleet()
    fleet.see()
    (first,) = fleet.see(1, {"nvlink_replay_errors": 9.0})
    assert first.summary == "NVLinks of GPU-3 of rank 3 on host-0 had 2 new errors, replays or recoveries."
    reported = [fleet.see(1, {"nvlink_replay_errors": 9.0 + n}) for n in range(1, RULES.nvlink_errors)]
    assert not any(reported[:-1])
    assert (first.severity, reported[-1][0].severity) == (Severity.INFO, Severity.WARNING)


def test_kinds_that_a_sender_makes_up_are_not_remembered_without_end():
    rules = GpuRules(RULES)
    for slot in range(3 * RULES.kinds_max):
        reported = powered(slot, np.full(8, 600.0))
        values = {**reported.values, "memory_total_bytes": np.full(8, float(slot)), "sm_clock_hz": np.full(8, 1e9)}
        present = dict.fromkeys(values, np.ones(8, dtype=bool))
        assert list(rules.see(DeviceCounters(slot, reported.time_s, reported.devices, values, present))) == []
    assert len(rules.snapshot()["_level"]) <= 2 * RULES.kinds_max


def test_several_troubles_of_one_device_are_one_episode_until_the_last_is_over():
    fleet = learned()
    (first,) = fleet.see(RULES.held_slots, {"power_w": 200.0})
    (graver,) = fleet.see(1, {"power_w": 200.0, "remap_failed": 1.0})
    assert (first.change, graver.change, graver.severity) == (Change.OPEN, Change.UPDATE, Severity.WARNING)
    (one_over,) = fleet.see(50, {"remap_failed": 1.0})
    assert (one_over.change, one_over.evidence["besides"]) == (Change.UPDATE, None)
    (over,) = fleet.see(1)
    assert over.change is Change.CLOSE


def test_a_device_without_further_reports_is_no_longer_reported():
    fleet = learned()
    fleet.see(RULES.held_slots, {"power_w": 200.0})
    (over,) = fleet.see(100, {"power_w": np.nan})
    assert over.change is Change.CLOSE
    assert "No report about it for 180 s" in over.summary


def test_values_that_are_not_finite_and_slots_that_come_late_judge_nobody():
    fleet = learned()
    names = ("power_w", "sm_clock_hz", "recovery_action", "pcie_width_max")
    for wrong in (np.nan, np.inf, -np.inf, -1.0):
        assert fleet.see(20, dict.fromkeys(names, wrong)) == []
    for _ in range(20):
        assert list(fleet.detector.observe(powered(1, np.where(np.arange(8) == SICK, 1.0, 600.0)))) == []


def powered(slot: int, power_w: NDArray[np.float64]) -> DeviceCounters:
    present = {"power_w": np.ones(len(power_w), dtype=bool)}
    named = tuple(("h", str(number)) for number in range(len(power_w)))
    return DeviceCounters(slot, slot * SLOT_S, named, {"power_w": power_w}, present)


@pytest.mark.parametrize(
    ("devices", "hours", "seed"), [(50, 3, 0), *(pytest.param(1_000, 24, seed, marks=long_trial) for seed in range(3))]
)
def test_nothing_is_said_of_healthy_devices_under_changing_load(devices, hours, seed):
    chance = np.random.default_rng(seed)
    rules = GpuRules(RULES)
    own, roles = chance.normal(1, 0.04, devices), chance.choice([1.0, 0.85, 0.6], devices)
    load = 1.0
    for slot in range(int(hours * 3_600 / SLOT_S)):
        if chance.random() < 0.002:  # another phase: an evaluation, another batch size, a pause
            load = chance.choice([1.0, 0.9, 0.7, 0.3])
        late = chance.random(devices) < 0.02
        noise = chance.normal(1, 0.05, devices)
        assert list(rules.see(powered(slot, 600 * own * roles * load * noise * (1 - 0.3 * late)))) == []
