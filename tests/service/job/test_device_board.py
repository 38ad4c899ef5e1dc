"""Counters of devices: who is numbered how, in which slot a sample counts, and what is refused."""

import pytest

from rankwatch import wire
from rankwatch_detectors.devices.device_degraded import DeviceDegradedConfig, DeviceDegradedDetector
from rankwatch_detectors.devices.network_degraded import NetworkDegradedConfig, NetworkDegradedDetector
from rankwatch_service.job import device_boards
from rankwatch_service.job.device_boards import (
    CLOSE_AFTER_S,
    COUNTERS_MAX,
    DEVICES_MIN,
    DEVICES_PER_RANK,
    FUTURE_S,
    PAST_S,
    SLOT_S,
    DeviceBoard,
    DeviceBoards,
    DeviceNumber,
    as_frame,
)
from rankwatch_service.stream.saved import pack, unpack
from tests.support.detection.scripted_job import World
from tests.support.values.batches import batch, progress

NOW_S = 1_000_000.0


@pytest.fixture
def board() -> DeviceBoard:
    return DeviceBoard()


def sample(index: int, time_s: float = NOW_S, uuid: str | None = None, **counters: float) -> wire.DeviceSample:
    extra = {name: value for name, value in counters.items() if not hasattr(wire.DeviceSample, name)}
    fixed = {name: value for name, value in counters.items() if name not in extra}
    named = f"GPU-{index}" if uuid is None else uuid
    return wire.DeviceSample(named, int(time_s * 1e9), index, extra=extra, **fixed)


def add(board: DeviceBoard, *samples: wire.DeviceSample, host: str = "node-1", ranks: int = 8, now_s: float = NOW_S):
    return board.add([batch(host=host, devices=samples)], ranks, now_s)


def due(board: DeviceBoard, now_s: float = NOW_S + SLOT_S + CLOSE_AFTER_S) -> list:
    return list(board.due(now_s))


def test_devices_are_numbered_in_the_order_in_which_they_appear_each_once(board):
    assert add(board, sample(0), sample(1)) == [
        DeviceNumber(0, "node-1", 0, "GPU-0"),
        DeviceNumber(1, "node-1", 1, "GPU-1"),
    ]
    assert add(board, sample(0), host="node-2") == [DeviceNumber(2, "node-2", 0, "GPU-0")]
    assert add(board, sample(1), sample(0)) == []


def test_a_device_that_is_counted_anew_after_another_was_lost_keeps_its_number(board):
    add(board, sample(0), sample(1))
    assert add(board, sample(0, uuid="GPU-1")) == []
    assert add(board, sample(1, uuid="GPU-new")) == [DeviceNumber(2, "node-1", 1, "GPU-new")]


def test_devices_whose_driver_tells_no_uuid_are_known_by_their_index(board):
    assert [one.number for one in add(board, sample(0, uuid=""), sample(1, uuid=""))] == [0, 1]
    assert add(board, sample(1, uuid="")) == []


def test_a_slot_has_the_mean_or_the_newest_value_and_is_reported_when_it_is_over(board):
    first = {"temperature_celsius": 60, "power_now_w": 300.0, "throttle_reasons": 4, "pcie_replays": 1.0}
    add(board, sample(0, **first), sample(1, temperature_celsius=50))
    add(board, sample(0, NOW_S + 1, temperature_celsius=61, throttle_reasons=0x40, pcie_replays=3.0))
    assert due(board, NOW_S + SLOT_S) == []
    (counters,) = due(board)
    assert (counters.slot, counters.devices) == (NOW_S // SLOT_S, (("node-1", "GPU-0"), ("node-1", "GPU-1")))
    frame = as_frame(counters)
    assert (frame.attempt, frame.family, frame.step) == ("", "devices", counters.slot)
    assert frame.values["temperature_celsius"].tolist() == [60.5, 50]
    assert frame.values["throttle_reasons"][0] == 0x40
    assert frame.values["pcie_replays"][0] == 3
    assert frame.values["power_now_w"][frame.present["power_now_w"]].tolist() == [300]
    assert due(board) == []


def test_the_speed_of_a_port_in_the_slot_in_which_it_changed_is_the_newest_one_and_not_the_mean(board):
    add(board, sample(0, link_bits_per_s=25e9, sent_bytes_per_s=2.0))
    add(board, sample(0, NOW_S + 2.5, link_bits_per_s=1e9, sent_bytes_per_s=4.0))
    (counters,) = due(board)
    reported = {name: values.tolist() for name, values in counters.values.items()}
    assert reported == {"link_bits_per_s": [1e9], "sent_bytes_per_s": [3.0]}


def test_what_a_device_does_not_tell_is_not_present_and_what_comes_late_is_a_frame_of_its_own(board):
    add(board, sample(0, temperature_celsius=60), sample(1, power_w=200.0), sample(2, temperature_celsius=55))
    (counters,) = due(board)
    assert counters.present["temperature_celsius"].tolist() == [True, False, True]
    assert counters.present["power_w"].tolist() == [False, True, False]
    add(board, sample(0, temperature_celsius=62), now_s=NOW_S + 60)
    (late,) = due(board, NOW_S + 60)
    assert (late.slot, late.values["temperature_celsius"].tolist()) == (counters.slot, [62, 0, 0])
    assert late.present["temperature_celsius"].tolist() == [True, False, False]


@pytest.mark.parametrize("off_s", [-PAST_S - 1, FUTURE_S + 1])
def test_samples_of_a_host_whose_clock_is_far_off_are_counted_and_not_charted(board, off_s):
    assert add(board, sample(0, NOW_S + off_s, temperature_celsius=60)) == []
    assert due(board) == []
    assert board.counts == {"device_samples_misdated": 1}


def test_a_job_has_so_many_devices_for_each_of_its_ranks(board):
    limit = DEVICES_PER_RANK * 10
    for host in range(limit // 8 + 1):
        add(board, *(sample(index, temperature_celsius=60) for index in range(8)), host=f"node-{host}", ranks=10)
    assert board.counts == {"device_samples_beyond_limit": 8}
    assert len(due(board)[0].values["temperature_celsius"]) == limit > DEVICES_MIN


def test_a_sender_can_make_up_neither_indices_nor_counters_without_end(board):
    assert add(board, sample(-1), sample(10_000), sample(0, uuid="x" * 1_000)) == []
    assert board.counts.pop("device_samples_beyond_limit") == 3
    add(board, sample(0, **{f"made_up_{n}": n for n in range(COUNTERS_MAX + 5)}), sample(1, **{"x" * 100: 1.0}))
    assert board.counts == {"device_counters_beyond_limit": 6}
    assert len(due(board)[0].values) == COUNTERS_MAX


def test_slots_that_are_open_at_a_time_are_bounded_and_those_of_a_small_job_suffice_for_an_outage(board, monkeypatch):
    for slot in range(1_000):
        add(board, *(sample(index, NOW_S - SLOT_S * slot, power_w=1.0) for index in range(8)))
    assert len(due(board)) == 1_000
    monkeypatch.setattr(device_boards, "OPEN_CELLS_MAX", 100)
    for slot in range(20):
        add(board, *(sample(index, NOW_S - SLOT_S * slot, power_w=1.0) for index in range(8)))
    assert len(due(board)) == 100 // 8
    assert board.counts == {"device_samples_beyond_limit": 8 * (20 - 100 // 8)}


def test_a_restored_board_goes_on_where_it_was(board):
    add(board, sample(0, temperature_celsius=60), sample(1, temperature_celsius=50))
    add(board, sample(9, NOW_S - 2 * PAST_S))
    again = DeviceBoard.restored(wire.GPU, unpack(pack(board.state())))
    assert again.counts == board.counts
    assert add(again, sample(2, temperature_celsius=40)) == [DeviceNumber(2, "node-1", 2, "GPU-2")]
    assert due(again)[0].values["temperature_celsius"].tolist() == [60, 50, 40]


def test_gpus_ports_and_hosts_are_numbered_and_charted_apart():
    boards = DeviceBoards()
    port = wire.HostDeviceSample(wire.PORT, "eth0", int(NOW_S * 1e9), {"link_up": 1.0})
    host = wire.HostDeviceSample(wire.HOST, "", int(NOW_S * 1e9), {"oom_kills": 0.0})
    sent = batch(host="node-1", devices=(sample(0, temperature_celsius=60),), host_devices=(port, host))
    fresh = boards.add([sent], 8, NOW_S)
    assert fresh == [
        DeviceNumber(0, "node-1", 0, "GPU-0"),
        DeviceNumber(0, "node-1", 0, "eth0", wire.PORT),
        DeviceNumber(0, "node-1", 0, "", wire.HOST),
    ]
    again = DeviceBoards.restored(unpack(pack(boards.state())))
    reported = {one.kind: one for one in again.due(NOW_S + SLOT_S + CLOSE_AFTER_S)}
    assert {kind: set(one.values) for kind, one in reported.items()} == {
        wire.GPU: {"temperature_celsius"}, wire.PORT: {"link_up"}, wire.HOST: {"oom_kills"}
    }  # fmt: skip
    assert again.add([sent], 8, NOW_S) == []


def test_a_job_charts_what_its_devices_count_beside_its_own_series(world):
    world.send(devices=(sample(0, world.now_s, temperature_celsius=60),))
    world.tick(2 * SLOT_S + CLOSE_AFTER_S)
    assert [device.number for _, device in world.effects.devices] == [0]
    charted = [(name, frame.family) for name, frame in world.effects.frames]
    assert charted == [("gpt/devices", "devices")]
    world.effects.delete_job("gpt")
    assert world.effects.devices == world.effects.frames == []


def test_counters_that_are_not_charted_are_counted_with_the_job(world):
    world.send(devices=(sample(0, world.now_s + 2 * FUTURE_S),))
    world.tick()
    assert world.effects.jobs["gpt"].dropped == {"device_samples_misdated": 1}


def test_a_device_that_draws_less_than_usual_is_an_incident_of_its_rank():
    world = World(detector=lambda: DeviceDegradedDetector(DeviceDegradedConfig()))
    for slot in range(40):
        for host in range(2):
            power = [600.0 if slot < 30 or (host, index) != (1, 0) else 300.0 for index in range(2)]
            reported = tuple(sample(2 * host + index, world.now_s, power_w=power[index]) for index in range(2))
            world.send(host=f"node-{host}", boot=f"b{host}", devices=reported)
        world.tick(SLOT_S)
    world.tick(SLOT_S + CLOSE_AFTER_S)
    (opened,) = [one for one in world.effects.transitions if str(one.what) == "opened"]
    incident = opened.incident
    assert (incident.kind, incident.ranks, incident.devices, incident.severity) == (
        "device_degraded", (2,), ("GPU-2",), "info"
    )  # fmt: skip
    assert incident.summary.startswith("GPU-2 of rank 2 on node-1 draws 300 W under load, where 600 W are usual")


def read_ports(world: World, slots: int, **counters: dict[str, float]) -> None:
    """An agent reads the ports of its host in so many slots."""
    for _ in range(slots):
        stamp = int(world.now_s * 1e9)
        world.send(
            host_devices=[
                wire.HostDeviceSample(wire.PORT, name, stamp, reported) for name, reported in counters.items()
            ]
        )
        world.tick(SLOT_S)


def test_a_job_that_has_ended_opens_nothing_of_what_stood_at_its_end():
    world = World(detector=lambda: NetworkDegradedDetector(NetworkDegradedConfig()))
    world.train(0)
    up, down = {"link_up": 1.0}, {"link_up": 0.0}
    read_ports(world, 4, eth1=up, eth2=up, eth3=up)
    read_ports(world, 4, eth1=down, eth2=down, eth3=up)
    assert [str(incident.kind) for incident in world.job.correlator.open] == ["network_degraded"]
    world.send(progress=tuple(progress(rank, 0, state="left") for rank in range(4)))
    world.tick()
    assert world.reported()[-1] == "resolved"
    reported = len(world.reported())
    read_ports(world, 3, eth1=up, eth2=down, eth3=down)
    for _ in range(300):
        world.tick()
    assert world.reported()[reported:] == []
