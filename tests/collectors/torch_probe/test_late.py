"""Values that a device hands over late, and what a rank says of its device."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rankwatch.identity import RankIdentity
from rankwatch.reader import RingReader
from rankwatch.torch_probe import TorchProbe, fingerprint
from rankwatch.torch_probe.device import Span, StepSpans, TimedMoment, describe_device
from rankwatch.torch_probe.late import DRAIN_S, ROWS, WORDS_MAX, LateValues
from rankwatch.torch_probe.watched_model import Handed, WatchedModels
from rankwatch.watch import Watch
from tests.support.clock import FakeClock
from tests.support.ranks.device import FakeDevice
from tests.support.ranks.recorders import Rank, a_recorder
from tests.support.ranks.sink import FakeSink, Watched


def finish(late: LateValues, device: FakeDevice) -> None:
    device.finish()
    late.collect()


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
    finish(late, device)
    late.collect()
    assert arrived == [(4, 1, {"loss": 1.5}, {"fingerprint": -7})]


def test_every_bit_of_every_type_of_scalar_arrives(late, device, arrived):
    floats = [math.pi, -0.0, math.inf, -math.inf, 5e-324, 1.7e308, 0.1]
    ints = [2**63 - 1, -(2**63), -1, 0, 2**53 + 1]
    late.send(
        0,
        0,
        {f"f{i}": torch.tensor(value, dtype=torch.float64) for i, value in enumerate(floats)},
        {f"i{i}": torch.tensor(value) for i, value in enumerate(ints)},
    )
    late.send(1, 0, {"nan": torch.tensor(math.nan)}, {})
    others = {"half": torch.tensor(0.5, dtype=torch.float16), "one element": torch.tensor([[3.0]])}
    late.send(2, 0, others | {"whole": torch.tensor(7)}, {"flag": torch.tensor(True)})
    finish(late, device)
    assert [value.hex() for value in arrived[0][2].values()] == [value.hex() for value in floats]
    assert list(arrived[0][3].values()) == ints
    assert math.isnan(arrived[1][2]["nan"])
    assert arrived[2] == (2, 0, {"half": 0.5, "one element": 3.0, "whole": 7.0}, {"flag": 1})


def test_steps_arrive_in_order_and_asking_stops_at_the_first_that_has_not(late, device, arrived):
    for step in range(5):
        late.send(step, 0, {"x": torch.tensor(float(step))}, {})
    device.done = 3
    device.queries = 0
    late.collect()
    assert [step for step, *_ in arrived] == [0, 1, 2]
    assert device.queries == 4
    finish(late, device)
    assert [step for step, *_ in arrived] == [0, 1, 2, 3, 4]


def test_a_device_that_lags_loses_the_oldest_values_counted_and_keeps_the_newest(late, device, arrived, dropped):
    for step in range(ROWS + 3):
        late.send(step, 0, {"x": torch.tensor(float(step)), "y": torch.tensor(0.0)}, {"n": torch.tensor(step)})
        late.collect()
    assert dropped == [3, 3, 3]
    finish(late, device)
    assert [(step, values["x"], ints["n"]) for step, _, values, ints in arrived] == [
        (step, float(step), step) for step in range(3, ROWS + 3)
    ]


def test_more_values_than_a_row_has_words_are_dropped_and_counted(late, device, arrived, dropped):
    floats = {f"x{i}": torch.tensor(float(i)) for i in range(WORDS_MAX - 1)}
    late.send(0, 0, floats, {f"n{i}": torch.tensor(i) for i in range(3)})
    finish(late, device)
    (_, _, floats, ints) = arrived[0]
    assert len(floats) == WORDS_MAX - 1
    assert ints == {"n0": 0}
    assert dropped == [2]


def test_parts_of_a_step_are_seconds_and_add_up_by_name(late, device, arrived):
    late.send(0, 0, {}, {}, marked(device))
    finish(late, device)
    assert arrived[0][2] == pytest.approx({"device.loss": 0.002, "device_step_s": 0.005})


def test_times_on_a_stream_that_has_not_come_so_far_are_dropped_and_counted_and_the_values_stay(
    late, device, arrived, dropped, monkeypatch
):
    def raises(self, end):
        raise RuntimeError("device not ready")

    monkeypatch.setattr(type(device.now()), "elapsed_time", raises)
    late.send(0, 0, {"loss": torch.tensor(1.0)}, {}, marked(device))
    finish(late, device)
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
    watched = Watched(nn.Linear(4, 2), device=device, **arguments)
    for step in range(steps):
        watched.probe.step_begin(step, 3)
        watched.optimizer.zero_grad()
        (watched.model(torch.ones(1, 4)) * (math.nan if step == 2 else 1)).sum().backward()
        if step != 2:
            watched.optimizer.step()
        watched.probe.step_end(step, 3)
    return watched.sink, watched.model, watched.probe


def test_a_probe_on_a_device_records_each_step_s_values_late_under_that_step(device):
    sink, model, probe = trained(device, 4, fingerprint_every=3)
    assert sink.values == {"lr": 0.01}, "which the host knows at once"
    assert sink.exact == {}
    assert sink.late_values == []
    device.finish()
    probe.step_begin(4, 3)
    probe.step_end(4, 3)
    assert [(step, k) for step, k, _, _ in sink.late_values] == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert [exact["nonfinite"] for _, _, _, exact in sink.late_values] == [0, 0, 2, 0]
    first = [exact.get("nonfinite_first") for _, _, _, exact in sink.late_values]
    assert first == [None, None, 1, None], "backward meets the bias first"
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


UUID = "5e0d4f3c-9d7e-1f07-2a55-b83e8f6e9a10"


@pytest.fixture
def driver(monkeypatch) -> SimpleNamespace:
    """Answers as torch does, and counts how often it was asked."""
    answers = SimpleNamespace(properties=SimpleNamespace(uuid=UUID), asked=[])

    def get_device_properties(device: torch.device) -> SimpleNamespace:
        answers.asked.append(device)
        if isinstance(answers.properties, Exception):
            raise answers.properties
        return answers.properties

    monkeypatch.setattr(torch.cuda, "get_device_properties", get_device_properties)
    return answers


def described(home: str = "cuda:1", known: str = "", visible: str | None = None) -> dict[str, str]:
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    failures: list[Exception] = []
    reported = describe_device(torch.device(home), known, env, failures.append)
    return reported | ({"failed": str(failures[0])} if failures else {})


def test_the_uuid_is_written_as_nvml_writes_it(driver):
    assert described() == {"device_type": "cuda", "device_uuid": f"GPU-{UUID}"}
    assert driver.asked == [torch.device("cuda:1")]
    driver.properties.uuid = f"GPU-{UUID}"
    assert described()["device_uuid"] == f"GPU-{UUID}"


@pytest.mark.parametrize("home", ["cpu", "mps", "xpu:0"])
def test_where_parameters_lie_elsewhere_cuda_is_not_asked(driver, home):
    assert described(home) == {"device_type": home.partition(":")[0]}
    assert driver.asked == []


def test_what_the_script_or_the_launcher_said_stays(driver):
    assert described(known="MIG-a") == {"device_type": "cuda"}
    assert driver.asked == []


def test_a_listed_instance_of_a_divided_device_is_the_identity(driver):
    assert described(visible="MIG-a, MIG-b")["device_uuid"] == "MIG-b"
    assert driver.asked == []
    for others in ("MIG-a", "0,1", "", "MIG-a,2"):
        assert described(visible=others)["device_uuid"] == f"GPU-{UUID}"


@pytest.mark.parametrize("uuid", [None, "", "00000000-0000-0000-0000-000000000000"])
def test_a_device_without_a_uuid_has_its_type(driver, uuid):
    driver.properties.uuid = uuid
    assert described() == {"device_type": "cuda"}
    driver.properties = SimpleNamespace()
    assert described() == {"device_type": "cuda"}


def test_on_rocm_the_id_is_what_torch_gives(driver, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    driver.properties.uuid = "61343533-6639-6533-6362-323038336635"
    assert described()["device_uuid"] == "61343533-6639-6533-6362-323038336635"


def test_a_driver_that_fails_costs_the_uuid_and_is_counted(driver):
    driver.properties = RuntimeError("CUDA driver is gone")
    assert described() == {"device_type": "cuda", "failed": "CUDA driver is gone"}


def home_of(model: nn.Module) -> torch.device:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return WatchedModels([Handed.of(model, optimizer, None, None)], placed=True).home


def test_a_model_without_memory_lies_nowhere_yet():
    assert home_of(nn.Linear(2, 2, device="meta")).type == "cpu"


def test_the_watch_tells_the_probe_which_uuid_is_known(tmp_path, model, optimizer, monkeypatch):
    known, device = [], FakeDevice()
    monkeypatch.setattr(device, "describe", lambda uuid, _failed: known.append(uuid) or {})
    Watch(RankIdentity("gpt", "l", device_uuid="GPU-7"), a_recorder(tmp_path)).torch(model, optimizer, device=device)
    assert known == ["GPU-7"]


def test_what_is_declared_reaches_the_service_with_the_ranks_next_introduction(tmp_path, model, optimizer):
    rank = Rank(tmp_path)
    reader = RingReader(rank.recorder.path)
    before = reader.identity_number
    rank.watch.torch(model, optimizer)
    assert reader.identity_number > before
    assert reader.header.identity["device_type"] == "cpu"
    reader.close()
