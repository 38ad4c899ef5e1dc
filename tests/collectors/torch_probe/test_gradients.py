"""What a probe makes of gradients: how often, which of them together, under which loss scale; and fingerprints."""

import math

import pytest
import torch
from torch import nn

from rankwatch.torch_probe import TorchProbe
from rankwatch.torch_probe.fingerprint import bit_sum, fingerprint
from rankwatch.torch_probe.gradients import SMALL_ELEMENTS, LocalGradients
from rankwatch.torch_probe.share import SKIPS_MAX
from rankwatch.torch_probe.start import EVERY_MAX, Sampling
from tests.support.clock import FakeClock
from tests.support.ranks.sink import FakeSink, Watched, a_step


def run(clock: FakeClock, sampling: Sampling, steps: range, step_s: float, cost_s: float) -> list[int]:
    """Steps of a loop that measures when it is due; returns those in which it did."""
    measured = []
    for step in steps:
        sampling.step_begins(step)
        clock.advance(step_s)
        if sampling.due:
            measured.append(step)
            sampling.took(int(cost_s * 1e9))
    return measured


@pytest.mark.parametrize(
    ("cost_s", "every"), [(0.0005, 1), (0.0011, 2), (0.0021, 4), (0.0079, 8), (10.0, EVERY_MAX)], ids=str
)
def test_measurements_take_at_most_their_part_of_the_time_and_come_in_steps_that_all_ranks_share(cost_s, every):
    clock = FakeClock(10**9)
    sampling = Sampling(0.01, now=lambda: clock.now_ns)
    run(clock, sampling, range(100), 0.1, cost_s)
    measured = run(clock, sampling, range(100, 300), 0.1, cost_s)
    assert measured == [step for step in range(100, 300) if step % every == 0]


def test_the_interval_follows_longer_steps_but_not_one_slow_measurement():
    clock = FakeClock(10**9)
    sampling = Sampling(0.01, now=lambda: clock.now_ns)
    run(clock, sampling, range(40), 0.1, 0.0005)
    run(clock, sampling, range(40, 41), 0.1, 1.0)
    assert run(clock, sampling, range(41, 60), 0.1, 0.0005) == list(range(41, 60))
    run(clock, sampling, range(60, 200), 0.01, 0.0005)
    assert sampling.every == 8
    run(clock, sampling, range(200, 500), 0.1, 0.0005)
    assert sampling.every == 1


def test_the_line_says_how_often_the_norm_is_measured(sink, model, optimizer, probe, capsys):
    for step in range(4):
        probe._sampling.every = 1 if step < 2 else 8
        with a_step(probe, optimizer, step):
            model(torch.ones(5, 4)).sum().backward()
    assert "gradient norm every 8 steps" in sink.declared["watched"]
    assert len(capsys.readouterr().err.splitlines()) == 2


@pytest.mark.parametrize("parts", [{}, {"local_gradients": False}, {"on_nonfinite": "skip"}], ids=str)
def test_only_a_norm_that_explains_nothing_else_is_left_out(sink, model, optimizer, parts):
    probe = TorchProbe(sink, model, optimizer, **parts)
    probe._sampling.due = False
    assert probe._takes_norm() is bool(parts)


def test_a_step_without_the_total_norm_still_names_the_parameter_that_is_not_finite(sink, model, optimizer, probe):
    model[0].bias.register_hook(lambda grad: grad * math.nan)
    with a_step(probe, optimizer, 1):
        probe._sampling.due = False
        model(torch.ones(5, 4)).sum().backward()
    assert sink.exact["nonfinite"] == 1
    assert sink.declared["parameters"][sink.exact["nonfinite_first"]] == "0.bias"


# ---- gradients that are read together --------------------------------------------------------------------------------


def norm_of(*tensors: torch.Tensor) -> float:
    return torch.linalg.vector_norm(torch.cat([tensor.flatten().double() for tensor in tensors])).item()


def gradients(count: int) -> dict[int, torch.Tensor]:
    """Small and large ones in turns."""
    generator = torch.Generator().manual_seed(0)
    sizes = [SMALL_ELEMENTS + 1 if number % 2 else 7 for number in range(count)]
    return {number: torch.randn(size, generator=generator) for number, size in enumerate(sizes)}


@pytest.mark.parametrize("again", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 2), (2, 3, 4, 5), (4, 5)], ids=str)
def test_a_gradient_that_is_read_again_replaces_what_was_read_of_it_before(again):
    local, first = LocalGradients(on_host=True), gradients(4)
    local.add(first)
    second = {index: gradients(6)[index] * 3 for index in again}
    local.add(second)
    found = local.result()
    assert found.norm == pytest.approx(norm_of(*(first | second).values()), rel=1e-6)


def test_non_finite_ones_are_found_among_small_and_large_ones_in_their_order_and_until_they_are_read_again():
    local, found = LocalGradients(on_host=True), gradients(6)
    found[3][5], found[2][0] = math.inf, math.nan
    local.add({index: found[index] for index in (5, 4, 3, 2, 1, 0)})
    assert local.result()[1:] == (2, 3)
    local.add({3: torch.ones(3)})
    assert local.result()[1:] == (1, 2)
    local.clear()
    assert local.result() is None


@pytest.mark.parametrize(
    "change", [torch.clone, torch.Tensor.half, torch.Tensor.double], ids=["none", "half", "double"]
)
@pytest.mark.parametrize("sparse", [False, True], ids=["strided", "sparse"])
def test_gradients_of_the_same_parameters_may_change_their_type_and_become_sparse(change, sparse):
    local, found = LocalGradients(on_host=True), gradients(4)
    local.add(found)
    local.clear()
    later = {index: change(tensor * 2) for index, tensor in found.items()}
    strided = list(later.values())[: 2 if sparse else 4]
    later = {index: tensor.to_sparse() if sparse and index > 1 else tensor for index, tensor in later.items()}
    local.add(later)
    assert local.result().norm == pytest.approx(norm_of(*strided), rel=1e-3)


def test_gradients_of_micro_batches_that_reach_different_parts_are_all_in_the_norm():
    parts = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])
    watched = Watched(parts)
    with watched.step():
        for part in (parts[0], parts[1], parts[0]):
            part(torch.ones(3, 4)).square().sum().backward()
    assert watched.sink.values["local_grad_norm"] == pytest.approx(
        norm_of(*(p.grad for p in parts.parameters())), rel=1e-6
    )


def fused(parameters, lr: float) -> torch.optim.Optimizer:
    """Fused optimizers are called for every step and leave out the update by themselves."""
    return torch.optim.SGD(parameters, lr=lr, fused=True)


class Job(Watched):
    def __init__(self, scale: float, optimizer=torch.optim.SGD, *, reported: bool = True, **arguments):
        torch.manual_seed(0)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6)
        model = nn.Linear(4, 2)
        super().__init__(
            model, optimizer(model.parameters(), lr=0.01), scaler=self.scaler if reported else None, **arguments
        )

    def train(self, step: int, factor: float = 1.0, clip: float | None = None) -> float:
        """Train one step with the loss times `factor`; return the norm of the true gradient."""
        self.sink.values, self.sink.exact = {}, {}
        with a_step(self.probe, number=step):
            self.optimizer.zero_grad()
            loss = self.model(torch.ones(3, 4)).square().sum() * factor
            true = torch.autograd.grad(loss, list(self.model.parameters()), retain_graph=True)
            self.scaler.scale(loss).backward()
            if clip is not None:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), clip)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in true])).item()


KINDS = pytest.mark.parametrize("optimizer", [torch.optim.SGD, fused], ids=["plain", "fused"])


REPORTED = pytest.mark.parametrize("reported", [True, False], ids=["told", "found"])


@KINDS
@REPORTED
@pytest.mark.parametrize("clip", [None, 0.001])
@pytest.mark.parametrize("local", [True, False])
def test_norms_are_those_of_the_true_loss(optimizer, clip, local, reported):
    job = Job(2.0**16, optimizer, reported=reported, local_gradients=local)
    norm = job.train(0, clip=clip)
    assert job.sink.values["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert job.sink.values.get("local_grad_norm", job.sink.values["grad_norm"]) == pytest.approx(norm, rel=1e-5)
    assert job.sink.dropped == {}


@KINDS
@REPORTED
def test_an_overflow_of_the_scaled_loss_is_a_skip_and_no_non_finite_gradient(optimizer, reported):
    job = Job(2.0**127, optimizer, reported=reported)
    for step in range(2):
        assert math.isfinite(job.train(step, factor=10.0))
        assert job.sink.values.pop("loss_scale", 2.0 ** (127 - step)) == 2.0 ** (127 - step)
        job.sink.values.pop("lr", None)  # a fused optimizer is called, and skips its update itself
        assert job.sink.values == {"optimizer_skipped": 1.0}
        assert job.sink.exact["nonfinite"] == 0
        assert "nonfinite_first" not in job.sink.exact
    assert job.scaler.get_scale() == 2.0**125  # it did overflow


@KINDS
@REPORTED
def test_a_nan_that_no_scale_can_cure_is_reported_once_the_scale_is_spent(optimizer, reported):
    job = Job(4.0, optimizer, reported=reported)
    job.train(0)  # in which a scaler that was not told is found
    nonfinite = []
    for step in range(1, 6):
        job.train(step, factor=math.nan)
        nonfinite.append(job.sink.exact["nonfinite"])
    assert nonfinite == [0, 0, 2, 2, 2]  # scales 4, 2, 1, ½, ¼
    assert math.isnan(job.sink.values["grad_norm"])


def test_a_scaler_that_is_switched_off_changes_nothing():
    job = Job(1.0)
    job.scaler = torch.amp.GradScaler("cpu", enabled=False)
    job.probe.close()
    job.probe = TorchProbe(job.sink, job.model, job.optimizer, scaler=job.scaler)
    job.train(0, factor=math.nan)
    assert job.sink.exact["nonfinite"] == 2


def test_a_scaler_that_was_not_told_is_known_from_its_first_update_on():
    job = Job(2.0**16, reported=False)
    job.train(0)
    job.sink.values.clear()
    job.train(1, factor=2.0**120)
    assert job.sink.values == {"optimizer_skipped": 1.0, "loss_scale": 2.0**16}
    job.train(2)
    assert job.sink.values["loss_scale"] == 2.0**15
    assert "optimizer_skipped" not in job.sink.values


def test_a_nan_from_the_first_step_on_is_reported_when_no_scaler_explains_it_any_more():
    job = Job(2.0**16, reported=False)
    reported = []
    for step in range(SKIPS_MAX + 1):
        job.train(step, factor=math.nan)
        reported.append(job.sink.exact["nonfinite"])
    assert reported == [0] * (SKIPS_MAX - 1) + [2, 2]
    assert job.sink.exact["nonfinite_first"] >= 0


@pytest.mark.parametrize("guarded", [False, True])
def test_without_a_scaler_a_nan_is_reported_in_its_step_whether_or_not_the_loop_leaves_the_update_out(guarded):
    job = Job(1.0, reported=False)
    for step, factor in enumerate((1.0, math.nan)):
        with a_step(job.probe, number=step):
            job.optimizer.zero_grad()
            loss = job.model(torch.ones(3, 4)).sum() * factor
            loss.backward()
            if not guarded or loss.isfinite():
                job.optimizer.step()
    assert job.sink.exact["nonfinite"] == 2
    assert math.isnan(job.sink.values["grad_norm"])


def test_each_of_two_optimizers_under_one_scaler_is_judged_by_itself():
    torch.manual_seed(0)
    sink, scaler = FakeSink(), torch.amp.GradScaler("cpu", init_scale=2.0**16)
    models = [nn.Linear(4, 2), nn.Linear(4, 2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    probe = TorchProbe(sink, models, optimizers)
    recorded = []
    for step, factors in enumerate([(1.0, 1.0), (1.0, 2.0**120), (1.0, 1.0)]):
        sink.values, sink.exact = {}, {}
        with a_step(probe, number=step):
            for model, optimizer, factor in zip(models, optimizers, factors, strict=True):
                optimizer.zero_grad()
                scaler.scale(model(torch.ones(3, 4)).square().sum() * factor).backward()
                scaler.step(optimizer)
            scaler.update()
        recorded.append((set(sink.values), sink.exact["nonfinite"], sink.values["loss_scale"]))
    usual, skipped = {"grad_norm", "local_grad_norm", "loss_scale", "lr"}, {"optimizer_skipped", "loss_scale", "lr"}
    assert recorded == [(usual, 0, 2.0**16), (skipped, 0, 2.0**16), (usual, 0, 2.0**15)]


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.complex64]


def tensor_of(dtype: torch.dtype, count: int) -> torch.Tensor:
    """`count` elements of random bits."""
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (count * size,), dtype=torch.uint8).view(dtype)


def flip(tensor: torch.Tensor, byte: int, bit: int) -> None:
    tensor.view(torch.uint8)[byte] ^= 1 << bit


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 11])
def test_every_single_flipped_bit_changes_the_fingerprint(dtype, count):
    tensor = tensor_of(dtype, count)
    before = fingerprint([tensor])
    for byte in range(tensor.numel() * tensor.element_size()):
        for bit in range(8):
            flip(tensor, byte, bit)
            assert fingerprint([tensor]) != before, f"byte {byte} bit {bit}"
            flip(tensor, byte, bit)
    assert fingerprint([tensor]) == before


@pytest.mark.parametrize(
    "view",
    [
        lambda base: base.t(),
        lambda base: base[:, 1:4],
        lambda base: base[::2],
        lambda base: base.view(-1)[1:],
        lambda base: base.view(-1)[3:8],
        lambda base: base.view(2, 2, 3, 4).to(memory_format=torch.channels_last),
        lambda base: base[1, 2],
        lambda base: base[:1, :].expand(3, 12),
    ],
    ids=["transposed", "columns", "every second row", "odd offset", "middle", "channels last", "scalar", "expanded"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_flipped_bit_is_seen_in_strided_and_misaligned_tensors(view, dtype):
    base = tensor_of(dtype, 48).view(4, 12)
    tensor = view(base)
    before = fingerprint([tensor])
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    words = tensor.view(bits)
    for place in {(0,) * tensor.dim(), tuple(size - 1 for size in tensor.shape)}:
        words[place] ^= 1
        assert fingerprint([tensor]) != before
        words[place] ^= 1
    assert fingerprint([tensor]) == before


def test_equal_replicas_have_equal_fingerprints_and_the_order_of_tensors_does_not_matter():
    tensors = [tensor_of(dtype, count) for dtype in DTYPES for count in (3, 8)]
    copies = [tensor.clone() for tensor in reversed(tensors)]
    assert fingerprint(tensors) == fingerprint(copies)


def test_nan_payloads_and_the_sign_of_zero_count():
    zero = torch.zeros(4)
    assert fingerprint([zero]) != fingerprint([-zero])
    nan = torch.full((4,), float("nan"))
    other = nan.clone()
    other.view(torch.int32)[2] ^= 1
    assert fingerprint([nan]) != fingerprint([other])


def test_the_fingerprint_is_a_signed_64_bit_number_even_when_the_sum_wraps():
    big = torch.full((5,), torch.iinfo(torch.int64).max)
    assert fingerprint([big]) == (5 * (2**63 - 1) + 2**63) % 2**64 - 2**63


def test_no_tensors_and_empty_tensors_have_nothing_to_sum():
    assert bit_sum([]) is None
    assert fingerprint([torch.empty(0), torch.empty(0, 3)]) == 0


def test_parameters_are_read_without_recording_a_graph():
    total = bit_sum([torch.nn.Parameter(torch.ones(3))])
    assert not total.requires_grad
