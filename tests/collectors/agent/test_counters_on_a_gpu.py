"""What only a real driver shows: the sampler's counters are those that `nvidia-smi` prints at the same moment.

`pytest -m gpu` runs them. Where `nvidia-smi` prints no device they are skipped; where it does, NVML has to open.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest

from rankwatch.agent.nvml import Nvml, open_nvml
from rankwatch.wire import DeviceSample

pytestmark = pytest.mark.gpu
COLUMNS = (
    "uuid", "name", "temperature.gpu", "power.draw", "clocks.sm", "memory.used", "memory.total",
    "power.limit",
)  # fmt: skip
"""Of `nvidia-smi --help-query-gpu`; with `nounits` in degrees Celsius, W, MHz and MiB."""
MIB = 1024 * 1024
RESERVED_MAX_MIB = 2_048
"""Memory that the driver keeps for itself, which NVML's first form of the query counts as used and nvidia-smi does not.
An H200 keeps about 600 MiB."""


def has_a_gpu() -> bool:
    """Whether nvidia-smi lists a device."""
    if shutil.which("nvidia-smi") is None:
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    return listed.returncode == 0 and "GPU" in listed.stdout


@pytest.fixture
def nvml() -> Iterator[Nvml]:
    if not has_a_gpu():
        pytest.skip("no GPU on this machine")
    opened = open_nvml()
    yield opened
    opened.close()


def printed() -> dict[str, dict[str, str]]:
    """By UUID, what nvidia-smi prints of each device."""
    command = ["nvidia-smi", f"--query-gpu={','.join(COLUMNS)}", "--format=csv,noheader,nounits"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    rows = [dict(zip(COLUMNS, map(str.strip, row), strict=True)) for row in csv.reader(output.splitlines())]
    return {row["uuid"]: row for row in rows}


def number(text: str) -> float | None:
    """A printed value; None where the device has none ("[N/A]", "[Not Supported]")."""
    try:
        return float(text)
    except ValueError:
        return None


def sampled(nvml: Nvml) -> dict[str, DeviceSample]:
    samples, lost = nvml.sample(time.time_ns())
    assert lost == ()
    return {sample.device_uuid: sample for sample in samples}


def assert_between(value: float | None, before: str, after: str, tolerance: float) -> None:
    """A sampled value lies between what was printed before and after it, give or take a tolerance."""
    ends = [end for end in (number(before), number(after)) if end is not None]
    if ends:
        assert value is not None
        assert min(ends) - tolerance <= value <= max(ends) + tolerance


def test_the_sampler_reads_what_nvidia_smi_prints_before_and_after(nvml: Nvml) -> None:
    before = printed()
    samples = sampled(nvml)
    after = printed()
    assert set(samples) == set(before)
    for uuid, sample in samples.items():
        early, late = before[uuid], after[uuid]
        assert_between(sample.temperature_celsius, early["temperature.gpu"], late["temperature.gpu"], 3)
        assert_between(sample.power_w, early["power.draw"], late["power.draw"], 30)
        clock_hz = sample.sm_clock_hz
        assert_between(clock_hz and clock_hz / 1e6, early["clocks.sm"], late["clocks.sm"], 60)
        total, used = sample.memory_total_bytes, sample.memory_used_bytes
        assert_between(total and total / MIB, early["memory.total"], late["memory.total"], 1)
        assert_between(used and used / MIB, early["memory.used"], late["memory.used"], RESERVED_MAX_MIB)
        limit = "power.limit"
        assert_between(sample.extra.get("power_limit_w"), early[limit], late[limit], 1)


def test_devices_have_the_names_that_nvidia_smi_prints(nvml: Nvml) -> None:
    assert {nvml.name(device.index) for device in nvml.found} == {row["name"] for row in printed().values()}
