"""The reader of devices as a process of its own, on a driver that a file spoils while it runs.

When a device counts as slowed down by its hardware: by whole minutes, or by many of ten.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rankwatch.agent import devices
from rankwatch.agent.clock import HostClock
from rankwatch.agent.device_reader import KernelLog, errors_in
from rankwatch.agent.devices import (
    QUIET,
    WINDOW,
    DeviceError,
    DeviceIdentity,
    DeviceSampler,
    Reading,
    Readings,
    ThrottledDevices,
    Throttling,
    encoded,
)
from rankwatch.spawn import lock_is_held
from rankwatch.wire import DeviceSample, Event
from tests.support.accelerator import DRIVER
from tests.support.agent.service import until

Spoil = Callable[..., None]


@pytest.fixture
def spoil(tmp_path: Path) -> Spoil:
    """Says what is wrong with the driver from now on."""
    path = tmp_path / "nvml.json"

    def say(**wrong: Any) -> None:
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(wrong))
        fresh.rename(path)

    say()
    return say


@pytest.fixture
def sampler(tmp_path: Path, spoil: Spoil, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceSampler]:
    monkeypatch.setattr(devices, "RESTART_AFTER_S", 0.1)
    monkeypatch.setenv("PYTHONPATH", str(DRIVER))
    monkeypatch.setenv("SIMULATED_NVML", str(tmp_path / "nvml.json"))
    sampler = DeviceSampler(tmp_path / "job.devices.lock", HostClock())
    yield sampler
    spoil()
    sampler.close()
    assert not sampler.is_alive()


def taken(sampler: DeviceSampler) -> list[DeviceSample]:
    found: list[DeviceSample] = []
    until(lambda: found.extend(sampler.take()) or found)
    return found


def reported(sampler: DeviceSampler, kind: str) -> Event:
    """The first event of this kind from now on."""
    found: list[Event] = []
    until(lambda: found.extend(event for event in sampler.take_events() if event.kind == kind) or found)
    return found[0]


def test_counters_come_in_base_units_and_what_a_device_does_not_tell_is_none(sampler: DeviceSampler) -> None:
    sampler.start()
    samples = taken(sampler)
    assert len(samples) == 8
    assert samples[2] == DeviceSample(
        device_uuid="GPU-2",
        time_unix_ns=samples[2].time_unix_ns,
        local_index=2,
        temperature_celsius=42,
        power_w=300.002,
        sm_clock_hz=1_980_000_000,
        utilization_ratio=0.97,
        memory_used_bytes=2**30,
        memory_total_bytes=80 * 2**30,
        throttle_reasons=0x4,
        ecc_uncorrected=0,
        extra={
            "memory_temperature_celsius": 60.0,
            "power_now_w": 310.0,
            "power_limit_w": 700.0,
            "throttled_by_power_s": 5.0,
            "remap_pending": 0.0,
            "recovery_action": 0.0,
            "sm_clock_max_hz": 1_980_000_000.0,
            "pcie_width": 16.0,
            "nvlinks": 18.0,
            "nvlinks_active": 18.0,
            "nvlink_errors": 0.0,
            "nvlink_recoveries": 0.0,
        },
    )
    assert samples[3].ecc_uncorrected is None
    assert sampler.take_events() == []


def test_what_a_driver_lacks_costs_only_that(sampler: DeviceSampler, spoil: Spoil) -> None:
    missing = ["nvmlDeviceGetSerial", "nvmlDeviceGetPowerUsage", "nvmlEventSetCreate"]
    spoil(missing=missing, failing_fields=[190], no_gpm=True)
    sampler.start()
    taken(sampler)  # work apart from waiting is told from the second reading on
    sample = taken(sampler)[0]
    assert "sm_active_ratio" not in sample.extra
    assert sample.power_w is None
    assert sample.temperature_celsius == 40
    assert "power_limit_w" not in sample.extra
    assert sample.extra["power_now_w"] == 310


def test_links_that_are_down_and_errors_of_one_link_are_counted_and_the_second_reading_tells_of_work(sampler, spoil):
    """Work apart from waiting, where the device measures it."""
    spoil(links_down={"4": 2}, link_errors={"5": [7, 30]})
    sampler.start()
    samples = taken(sampler)
    assert [samples[index].extra["nvlinks_active"] for index in (3, 4)] == [18, 16]
    assert [samples[index].extra["nvlink_errors"] for index in (4, 5)] == [0, 30]
    assert "sm_active_ratio" not in samples[0].extra
    reported = taken(sampler)[0].extra
    assert [reported[f"{name}_ratio"] for name in ("sm_active", "tensor_active", "memory_bandwidth")] == [
        0.91,
        0.47,
        0.33,
    ]


@pytest.mark.parametrize(
    ("corrupted", "kind", "reported_fields"),
    [
        ({"xids": [[6, 79]]}, "device_error", {"device_uuid": "GPU-6", "xid": 79, "serial": "S6"}),
        ({"xids": [[6, 0, 0x800]]}, "device_event", {"device_uuid": "GPU-6", "event": "dram_retirement_failure"}),
    ],
)
def test_an_xid_names_the_device_and_an_event_without_a_number_is_reported_by_its_name(
    sampler: DeviceSampler, spoil: Spoil, corrupted: dict[str, Any], kind: str, reported_fields: dict[str, Any]
) -> None:
    sampler.start()
    taken(sampler)
    spoil(**corrupted)
    assert reported_fields.items() <= reported(sampler, kind).fields.items()


def test_a_lost_device_is_reported_once_by_its_serial_and_loses_no_other(sampler: DeviceSampler, spoil: Spoil) -> None:
    sampler.start()
    assert len(taken(sampler)) == 8
    spoil(lost=[2])
    lost = reported(sampler, "device_lost")
    where = {"device_uuid": "GPU-2", "index": 2, "pci_bus_id": "0000:02:00", "serial": "S2"}
    assert lost.fields == {**where, "reason": "the driver does not reach it any more"}
    for _ in range(2):
        assert [sample.local_index for sample in taken(sampler)] == [0, 1, 3, 4, 5, 6, 7]
    assert sampler.take_events() == []


def test_a_device_that_was_lost_before_the_agent_began_is_reported_too(sampler: DeviceSampler, spoil: Spoil) -> None:
    spoil(lost=[5])
    sampler.start()
    assert reported(sampler, "device_lost").fields["index"] == 5
    assert len(taken(sampler)) == 7


def test_errors_of_switches_and_of_devices_of_this_host_are_reported_once_though_two_sources_report_them(
    tmp_path,
) -> None:
    found = (DeviceIdentity(0, "GPU-0", "0000:4e:00", "S0"),)
    switch = DeviceError(10**10, "0000:c1:00", text="Fatal, Link 28", sxid=20034)
    errors = (
        switch,
        switch,
        DeviceError(10**10, "0000:4e:00", 79, "GPU has fallen off the bus."),
        DeviceError(10**10 + 1, "0000:4e:00", 79),
        DeviceError(10**10, "0000:9a:00", 79, "a device of another container"),
        DeviceError(2 * 10**10, "0000:4e:00", 79, "again"),
    )
    sampler = DeviceSampler(tmp_path / "lock", HostClock(), writing(Reading(found=found, errors=errors)))
    sampler.start()
    sampler.join(60)
    reported = {event.fields["text"]: event for event in sampler.take_events()}
    assert {text: event.kind for text, event in reported.items()} == {
        "Fatal, Link 28": "switch_error", "GPU has fallen off the bus.": "device_error", "again": "device_error"
    }  # fmt: skip
    assert reported["Fatal, Link 28"].fields == {"pci_bus_id": "0000:c1:00", "sxid": 20034, "text": "Fatal, Link 28"}


def test_a_device_that_a_new_reader_does_not_find_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "RESTART_AFTER_S", 0.01)
    both = tuple(DeviceIdentity(index, f"GPU-{index}", f"0000:0{index}:00", f"S{index}") for index in range(2))
    sampler = DeviceSampler(tmp_path / "lock", HostClock(), writing(Reading(found=both), Reading(found=both[:1])))
    sampler.start()
    assert reported(sampler, "device_lost").fields["serial"] == "S1"
    sampler.close()


def writing(*readings: Reading) -> list[str]:
    """A reader that writes one of these each time that it is started, and ends; there are no devices after the last."""
    script = (
        "import os, sys\n"
        "path = sys.argv[-1] + '.count'\n"
        "n = os.path.getsize(path) if os.path.exists(path) else 0\n"
        "open(path, 'a').write('.')\n"
        "os.write(1, bytes.fromhex(sys.argv[1 + n]))\n"
        "sys.exit(3 if n + 3 == len(sys.argv) else 0)\n"
    )
    return [sys.executable, "-c", script, *(encoded(reading).hex() for reading in readings)]


def test_a_driver_that_hangs_is_reported_once_and_read_on_when_it_answers(sampler, spoil, monkeypatch):
    monkeypatch.setattr(devices, "SILENT_S", 1.5)
    sampler.start()
    taken(sampler)
    spoil(hangs=True)
    assert reported(sampler, "driver_silent").fields["silent_s"] >= 1.5
    spoil()
    assert reported(sampler, "driver_answers").fields["silent_s"] >= 1.5
    assert len(taken(sampler)) == 8


def test_closing_leaves_no_process_though_the_driver_hangs(sampler, spoil, monkeypatch):
    monkeypatch.setattr(devices, "END_WITHIN_S", 30.0)
    sampler.start()
    taken(sampler)
    spoil(hangs=True)
    sampler.close()
    assert not sampler.is_alive()


def test_a_second_reader_beside_one_that_hangs_ends_at_once_and_the_silence_is_reported(
    sampler, tmp_path, spoil, monkeypatch
):
    monkeypatch.setattr(devices, "SILENT_S", 0.5)
    spoil(hangs=True)
    sampler.start()
    until(lambda: lock_is_held(str(tmp_path / "job.devices.lock")))
    second = DeviceSampler(tmp_path / "job.devices.lock", HostClock())
    second.start()
    reported(second, "driver_silent")
    spoil()
    taken(sampler)
    second.close()


@pytest.mark.parametrize("wrong", [{"no_driver": True}, {"missing": ["nvmlInit"]}])
def test_without_a_driver_the_sampler_ends_at_once(sampler: DeviceSampler, spoil: Spoil, wrong: dict[str, Any]) -> None:
    spoil(**wrong)
    sampler.start()
    sampler.join(60)
    assert not sampler.is_alive()
    assert sampler.take() == ()
    assert sampler.take_events() == []


def test_a_reader_that_writes_rubbish_or_cannot_be_started_disturbs_nobody(tmp_path: Path) -> None:
    for reader in (["/nonexistent"], [sys.executable, "-c", "import sys; print('\\xff' * 99); sys.exit(3)"]):
        sampler = DeviceSampler(tmp_path / "lock", HostClock(), reader)
        sampler.start()
        sampler.join(60)
        assert not sampler.is_alive()
        assert sampler.take() == ()
        sampler.close()


def test_messages_are_cut_out_of_the_stream_wherever_it_is_torn() -> None:
    messages = [Reading(lost=(1,)), Reading(errors=(DeviceError(5, "0000:4e:00", 79, "x"),))]
    stream, readings = b"".join(map(encoded, messages)), Readings()
    assert [one for at in range(len(stream)) for one in readings.feed(stream[at : at + 1])] == messages


def test_the_kernels_log_tells_xids_and_sxids_with_their_words_and_a_gpu_that_is_lost_without_one() -> None:
    text = (
        "6,1204,5012,-;NVRM: Xid (PCI:0000:4e:00): 79, pid=4711, name=python, GPU has fallen off the bus.\n"
        "6,1205,5013,-;NVRM: GPU 0000:4e:00.0: GPU has fallen off the bus.\n"
        "6,1206,5014,-;NVRM: Xid (PCI:00000000:0A:00.0): 154, GPU recovery action changed from 0x0 (None) to 0x2\n"
        "6,1207,5015,-;usb 1-1: new device\n"
        "3,1208,5016,-;nvidia-nvswitch3: SXid (PCI:0000:C1:00.0): 12028, Non-fatal, Link 32 egress error (First)\n"
    )
    assert errors_in(text, 7) == [
        DeviceError(7, "0000:4e:00", 79, "pid=4711, name=python, GPU has fallen off the bus."),
        DeviceError(7, "0000:4e:00", None, "GPU 0000:4e:00.0: GPU has fallen off the bus."),
        DeviceError(7, "0000:0a:00", 154, "GPU recovery action changed from 0x0 (None) to 0x2"),
        DeviceError(7, "0000:c1:00", text="Non-fatal, Link 32 egress error (First)", sxid=12028),
    ]


def test_the_kernels_log_is_read_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text("NVRM: Xid (PCI:0000:01:00): 31, old\n")
    log = KernelLog(str(path))
    assert log.read(1) == ()
    with path.open("a") as file:
        file.write("NVRM: Xid (PCI:0000:01:00): 48, new\n")
    assert [error.xid for error in log.read(2)] == [48]
    log.close()


HEAT, POWER_BRAKE, POWER_CAP, IDLE = 0x40, 0x80, 0x04, 0x01


def throttled(minutes: Iterable[list[int | None]]) -> list[Throttling | None]:
    """What is throttled at the end of each minute, of one sample a second."""
    devices, found = ThrottledDevices(), list[Throttling | None]()
    for number, samples in enumerate([*minutes, [0]]):
        for second, reasons in enumerate(samples):
            said = devices.see(0, reasons, 60.0 * number + second)
            if second == 0:
                found.append(said)
    return found[1:]


ALL, HALF, NONE = [HEAT] * 60, [HEAT, 0] * 30, [0] * 60


@pytest.mark.parametrize(
    ("minutes", "reported"),
    [
        ([NONE, ALL, *[NONE] * QUIET, NONE], [None, *[Throttling(1, ("heat",))] * QUIET, Throttling(0, ()), None]),
        ([HALF] * 6, [None] * 5 + [Throttling(6, ("heat",))]),
        ([HALF, NONE] * WINDOW, [None] * 2 * WINDOW),
        ([[POWER_CAP | IDLE] * 60] * WINDOW, [None] * WINDOW),
        ([ALL, [POWER_BRAKE] * 60], [Throttling(1, ("heat",)), Throttling(2, ("heat", "power brake"))]),
        ([[HEAT] * 5], [None]),
        ([[None] * 60] * WINDOW, [None] * WINDOW),
    ],
    ids=[
        "a whole minute is told, and again until five are well",
        "parts of six minutes of ten",
        "parts of five minutes of ten",
        "the cap that an operator sets and an idle device",
        "all reasons of ten minutes",
        "a minute with few samples is no whole one",
        "a device that does not tell is well",
    ],
)
def test_when_a_device_is_reported_as_slowed_down_by_its_hardware(minutes, reported):
    assert throttled(minutes) == reported


def test_devices_are_judged_apart_and_time_without_samples_counts_as_well() -> None:
    devices = ThrottledDevices()
    for second in range(60):
        devices.see(0, HEAT, second)
        devices.see(1, 0, second)
    assert devices.see(1, 0, 60.0) is None
    assert devices.see(0, HEAT, 60.0) == Throttling(1, ("heat",))
    assert devices.see(0, 0, 60.0 * 30) == Throttling(0, ())
