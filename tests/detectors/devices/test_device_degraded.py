"""Devices that the hardware slows down: what agents tell of them becomes one incident for each."""

from __future__ import annotations

from typing import Any

import pytest

from rankwatch_detectors.base import AttemptStart, Change, Finding, Kind, Occurrence, Severity, Tick
from rankwatch_detectors.devices.counter_detector import SILENT_S
from rankwatch_detectors.devices.device_degraded import DeviceDegradedConfig, DeviceDegradedDetector
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
        return list(
            self.detector.observe(AttemptStart(attempt, topology(4, hosts=2, devices=self.devices), self.now_s))
        )

    def throttled(self, minutes: Any, host: str = "host-0", **fields: Any) -> list[Finding]:
        self.now_s += 60.0
        told = {**HOT, **fields, "minutes": minutes}
        return list(
            self.detector.observe(Occurrence("device_throttled", self.attempt, host, self.now_s, None, None, told))
        )

    def rest(self, seconds: float) -> list[Finding]:
        self.now_s += seconds
        return list(self.detector.observe(Tick(self.now_s, None)))


def test_it_is_information_from_the_first_minute_and_a_warning_once_it_is_usual() -> None:
    job = Host()
    (first,) = job.throttled(1)
    assert (first.kind, first.severity, first.ranks, first.cause) == (
        Kind.DEVICE_DEGRADED,
        Severity.INFO,
        (1,),
        "device",
    )
    assert first.summary == ("The hardware slows GPU-1 of rank 1 on host-0 down (heat), in 1 of ten minutes.")
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
    assert job.rest(SILENT_S - 1) == []
    (silent,) = job.rest(1)
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
