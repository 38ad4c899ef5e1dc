"""What only a real driver shows: the sampler's counters are those that `nvidia-smi` prints at the same moment.

`pytest -m gpu` runs them. Where `nvidia-smi` prints no device they are skipped; where it does, NVML has to open.
"""

import csv
import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest

from rankwatch.agent.nvml import Nvml, open_nvml

pytestmark = pytest.mark.gpu

MIB = 1024 * 1024
COUNTERS = {
    "temperature.gpu": (3, lambda sample: sample.temperature_celsius),
    "power.draw": (30, lambda sample: sample.power_w),
    "clocks.sm": (60, lambda sample: sample.sm_clock_hz and sample.sm_clock_hz / 1e6),
    "memory.total": (1, lambda sample: sample.memory_total_bytes and sample.memory_total_bytes / MIB),
    # The driver keeps memory for itself, 600 MiB of an H200, which NVML's first form of the query counts as used.
    "memory.used": (2_048, lambda sample: sample.memory_used_bytes and sample.memory_used_bytes / MIB),
    "power.limit": (1, lambda sample: sample.extra.get("power_limit_w")),
}
"""What nvidia-smi calls a counter (with `nounits` in degrees Celsius, W, MHz and MiB): a tolerance, and ours."""


@pytest.fixture
def nvml() -> Iterator[Nvml]:
    listed = shutil.which("nvidia-smi") and subprocess.run(
        ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False
    )
    if not listed or listed.returncode or "GPU" not in listed.stdout:
        pytest.skip("no GPU on this machine")
    opened = open_nvml()
    yield opened
    opened.close()


def printed() -> dict[str, dict[str, str]]:
    """By UUID, what nvidia-smi prints of each device."""
    columns = ("uuid", "name", *COUNTERS)
    command = ["nvidia-smi", f"--query-gpu={','.join(columns)}", "--format=csv,noheader,nounits"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    rows = [dict(zip(columns, map(str.strip, row), strict=True)) for row in csv.reader(output.splitlines())]
    return {row["uuid"]: row for row in rows}


def test_the_sampler_reads_what_nvidia_smi_prints_before_and_after(nvml):
    before = printed()
    samples, lost = nvml.sample(time.time_ns())
    after = printed()
    assert lost == ()
    assert {sample.device_uuid for sample in samples} == set(before)
    for sample in samples:
        for name, (tolerance, ours) in COUNTERS.items():
            ends = [row[sample.device_uuid][name] for row in (before, after)]
            known = [float(end) for end in ends if not end.startswith("[")]  # else "[N/A]" or "[Not Supported]"
            assert not known or min(known) - tolerance <= ours(sample) <= max(known) + tolerance, name


def test_devices_have_the_names_that_nvidia_smi_prints(nvml):
    assert {nvml.name(device.index) for device in nvml.found} == {row["name"] for row in printed().values()}
