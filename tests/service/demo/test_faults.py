import math
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from rankwatch_service.demo.rank_files import Armed, FaultFile, FaultKind

pytestmark = pytest.mark.torch

ATTEMPT = "job-0.1"


@pytest.fixture(scope="module")
def faulty_rank() -> Any:
    with warnings.catch_warnings():
        # torch looks for a GPU through whichever NVML binding is installed and warns about one of them.
        warnings.simplefilter("ignore", FutureWarning)
        from rankwatch_service.demo.training import FaultyRank
    return FaultyRank


@pytest.fixture
def model(faulty_rank: Any) -> Any:
    import torch

    torch.manual_seed(1)
    return torch.nn.Linear(3, 2)


def weights(model: Any) -> Any:
    import torch

    return torch.cat([parameter.detach().reshape(-1).clone() for parameter in model.parameters()])


def bits_that_differ(before: Any, after: Any) -> int:
    import torch

    xor = before.view(torch.int32) ^ after.view(torch.int32)
    return sum(int(word & 0xFFFFFFFF).bit_count() for word in xor.view(-1).tolist())


def test_exactly_one_mantissa_bit_flips_in_its_step_and_attempt_only(tmp_path, model, faulty_rank):
    armed = Armed(FaultKind.BIT_FLIP, rank=1, attempt=ATTEMPT, step=5)
    FaultFile(tmp_path).arm([armed])
    rank = faulty_rank(tmp_path, rank=1)
    clean = weights(model)
    for attempt, step in (("job-0.0", 5), (ATTEMPT, 4)):
        rank.begin_step(attempt, step, model)
        assert bits_that_differ(clean, weights(model)) == 0
    rank.begin_step(ATTEMPT, 5, model)
    assert bits_that_differ(clean, weights(model)) == 1
    rank.begin_step("job-0.2", 5, model)
    assert bits_that_differ(clean, weights(model)) == 1


def test_one_gradient_gets_one_nan_and_the_next_is_clean_again(tmp_path: Path, model: Any, faulty_rank: Any) -> None:
    import torch

    FaultFile(tmp_path).arm([Armed(FaultKind.NAN, rank=0, attempt=ATTEMPT, step=5)])
    rank = faulty_rank(tmp_path, rank=0)
    bad = []
    for step in (4, 5, 6):
        rank.begin_step(ATTEMPT, step, model)
        model.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        gradients = [value for p in model.parameters() for value in p.grad.view(-1).tolist()]
        bad.append(sum(math.isnan(value) for value in gradients))
    assert bad == [0, 1, 0]


def test_a_slow_rank_burns_as_much_cpu_as_it_computes_until_disarmed(tmp_path, model, faulty_rank):
    file = FaultFile(tmp_path)
    armed = Armed(FaultKind.SLOW, rank=0, attempt=ATTEMPT, step=2)
    file.arm([armed])
    rank = faulty_rank(tmp_path, rank=0)

    def step_cpu_s(step: int) -> float:
        began_s = time.thread_time()
        rank.begin_step(ATTEMPT, step, model)
        while time.thread_time() - began_s < 0.02:
            pass
        rank.in_forward()
        return time.thread_time() - began_s

    clean = [step_cpu_s(0), step_cpu_s(1)]
    slow = [step_cpu_s(2), step_cpu_s(3), step_cpu_s(4)]
    file.arm([])
    healed = step_cpu_s(5)
    # CPU time, not wall time: other work on the machine does not count. Each step has 20 ms of its own.
    assert all(seconds < 0.03 for seconds in [*clean, healed])
    assert all(0.038 < seconds < 0.06 for seconds in slow)
    injected = file.injected(armed)
    assert injected is not None
    assert injected.step == 2
