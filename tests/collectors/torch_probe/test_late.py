import math

import pytest
import torch
from torch import nn

from rankwatch.torch_probe import TorchProbe, fingerprint
from rankwatch.torch_probe.device import Span, StepSpans, TimedMoment
from rankwatch.torch_probe.late import DRAIN_S, ROWS, WORDS_MAX, LateValues
from tests.support.clock import FakeClock
from tests.support.ranks.device import FakeDevice
from tests.support.ranks.sink import FakeSink


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def arrived() -> list:
    return []


@pytest.fixture
def dropped() -> list:
    return []


@pytest.fixture
def late(device, arrived, dropped) -> LateValues:
    return LateValues(device, lambda *values: arrived.append(values), dropped.append)


def test_values_come_when_the_device_has_come_past_them_and_not_before(late, device, arrived):
    late.send(4, 1, {"loss": torch.tensor(1.5)}, {"fingerprint": torch.tensor(-7)})
    late.collect()
    assert arrived == []
    device.finish()
    late.collect()
    late.collect()
    assert arrived == [(4, 1, {"loss": 1.5}, {"fingerprint": -7})]


def test_every_bit_arrives(late, device, arrived):
    floats = [math.pi, -0.0, math.inf, -math.inf, 5e-324, 1.7e308, 0.1]
    ints = [2**63 - 1, -(2**63), -1, 0, 2**53 + 1]
    late.send(
        0,
        0,
        {f"f{i}": torch.tensor(value, dtype=torch.float64) for i, value in enumerate(floats)},
        {f"i{i}": torch.tensor(value) for i, value in enumerate(ints)},
    )
    late.send(1, 0, {"nan": torch.tensor(math.nan)}, {})
    device.finish()
    late.collect()
    assert [value.hex() for value in arrived[0][2].values()] == [value.hex() for value in floats]
    assert list(arrived[0][3].values()) == ints
    assert math.isnan(arrived[1][2]["nan"])


def test_all_types_of_scalars_are_taken(late, device, arrived):
    late.send(
        0,
        0,
        {
            "half": torch.tensor(0.5, dtype=torch.float16),
            "one element": torch.tensor([[3.0]]),
            "whole": torch.tensor(7),
        },
        {"flag": torch.tensor(True)},
    )
    device.finish()
    late.collect()
    assert arrived == [(0, 0, {"half": 0.5, "one element": 3.0, "whole": 7.0}, {"flag": 1})]


def test_steps_arrive_in_order_and_asking_stops_at_the_first_that_has_not(late, device, arrived):
    for step in range(5):
        late.send(step, 0, {"x": torch.tensor(float(step))}, {})
    device.done = 3
    device.queries = 0
    late.collect()
    assert [step for step, *_ in arrived] == [0, 1, 2]
    assert device.queries == 4
    device.finish()
    late.collect()
    assert [step for step, *_ in arrived] == [0, 1, 2, 3, 4]


def test_a_device_that_lags_loses_the_oldest_values_counted_and_keeps_the_newest(late, device, arrived, dropped):
    for step in range(ROWS + 3):
        late.send(step, 0, {"x": torch.tensor(float(step)), "y": torch.tensor(0.0)}, {"n": torch.tensor(step)})
        late.collect()
    assert dropped == [3, 3, 3]
    device.finish()
    late.collect()
    assert [(step, values["x"], ints["n"]) for step, _, values, ints in arrived] == [
        (step, float(step), step) for step in range(3, ROWS + 3)
    ]


def test_the_ring_serves_many_rounds(late, device, arrived, dropped):
    for step in range(10 * ROWS):
        late.send(step, 0, {"x": torch.tensor(float(step))}, {})
        device.done = device.moments - 2  # two steps behind
        late.collect()
    assert [step for step, *_ in arrived] == list(range(10 * ROWS - 2))
    assert dropped == []


def test_more_values_than_a_row_has_words_are_dropped_and_counted(late, device, arrived, dropped):
    late.send(
        0,
        0,
        {f"x{i}": torch.tensor(float(i)) for i in range(WORDS_MAX - 1)},
        {f"n{i}": torch.tensor(i) for i in range(3)},
    )
    device.finish()
    late.collect()
    (_, _, floats, ints) = arrived[0]
    assert len(floats) == WORDS_MAX - 1
    assert ints == {"n0": 0}
    assert dropped == [2]


def test_parts_of_a_step_are_seconds_and_add_up_by_name(late, device, arrived):
    late.send(0, 0, {}, {}, marked(device))
    device.finish()
    late.collect()
    assert arrived[0][2] == pytest.approx({"device.loss": 0.002, "device_step_s": 0.005})


def test_the_moments_of_a_step_are_recorded_again_once_it_was_read_or_dropped(late, device, dropped):
    for step in range(3 * ROWS):
        late.send(step, 0, {}, {}, marked(device))
    assert dropped == [1] * 2 * ROWS
    device.finish()
    late.collect()
    made = device.made
    for step in range(3 * ROWS):
        late.send(step, 0, {}, {}, marked(device))
        device.finish()
        late.collect()
    assert device.made == made


def test_times_on_a_stream_that_has_not_come_so_far_are_dropped_and_counted_and_the_values_stay(
    late, device, arrived, dropped, monkeypatch
):
    def raises(self, end):
        raise RuntimeError("device not ready")

    monkeypatch.setattr(type(device.now()), "elapsed_time", raises)
    late.send(0, 0, {"loss": torch.tensor(1.0)}, {}, marked(device))
    device.finish()
    late.collect()
    assert arrived == [(0, 0, {"loss": 1.0}, {})]
    assert dropped == [1]


def test_in_a_capture_nothing_is_sent_or_queried(late, device, arrived, dropped):
    late.send(0, 0, {"loss": torch.tensor(1.0)}, {})
    device.finish()
    device.capturing = True
    late.collect()
    late.send(1, 0, {"loss": torch.tensor(1.0)}, {})
    device.capturing = False
    late.collect()
    assert ([step for step, *_ in arrived], dropped) == ([0], [1])


def marked(device: FakeDevice) -> StepSpans:
    begin, *moments = [TimedMoment(device.now(), 0.0) for _ in range(5)]
    return StepSpans(begin, (Span("loss", *moments[:2]), Span("loss", *moments[2:])))


def test_a_step_without_values_takes_no_place(late, device, arrived):
    late.send(0, 0, {}, {})
    assert device.moments == 0


def trained(device: FakeDevice, steps: int, **arguments) -> tuple[FakeSink, nn.Module, TorchProbe]:
    torch.manual_seed(0)
    sink, model = FakeSink(), nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = TorchProbe(sink, model, optimizer, device=device, **arguments)
    for step in range(steps):
        probe.step_begin(step, 3)
        optimizer.zero_grad()
        (model(torch.ones(1, 4)) * (math.nan if step == 2 else 1)).sum().backward()
        if step != 2:
            optimizer.step()
        probe.step_end(step, 3)
    return sink, model, probe


def test_a_probe_on_a_device_records_each_step_s_values_late_under_that_step(device):
    sink, model, probe = trained(device, 4, fingerprint_every=3)
    assert sink.values == {}
    assert sink.exact == {}
    assert sink.late_values == []
    device.finish()
    probe.step_begin(4, 3)
    probe.step_end(4, 3)
    assert [(step, k) for step, k, _, _ in sink.late_values] == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert [exact["nonfinite"] for _, _, _, exact in sink.late_values] == [0, 0, 2, 0]
    assert [exact.get("nonfinite_first") for _, _, _, exact in sink.late_values] == [
        None,
        None,
        1,
        None,
    ]  # backward meets the bias first
    assert sink.late_values[3][3]["fingerprint"] == fingerprint(model.parameters())
    assert math.isfinite(sink.late_values[3][2]["grad_norm"])


def test_phases_on_a_device_carry_device_time(device):
    sink, _, probe = trained(device, 1)
    device.finish()
    probe.step_begin(1, 3)
    probe.step_end(1, 3)
    times = sink.late_values[0][2]
    assert {"device.forward", "device.backward", "device.optimizer"} <= set(times)
    assert times["device_busy_s"] == sum(times[f"device.{name}"] for name in ("forward", "backward", "optimizer"))
    assert times["device_step_s"] > times["device_busy_s"]
    assert "device_wait_s" not in times  # nobody reduces these gradients


def test_a_probe_on_a_device_that_lags_counts_what_it_gives_up(device):
    sink, _, _ = trained(device, ROWS + 1, phases=False, fingerprint_every=0)
    assert sink.dropped == {"late_values": 4}  # grad_norm, local_grad_norm, nonfinite, nonfinite_first of step 0


def test_at_the_end_of_a_process_what_arrives_soon_is_awaited(late, device, arrived, monkeypatch):
    late.send(4, 0, {"grad_norm": torch.tensor(math.nan)}, {"nonfinite": torch.tensor(1)})
    monkeypatch.setattr("rankwatch.torch_probe.late.time.sleep", lambda seconds: device.finish())
    late.drain()
    assert [(step, ints) for step, _, _, ints in arrived] == [(4, {"nonfinite": 1})]


def test_a_device_that_hangs_is_awaited_only_for_a_moment(late, arrived, monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr("rankwatch.torch_probe.late.time.monotonic", clock.monotonic_s)
    monkeypatch.setattr("rankwatch.torch_probe.late.time.sleep", clock.advance)
    begun_s = clock.monotonic_s()
    late.send(4, 0, {"grad_norm": torch.tensor(1.0)}, {})
    late.drain()
    assert arrived == []
    assert clock.monotonic_s() - begun_s == pytest.approx(DRAIN_S, abs=0.01)
