"""The simulated accelerator: streams are in order each and beside each other, and every thread has a current one."""

from __future__ import annotations

import threading

import pytest

from tests.support.accelerator.simulated import CaptureError, SimulatedDevice, VirtualClock


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice("SIM-0", VirtualClock())


def test_work_of_one_stream_is_done_in_order_and_of_two_beside_each_other(device: SimulatedDevice) -> None:
    begin = device.now()
    device.launch(1.0)
    with device.on_stream("side"):
        device.launch(5.0)
        side = device.now()
    end = device.now()
    device.synchronize()
    assert begin.elapsed_time(end) == pytest.approx(1_000)
    assert begin.elapsed_time(side) == pytest.approx(5_000)


def test_a_stream_that_waits_for_another_goes_on_after_it(device: SimulatedDevice) -> None:
    begin = device.now()
    with device.on_stream("side"):
        device.launch(5.0)
    device.wait_for_stream("side")
    device.launch(1.0)
    end = device.now()
    device.synchronize()
    assert begin.elapsed_time(end) == pytest.approx(6_000)


def test_the_current_stream_is_that_of_the_thread(device: SimulatedDevice) -> None:
    elsewhere: list[str] = []
    with device.on_stream("side"):
        thread = threading.Thread(target=lambda: elsewhere.append(device.current_stream))
        thread.start()
        thread.join()
        assert (device.current_stream, elsewhere) == ("side", ["compute"])
    assert device.current_stream == "compute"


def test_nothing_may_be_waited_for_or_recorded_in_a_capture(device: SimulatedDevice) -> None:
    with device.capture() as graph:
        device.launch(2.0)
        for forbidden in (device.now, device.synchronize, lambda: device.collective(1.0)):
            with pytest.raises(CaptureError):
                forbidden()
    begin = device.now()
    device.replay(graph)
    end = device.now()
    device.synchronize()
    assert begin.elapsed_time(end) == pytest.approx(2_000)
