import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankwatch.agent import gpu as gpu_module
from rankwatch.agent.gpu import GpuSampler, NoGpu
from rankwatch.agent.nvml import Nvml, open_gpus
from rankwatch.wire import DeviceSample
from tests.support.agent.service import until
from tests.support.clock import FakeClock

FAKE = Path(__file__).parents[2] / "support/nvml/pynvml.py"


@pytest.fixture
def pynvml() -> Any:
    spec = importlib.util.spec_from_file_location("pynvml", FAKE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_counters_come_in_base_units_and_what_a_device_does_not_tell_is_none(pynvml: Any) -> None:
    samples = Nvml(pynvml).sample(123)
    assert len(samples) == 8
    assert samples[2] == DeviceSample(
        device_uuid="GPU-2",
        time_unix_ns=123,
        local_index=2,
        temperature_celsius=42,
        power_w=300.002,
        sm_clock_hz=1_980_000_000,
        utilization_ratio=0.97,
        memory_used_bytes=2**30,
        memory_total_bytes=80 * 2**30,
        throttle_reasons=0x4,
        ecc_uncorrected=0,
    )
    assert samples[3].ecc_uncorrected is None
    assert samples[3].temperature_celsius == 43


def test_a_device_that_fell_off_the_bus_is_still_listed_without_its_counters(pynvml: Any) -> None:
    counters = Nvml(pynvml)

    def lost(*_: object) -> object:
        raise pynvml.NVMLError("GPU is lost")

    for name in vars(pynvml):
        if name.startswith("nvmlDeviceGet"):
            setattr(pynvml, name, lost)
    assert counters.sample(5)[0] == DeviceSample("GPU-0", 5, 0)


def test_without_a_driver_there_are_no_counters(pynvml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", pynvml)
    pynvml.NO_DRIVER = True
    assert isinstance(open_gpus(), NoGpu)
    pynvml.NO_DRIVER = False
    assert isinstance(open_gpus(), Nvml)


def test_without_the_library_there_are_no_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert isinstance(open_gpus(), NoGpu)


class Counting:
    """A source whose readings are numbered."""

    def __init__(self) -> None:
        self.readings = 0
        self.closed = False

    def sample(self, unix_ns: int) -> tuple[DeviceSample, ...]:
        self.readings += 1
        return (DeviceSample(str(self.readings), unix_ns),)

    def close(self) -> None:
        self.closed = True


def test_the_sampler_gives_each_reading_once_and_closes_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_module, "SAMPLE_EVERY_S", 0.01)
    counters = Counting()
    sampler = GpuSampler(lambda: counters, FakeClock())
    sampler.start()
    until(lambda: counters.readings >= 3)
    taken = sampler.take()
    assert len(taken) == 1
    sampler.close()
    sampler.join(60)
    assert counters.closed
    sampler.take()
    assert sampler.take() == ()


def test_on_a_host_without_devices_the_sampler_ends_at_once() -> None:
    find: Callable[[], NoGpu] = NoGpu
    sampler = GpuSampler(find, FakeClock())
    sampler.start()
    sampler.join(60)
    assert not sampler.is_alive()
    assert sampler.take() == ()
