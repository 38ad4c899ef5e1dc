"""A step that an exception ends: what was not finite in it is recorded, and the service names rank and parameter."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from rankwatch import wire
from rankwatch.reader import Note, StepEntry, ValuesEntry
from rankwatch_detectors.base import Kind
from rankwatch_detectors.catalogue import detectors
from rankwatch_service.job.assembler import Assembler
from tests.support.ranks.recorders import Rank
from tests.support.values.batches import batch, bundle, table

pytestmark = pytest.mark.torch

BAD_STEP = 2


def train(rank: Rank, *, bad: bool, form: str = "with") -> Exception:
    """A loop whose clipping raises on a norm that is not finite, or that breaks in step 2 for another reason."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch = rank.watch
    watch.torch(model, optimizer, fingerprint_every=1)

    def work(step: int) -> None:
        optimizer.zero_grad()
        broken = step == BAD_STEP
        x = torch.ones(2, 4)
        loss = model(x).square().mean() * (math.nan if bad and broken else 1.0)
        watch.log(loss=loss.item(), accuracy=0.5)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        if broken:
            raise ValueError("the data is at its end")
        optimizer.step()

    try:
        if form == "for":
            for step in watch.steps(5):
                work(step)
        while True:
            with watch.step() as step:
                work(step)
    except Exception as error:
        watch.crashed(error, error.__traceback__)
        return error


@pytest.fixture
def rank(tmp_path) -> Rank:
    return Rank(tmp_path)


@pytest.mark.parametrize("form", ["with", "for"])
def test_gradients_that_make_the_clipping_raise_are_recorded_before_the_exception(rank, form):
    assert "non-finite" in str(train(rank, bad=True, form=form))
    assert [entry.step for entry in rank.entries if isinstance(entry, StepEntry)] == [0, 1]
    *_, values, end = rank.entries
    assert isinstance(values, ValuesEntry)
    assert (values.step, values.values["nonfinite"]) == (BAD_STEP, 4)
    assert values.values["nonfinite_first"] in (2, 3)  # of the last layer
    assert math.isnan(values.values["loss"])
    assert not {"accuracy", "fingerprint"} & set(values.values)
    assert isinstance(end, Note)
    assert end.kind == "exception"
    assert rank.watch.errors == 0, rank.watch.last_error


def test_of_a_step_that_breaks_for_another_reason_nothing_is_recorded(rank):
    train(rank, bad=False)
    assert not [entry for entry in rank.entries if isinstance(entry, ValuesEntry)]
    assert rank.notes("exception")


def test_a_loop_that_goes_on_after_the_exception_records_nothing_of_the_broken_step(rank):
    model = nn.Linear(4, 1)
    rank.watch.torch(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for factor in (math.nan, 1.0):
        try:
            with rank.watch.step():
                model.zero_grad()
                (model(torch.ones(2, 4)).sum() * factor).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        except RuntimeError:
            continue
    (entry,) = [entry for entry in rank.entries if isinstance(entry, StepEntry | ValuesEntry)]
    assert entry.values["nonfinite"] == 0


def test_the_service_names_the_rank_and_the_parameter_of_a_step_that_no_rank_has_finished():
    names = ("0.weight", "1.weight")
    reported = [wire.RankInfo(rank, 2, host="node-1", dp=rank, parameters=names, replicated=True) for rank in range(2)]
    exact = {"nonfinite": [None, 1], "nonfinite_first": [None, 1]}
    sent = [
        batch(0, ranks=tuple(reported), steps=table([0, 0], [0, 1], loss=[1.0, 1.0])),
        batch(1, values=table([1, 1], [0, 1], exact, grad_norm=[math.nan, math.nan])),
    ]
    assembler, judges = Assembler(), detectors()
    seen = [one for number, part in enumerate(sent) for one in assembler.add(bundle(part), float(number))]
    seen += assembler.tick(100.0, 0.0)
    findings = [finding for one in seen for evaluate in judges for finding in evaluate.observe(one)]
    (finding,) = [finding for finding in findings if finding.kind is Kind.NONFINITE]
    assert (finding.onset_step, finding.ranks, finding.evidence["parameter"]) == (1, (1,), "1.weight")
