"""When a device counts as slowed down by its hardware: by whole minutes, or by many of ten."""

from collections.abc import Iterable

from rankwatch.agent.devices import QUIET, WINDOW, ThrottledDevices, Throttling

HEAT, POWER_BRAKE, POWER_CAP, IDLE = 0x40, 0x80, 0x04, 0x01


def told(minutes: Iterable[list[int | None]]) -> list[Throttling | None]:
    """What is told at the end of each minute, of one sample a second."""
    devices, found = ThrottledDevices(), list[Throttling | None]()
    for number, samples in enumerate([*minutes, [0]]):
        for second, reasons in enumerate(samples):
            said = devices.see(0, reasons, 60.0 * number + second)
            if second == 0:
                found.append(said)
    return found[1:]


ALL, HALF, NONE = [HEAT] * 60, [HEAT, 0] * 30, [0] * 60


def test_a_whole_minute_is_told_and_again_each_minute_until_five_are_well() -> None:
    found = told([NONE, ALL, *[NONE] * QUIET, NONE])
    assert found == [None, *[Throttling(1, ("heat",))] * QUIET, Throttling(0, ()), None]


def test_parts_of_minutes_are_told_once_they_are_six_of_ten() -> None:
    assert told([HALF] * 6) == [None] * 5 + [Throttling(6, ("heat",))]
    assert told([HALF, NONE] * WINDOW) == [None] * 2 * WINDOW


def test_the_cap_that_an_operator_sets_and_an_idle_device_are_no_trouble() -> None:
    assert told([[POWER_CAP | IDLE] * 60] * WINDOW) == [None] * WINDOW


def test_all_reasons_of_the_last_ten_minutes_are_named() -> None:
    assert told([ALL, [POWER_BRAKE] * 60])[-1] == Throttling(2, ("heat", "power brake"))


def test_a_minute_with_few_samples_is_no_whole_one_and_a_device_that_does_not_tell_is_well() -> None:
    assert told([[HEAT] * 5]) == [None]
    assert told([[None] * 60] * WINDOW) == [None] * WINDOW


def test_devices_are_judged_apart_and_time_without_samples_counts_as_well() -> None:
    devices = ThrottledDevices()
    for second in range(60):
        devices.see(0, HEAT, second)
        devices.see(1, 0, second)
    assert devices.see(1, 0, 60.0) is None
    assert devices.see(0, HEAT, 60.0) == Throttling(1, ("heat",))
    assert devices.see(0, 0, 60.0 * 30) == Throttling(0, ())
