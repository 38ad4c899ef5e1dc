"""What goes on the record of a host: only what says something about hardware."""

from __future__ import annotations

from typing import Any

import pytest

from rankwatch_detectors.base import Finding, Kind, Severity
from rankwatch_service.incidents.correlator import Correlator
from rankwatch_service.incidents.host_incidents import host_incidents
from tests.support.values.incidents import finding, topology_state

CRITICAL, WARNING, INFO = Severity.CRITICAL, Severity.WARNING, Severity.INFO
ECC = {"xids": [{"xid": 48, "class": "hardware"}]}
PAGE_FAULT = {"xids": [{"xid": 31, "class": "application"}]}
BITS = {"fingerprints": {"5": "00e9"}, "replicas": {"1": "00eb"}}

HARDWARE = {
    "an ECC error": (Kind.DEVICE_FAULT, CRITICAL, "device", ECC),
    "a page fault that only this device has": (Kind.DEVICE_FAULT, WARNING, "device", PAGE_FAULT),
    "a device that is gone without an Xid": (Kind.DEVICE_FAULT, CRITICAL, "device", {"xids": []}),
    "heat": (Kind.DEVICE_DEGRADED, CRITICAL, "device", {"rule": "throttled"}),
    "processors taken away": (Kind.HOST_DEGRADED, WARNING, "host", {"rule": "steal"}),
    "maintenance": (Kind.HOST_DEGRADED, WARNING, "host", {"rule": "host_notice"}),
    "a port": (Kind.NETWORK_DEGRADED, WARNING, "network", {}),
    "other bits than all replicas": (Kind.CORRUPTION, CRITICAL, "worker", BITS),
    "a slow device": (Kind.STRAGGLER, WARNING, "device", {}),
    "a slow host": (Kind.STRAGGLER, WARNING, "host", {}),
}
SOFTWARE = {
    "NaN": (Kind.NONFINITE, CRITICAL, "worker", {}),
    "a rank that a signal stopped": (Kind.HANG, CRITICAL, "", {"decided_by": "stopped"}),
    "an exception": (Kind.RANK_LOST, CRITICAL, "", {"exception": "ValueError"}),
    "SIGKILL": (Kind.RANK_LOST, CRITICAL, "", {"signal": "SIGKILL"}),
    "an end on request": (Kind.RANK_LOST, INFO, "", {"requested": True}),
    "silence": (Kind.TELEMETRY_LOST, CRITICAL, "", {}),
    "slow data": (Kind.STRAGGLER, WARNING, "data", {}),
    "slow storage": (Kind.STRAGGLER, WARNING, "storage", {}),
    "a script that computes for longer": (Kind.STRAGGLER, WARNING, "worker", {}),
    "one of two replicas": (Kind.CORRUPTION, CRITICAL, "", BITS),
    "a gradient norm": (Kind.CORRUPTION, WARNING, "worker", {"local_grad_norm": 2.0}),
    "want of memory": (Kind.HOST_DEGRADED, WARNING, "host", {"rule": "memory"}),
    "a process killed for want of memory": (Kind.HOST_DEGRADED, WARNING, "host", {"rule": "oom"}),
    "the limit of a container": (Kind.HOST_DEGRADED, WARNING, "host", {"rule": "throttled"}),
    "a page fault": (Kind.DEVICE_FAULT, INFO, "device", PAGE_FAULT),
    "a slow chip from the first step": (Kind.STRAGGLER, INFO, "device", {"standing": True}),
    "a port that flapped once": (Kind.NETWORK_DEGRADED, INFO, "network", {}),
    "heat that training does not feel": (Kind.DEVICE_DEGRADED, WARNING, "device", {"rule": "throttled"}),
}


def reported(kind: Kind, severity: Severity, cause: str, evidence: dict[str, Any], scope: str = "rank:5") -> Finding:
    return finding(kind, scope=scope, severity=severity, cause=cause, evidence=evidence)


def on_record(*findings: Finding) -> set[tuple[str, str, str, str]]:
    """Host, device, kind and severity of all that is on record once these have been found."""
    correlator, placement = Correlator("gpt"), topology_state()
    for one in findings:
        correlator.evaluate([one], placement)
    entries = [entry for incident in correlator.open for entry in host_incidents(incident, placement, 1_000.0)]
    return {(entry.host, entry.device_uuid, str(entry.kind), str(entry.severity)) for entry in entries}


@pytest.mark.parametrize("found", HARDWARE.values(), ids=HARDWARE)
def test_what_says_something_about_hardware_goes_on_record(found):
    (entry,) = on_record(reported(*found))
    assert entry[:3] == ("node-1", "GPU-5", str(found[0]))


@pytest.mark.parametrize("found", SOFTWARE.values(), ids=SOFTWARE)
def test_what_may_be_due_to_the_script_a_signal_or_a_request_does_not(found):
    assert on_record(reported(*found)) == set()


@pytest.mark.parametrize("effect", [Kind.HANG, Kind.RANK_LOST, Kind.NONFINITE])
def test_what_a_fault_of_a_device_causes_counts_with_it(effect):
    found = reported(Kind.DEVICE_FAULT, WARNING, "device", ECC), reported(effect, CRITICAL, "", {})
    for order in (found, found[::-1]):
        assert on_record(*order) == {("node-1", "GPU-5", "device_fault", "critical")}


def test_a_lost_rank_does_not_make_an_error_of_the_program_one_of_the_device():
    found = reported(Kind.DEVICE_FAULT, INFO, "device", PAGE_FAULT), reported(Kind.RANK_LOST, CRITICAL, "", {})
    assert on_record(*found) == set()


def test_a_driver_that_is_silent_counts_once_a_rank_hangs():
    silent = reported(Kind.DEVICE_FAULT, INFO, "device", {"xids": []}, scope="host:node-1")
    assert on_record(silent) == set()
    assert on_record(silent, reported(Kind.HANG, CRITICAL, "", {})) == {("node-1", "", "device_fault", "critical")}


def test_a_trouble_of_a_host_without_ranks_is_on_the_record_of_that_host():
    port = reported(Kind.NETWORK_DEGRADED, WARNING, "network", {}, scope="host:node-0")
    assert on_record(port) == {("node-0", "", "network_degraded", "warning")}
