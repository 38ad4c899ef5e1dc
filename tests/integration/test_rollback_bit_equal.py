"""After a rollback inside the processes training is bit-equal to what it would have been, on every rank.

Every registered state is needed for that: with any one left out the comparison fails.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import rankwatch
from rankwatch.layout import Directive
from rankwatch.loop.state import Capture, TrainingState
from rankwatch.torch_probe import TorchProbe
from tests.support.ranks.gloo import on_ranks
from tests.support.ranks.ordered import opened, until
from tests.support.ranks.rollback_job import Job
from tests.support.ranks.sink import FakeSink

pytestmark = [pytest.mark.torch, pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(400)]

RANKS = 4
CAPTURED_AT, FAULT_AT, NOTICED_AT, END = 3, 4, 7, 12
FAULTS = ("flipped bit", "nan")
STATES = ("model", "optimizer", "scheduler", "data", "python", "numpy", "torch")


class Watched:
    """A job with what `watch.state` registers, one state left out if asked for."""

    def __init__(self, rank: int, without: str | None) -> None:
        self.job = Job(rank)
        objects = {name: member for name, member in self.job.objects.items() if name != without}
        self.state = TrainingState(objects, self.job.batches if without != "data" else None)
        self.without = without
        self.unregistered = self.job.batches(0)

    @property
    def batches(self) -> Iterator[Any]:
        return self.state.batches if self.state.batches is not None else self.unregistered

    def restore(self, capture: Capture) -> None:
        random = {name: value for name, value in capture.random.items() if name != self.without}
        self.state.restore(capture._replace(random=random))


def undisturbed(rank: int) -> dict[int, str]:
    """Digests of the parameters after each step, of a run that nobody watches."""
    job = Job(rank)
    batches = job.batches(0)
    return {step: train_step(job, next(batches)) for step in range(END)}


def train_step(job: Job, batch: Any, fault: str = "") -> str:
    job.train_step(batch, spoil_gradients=fault == "nan")
    if fault == "flipped bit":
        job.flip_bit()
    return job.digest()


def rolled_back(rank: int, fault: str, without: str | None) -> dict[str, Any]:
    """The same run with a fault on rank 1, noticed some steps later and undone. The fault does not come again."""
    watched = Watched(rank, without)
    sink = FakeSink()
    probe = TorchProbe(sink, watched.job.ddp, watched.job.optimizer, fingerprint_every=1)
    digests: dict[int, str] = {}
    spoiled, capture, after_restore = "", None, 0
    steps = itertools.chain(range(NOTICED_AT), range(CAPTURED_AT, END))
    for relative, step in enumerate(steps):
        if relative == CAPTURED_AT:
            capture = watched.state.capture(step)
        if relative == NOTICED_AT:
            assert capture is not None
            spoiled = digests[NOTICED_AT - 1]
            watched.restore(capture)
            after_restore = probe.after_restore()
        probe.step_begin(step, int(relative >= NOTICED_AT))
        fault_now = fault if rank == 1 and relative == FAULT_AT else ""
        digests[step] = train_step(watched.job, next(watched.batches), fault_now)
        probe.step_end(step, int(relative >= NOTICED_AT))
    assert sink.dropped == {}
    return {"digests": digests, "spoiled": spoiled, "after_restore": after_restore}


def everything(rank: int) -> dict[Any, Any]:
    results: dict[Any, Any] = {"undisturbed": undisturbed(rank)}
    for fault, without in itertools.product(FAULTS, (None, *STATES)):
        results[fault, without] = rolled_back(rank, fault, without)
    return results


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Any]]:
    return on_ranks(RANKS, everything)


@pytest.mark.ci
@pytest.mark.parametrize("fault", FAULTS)
def test_after_the_rollback_every_step_is_bit_equal_to_the_undisturbed_run_on_all_ranks(ranks, fault):
    for results in ranks:
        got = results[fault, None]
        assert got["digests"] == results["undisturbed"]
        assert got["spoiled"] != results["undisturbed"][NOTICED_AT - 1], "the fault changed nothing"


@pytest.mark.ci
@pytest.mark.parametrize("fault", FAULTS)
def test_all_ranks_answer_a_rollback_with_the_same_fingerprint(ranks, fault):
    answers = {results[fault, None]["after_restore"] for results in ranks}
    assert len(answers) == 1
    assert answers != {0}


@pytest.mark.ci
def test_a_flipped_bit_makes_the_replicas_differ_and_the_rollback_makes_them_equal_again(ranks):
    assert len({results["flipped bit", None]["spoiled"] for results in ranks}) > 1
    assert len({results["flipped bit", None]["digests"][END - 1] for results in ranks}) == 1


@pytest.mark.ci
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("without", STATES)
def test_leaving_out_any_one_state_makes_the_comparison_fail(ranks, fault, without):
    assert any(results[fault, without]["digests"] != results["undisturbed"] for results in ranks)


# ---- the same through an order ---------------------------------------------------------------------------------------

KEPT_EVERY, ORDERED_FAULT_AT, ORDERED_END = 30, 34, 200
STEP_S = 0.02
"""Added to each step before the rollback: the order has to arrive before the run ends."""
MARGIN_STEPS = 50
"""One second for the order to reach all ranks, also on a busy machine."""
TIMEOUT_S = 150.0


class Loader:
    """The job's batches as a loader with a state of its own, as torchdata's: an iterator once made cannot be moved."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.drawn = 0

    def __iter__(self) -> Iterator[Any]:
        return self._from_here(self.job.batches(self.drawn))

    def _from_here(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.drawn += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.drawn = state["drawn"]


def obeying(rank: int, directory: str, fault: str, data: str) -> dict[str, Any]:
    """A run under a watch; the rollback comes as an order through the recorder file."""
    job = Job(rank)
    watch = rankwatch.start(
        job="j",
        launch="l",
        rank=rank,
        world_size=RANKS,
        agent=False,
        stack_signal=None,
        env={"RANKWATCH_DIR": directory},
    )
    watch.torch(job.ddp, job.optimizer, fingerprint_every=1)
    watch.state(**job.objects, data=job.batches if data == "callable" else Loader(job), keep=8, every=KEPT_EVERY)
    batches = watch.batches
    digests: dict[int, str] = {}
    attempts = []
    for step in watch.steps(ORDERED_END):
        first = watch.attempt == "l.0"
        fault_now = fault if first and rank == 1 and step == ORDERED_FAULT_AT else ""
        digests[step] = train_step(job, next(batches), fault_now)
        attempts.append((watch.attempt, step))
        time.sleep(STEP_S if first else 0)
    errors = watch.errors
    watch.close()
    return {"digests": digests, "attempts": attempts, "errors": errors, "rolled back": watch.rolled_back}


def to_the_end(rank: int) -> dict[int, str]:
    job = Job(rank)
    batches = job.batches(0)
    return {step: train_step(job, next(batches)) for step in range(ORDERED_END)}


def order_rollback(directory: Path) -> list[Any]:
    """What agents and api do, for ranks of one host: hold at S, do, go. Returns the ranks' answers."""
    until(lambda: len(list(directory.glob("*.ring"))) == RANKS, TIMEOUT_S)
    readers = [until(lambda path=path: opened(path)) for path in sorted(directory.glob("*.ring"))]
    until(lambda: min(reader.progress().step for reader in readers) >= ORDERED_FAULT_AT, TIMEOUT_S)
    hold = Directive(
        order="o1",
        attempt="l.0",
        phase="hold",
        action="rollback",
        step=max(reader.progress().step for reader in readers) + MARGIN_STEPS,
        lease_s=TIMEOUT_S,
        checkpoint=f"memory:l.0:{KEPT_EVERY}",
        checkpoint_step=KEPT_EVERY,
        k=1,
    )
    for phase, answer in (("hold", "held"), ("do", "done"), ("go", "went")):
        for reader in readers:
            reader.directives.write(hold._replace(phase=phase))
        until(lambda is_now=answer: all(reader.progress().answer.answer == is_now for reader in readers), TIMEOUT_S)
        if phase == "do":
            answers = [reader.progress().answer for reader in readers]
    for reader in readers:
        reader.close()
    return answers


@pytest.mark.parametrize(
    ("fault", "data"),
    [
        ("flipped bit", "callable"),
        pytest.param("nan", "callable", marks=pytest.mark.ci),
        pytest.param("nan", "loader", marks=pytest.mark.ci),
    ],
)
def test_an_ordered_rollback_makes_training_bit_equal_to_the_undisturbed_run(tmp_path, fault, data):
    with ThreadPoolExecutor(1) as pool:
        ordering = pool.submit(order_rollback, tmp_path)
        results = on_ranks(RANKS, obeying, str(tmp_path), fault, data)
        answers = ordering.result()
    expected = on_ranks(RANKS, to_the_end)
    assert [result["errors"] for result in results] == [0] * RANKS
    assert [result["digests"] for result in results] == expected
    assert {result["rolled back"].mode for result in results} == {"full"}
    assert len({tuple(result["attempts"]) for result in results}) == 1
    assert ("l.1", KEPT_EVERY) in results[0]["attempts"]
    assert {(answer.step, answer.k) for answer in answers} == {(KEPT_EVERY, 1)}
    assert len({answer.fingerprint for answer in answers}) == 1
    assert answers[0].fingerprint != 0
