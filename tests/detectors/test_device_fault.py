"""What devices say of themselves: bursts of Xids, lost devices, a driver that does not answer."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rankwatch_detectors.base import AttemptStart, Change, Finding, Kind, Occurrence, Severity, Tick
from rankwatch_detectors.devices.device_fault import (
    DEVICE_EVENTS,
    SEVERITIES,
    XIDS,
    DeviceFaultConfig,
    DeviceFaultDetector,
    xid_of,
)
from tests.support.values.presences import frame, topology

CONFIG = DeviceFaultConfig()


class Host:
    """A job of four ranks on two hosts, as its events describe it."""

    def __init__(
        self, devices: tuple[str, ...] = ("GPU-0", "GPU-1", "GPU-2", "GPU-3"), types: tuple[str, ...] = ()
    ) -> None:
        self.detector = DeviceFaultDetector(CONFIG)
        self.devices = devices
        self.types = types
        self.now_s = 0.0
        self.launch("a.0")
        self.detector.observe(frame(41, {"loss": [1.0] * 4}, attempt="a.0", time_s=0.0))

    def launch(self, attempt: str) -> list[Finding]:
        reported = dataclasses.replace(topology(4, hosts=2), device_uuid=self.devices, device_type=self.types)
        self.attempt = attempt
        return list(self.detector.observe(AttemptStart(attempt, reported, self.now_s)))

    def event(self, kind: str, host: str = "host-0", after_s: float = 0.0, **fields: Any) -> list[Finding]:
        self.now_s += after_s
        return list(self.detector.observe(Occurrence(kind, self.attempt, host, self.now_s, None, None, fields)))

    def xid(self, number: int, device: str = "GPU-1", text: str = "", **how: Any) -> list[Finding]:
        return self.event("device_error", device_uuid=device, xid=number, text=text, **how)

    def rest(self, seconds: float) -> list[Finding]:
        self.now_s += seconds
        return list(self.detector.observe(Tick(self.now_s, None)))


def test_a_device_that_falls_off_the_bus_is_critical_and_names_rank_and_device() -> None:
    (finding,) = Host().xid(79, text="GPU has fallen off the bus.")
    assert (finding.kind, finding.severity, finding.ranks) == (Kind.DEVICE_FAULT, Severity.CRITICAL, (1,))
    assert finding.cause == "device"
    assert finding.onset_step == 41
    assert finding.summary == "GPU-1, rank 1 on host-0: Xid 79, GPU has fallen off the bus; restart the machine."
    (xid,) = finding.evidence["xids"]
    assert xid == {
        "xid": 79,
        "name": "GPU has fallen off the bus",
        "class": "hardware",
        "count": 1,
        "text": "GPU has fallen off the bus.",
    }


@pytest.mark.parametrize("number", sorted(XIDS))
def test_each_number_is_graded_by_its_class(number: int) -> None:
    found = Host().xid(number)
    assert [one.severity for one in found] == ([xid_of(number).severity] if xid_of(number).severity else [])


def test_a_number_that_nobody_knows_is_a_warning() -> None:
    (finding,) = Host().xid(999)
    assert finding.severity is Severity.WARNING
    assert "Xid 999, not in the table" in finding.summary


def test_what_follows_from_an_error_is_part_of_its_burst_and_nothing_alone() -> None:
    job = Host()
    assert job.xid(45) == []
    assert job.xid(154, text="GPU recovery action changed to Node Reboot") == []
    (finding,) = job.xid(48)
    assert [one["xid"] for one in finding.evidence["xids"]] == [45, 154, 48]
    assert finding.summary.endswith("(driver: GPU recovery action changed to Node Reboot).")


def test_a_burst_is_one_episode_that_becomes_graver_and_ends_after_three_minutes_of_silence() -> None:
    job = Host()
    assert [one.severity for one in job.xid(63)] == [Severity.WARNING]
    assert job.xid(63, after_s=100.0) == []
    assert job.rest(CONFIG.quiet_s - 1) == []
    (ended,) = job.rest(1)
    assert (ended.change, ended.evidence["xids"][0]["count"]) == (Change.CLOSE, 2)
    assert [one.change for one in job.xid(63)] == [Change.OPEN]
    (graver,) = job.xid(64, after_s=1.0)
    assert (graver.change, graver.severity) == (Change.UPDATE, Severity.CRITICAL)
    assert job.xid(63) == []


def test_a_fault_of_the_hardware_lasts_until_the_next_launch_and_through_rollbacks() -> None:
    job = Host()
    job.xid(48)
    assert job.rest(24 * 3600) == []
    assert job.launch("a.1") == []
    (ended,) = job.launch("b.0")
    assert ended.change is Change.CLOSE


def test_an_error_of_the_program_is_information_until_it_comes_back_on_one_device_alone() -> None:
    job = Host()
    assert [one.severity for one in job.xid(31)] == [Severity.INFO]
    (again,) = job.xid(31, after_s=CONFIG.quiet_s / 2)
    assert (again.severity, "run a diagnosis" in again.summary) == (Severity.WARNING, True)

    job = Host()
    job.xid(31)
    assert job.xid(31, after_s=CONFIG.repeated_s + 1) == []

    job = Host()
    job.xid(31)
    job.xid(31, device="GPU-2", host="host-1")
    assert job.xid(31) == []


def test_graphics_exceptions_count_by_the_unit_that_has_them() -> None:
    job = Host()
    job.xid(13, text="Graphics SM Warp Exception on (GPC 1, TPC 2, SM 0)")
    assert job.xid(13, text="Graphics SM Warp Exception on (GPC 3, TPC 0, SM 1)") == []
    (again,) = job.xid(13, text="Graphics SM Warp Exception on (GPC 1, TPC 2, SM 1)")
    assert again.severity is Severity.WARNING


def test_a_lost_device_without_any_number_is_critical() -> None:
    (finding,) = Host().event("device_lost", device_uuid="GPU-0", serial="S0", reason="the driver does not list it")
    assert (finding.severity, finding.ranks, finding.evidence["serial"]) == (Severity.CRITICAL, (0,), "S0")
    assert finding.summary.startswith("GPU-0, rank 0 on host-0: The device is gone: the driver does not list it")


def test_a_driver_that_does_not_answer_is_a_warning_after_half_a_minute_and_ends_with_its_answer() -> None:
    job = Host()
    (silent,) = job.event("driver_silent", silent_s=3.0)
    assert (silent.severity, str(silent.scope), silent.ranks) == (Severity.INFO, "host:host-0", ())
    assert job.rest(CONFIG.silent_s - 3.1) == []
    (longer,) = job.rest(0.1)
    assert longer.severity is Severity.WARNING
    assert job.rest(600.0) == []
    (ended,) = job.event("driver_answers", silent_s=600.0)
    assert ended.change is Change.CLOSE


def test_devices_are_found_by_uuid_with_and_without_nvmls_prefix() -> None:
    (finding,) = Host(("a", "b", "c", "d")).xid(79, device="GPU-B")
    assert finding.ranks == (1,)


@pytest.mark.parametrize("devices", [("", "", "GPU-2", "GPU-3"), ("MIG-x", "MIG-y", "GPU-2", "GPU-3")])
def test_where_the_ranks_device_is_not_known_the_host_is_named(devices: tuple[str, ...]) -> None:
    (finding,) = Host(devices).xid(79)
    assert (str(finding.scope), finding.ranks, finding.severity) == ("host:host-0", (), Severity.WARNING)


def test_devices_of_a_host_on_whose_cpu_the_ranks_compute_say_nothing() -> None:
    assert Host(("", "", "", ""), ("cpu",) * 4).xid(79) == []
    assert len(Host(("", "", "", ""), ("cpu", "cuda", "cpu", "cpu")).xid(79)) == 1


def test_a_device_or_a_host_that_the_job_does_not_use_says_nothing() -> None:
    assert Host().xid(79, device="GPU-7") == []
    assert Host().xid(79, host="host-9") == []
    assert Host().event("driver_silent", host="host-9", silent_s=3.0) == []


@pytest.mark.parametrize("fields", [{}, {"xid": "79", "device_uuid": 5}, {"xid": float("nan")}, {"xid": 2**64 - 1}])
def test_fields_that_nobody_would_send_break_nothing(fields: dict[str, Any]) -> None:
    for finding in Host(("", "", "", "")).event("device_error", **fields):
        assert finding.severity is Severity.WARNING


def test_the_list_of_a_burst_is_bounded() -> None:
    job = Host()
    for number in range(1_000, 1_000 + 2 * CONFIG.listed_max):
        job.xid(number)
    (finding,) = job.xid(79)
    assert len(finding.evidence["xids"]) == CONFIG.listed_max
    assert finding.evidence["further_xids"] == CONFIG.listed_max + 1


LINK_TEXT = "RLW_REMAP {} XC0 i0 Link 02 (0x00500004 0x00000001 0x00000000)"


@pytest.mark.parametrize(("word", "severity"), [("Fatal", Severity.CRITICAL), ("Nonfatal", Severity.WARNING)])
def test_an_xid_of_nvlink_5_is_graded_by_its_text_and_told_with_unit_link_and_sub_code(word, severity):
    (finding,) = Host().xid(145, text=LINK_TEXT.format(word))
    assert finding.severity is severity
    (row,) = finding.evidence["xids"]
    assert {name: row[name] for name in ("unit", "fatal", "link", "sub_code")} == {
        "unit": "RLW_REMAP",
        "fatal": word == "Fatal",
        "link": 2,
        "sub_code": 5,
    }


@pytest.mark.parametrize("text", ["", "RLW_REMAP", "RLW_REMAP Fatal XC0 i0 Link 02", "RLW Fatal XC0 Link 2 (0xg)"])
def test_an_xid_of_nvlink_5_with_another_text_is_critical(text: str) -> None:
    (finding,) = Host().xid(145, text=text)
    assert finding.severity is Severity.CRITICAL


@pytest.mark.parametrize("event", sorted(DEVICE_EVENTS))
def test_each_event_of_nvml_is_graded_by_its_class(event: str) -> None:
    severity = SEVERITIES[DEVICE_EVENTS[event][1]]
    found = Host().event("device_event", device_uuid="GPU-1", event=event)
    assert [(one.severity, one.ranks) for one in found] == ([(severity, (1,))] if severity else [])
    assert all(one.evidence["events"] == [DEVICE_EVENTS[event][0]] for one in found)


def test_an_event_of_nvml_that_nobody_knows_is_a_warning() -> None:
    (finding,) = Host().event("device_event", device_uuid="GPU-1", event="something new")
    assert finding.severity is Severity.WARNING


def test_a_fatal_error_of_a_switch_is_critical_names_the_host_and_lasts() -> None:
    job = Host()
    (finding,) = job.event("switch_error", pci_bus_id="0000:c1:00", sxid=20034, text="Fatal, Link 28 LTSSM fault up")
    assert (finding.severity, finding.ranks, str(finding.scope)) == (Severity.CRITICAL, (), "host:host-0")
    assert "SXid 20034 of NVSwitch 0000:c1:00" in finding.summary
    assert job.event("switch_error", pci_bus_id="0000:c1:00", sxid=20034, text="Fatal, Link 28 LTSSM fault up") == []
    assert job.rest(10 * CONFIG.quiet_s) == []


def test_an_error_of_a_switch_that_is_not_fatal_is_information_until_three_minutes_of_silence() -> None:
    job = Host()
    (finding,) = job.event("switch_error", pci_bus_id="0000:c1:00", sxid=12028, text="Non-fatal, Link 32 egress")
    assert finding.severity is Severity.INFO
    assert finding.evidence["sxids"][0]["fatal"] is False
    assert [one.change for one in job.rest(CONFIG.quiet_s)] == [Change.CLOSE]


def test_an_error_of_a_switch_says_nothing_of_a_job_that_computes_on_cpus() -> None:
    job = Host(devices=("",) * 4, types=("cpu",) * 4)
    assert job.event("switch_error", pci_bus_id="0000:c1:00", sxid=20034, text="Fatal") == []
