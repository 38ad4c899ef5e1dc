"""NaN in any metric, at any step: it is told at once, and nothing else goes blind from it."""

import math

import msgspec
import numpy as np
import pytest

from rankwatch import wire
from rankwatch_service.simulate.faults import Slow
from rankwatch_service.simulate.job import Job
from tests.support.recordings.outcome import live_through, with_body
from tests.support.recordings.recording import Timed, telemetry
from tests.support.values.batches import column

RANK = 3
SLOW_FROM = 120
TRAINED = ("loss", "grad_norm", "local_grad_norm")
"""What training computes: NaN in these is an incident. NaN in a time says only that its clock failed."""
MEASURED = ("step_time_s", "busy_s", "busy_cpu_s", "wait_s", "tokens")


def job() -> Job:
    return Job(world_size=8, steps=190, step_s=0.5, seed=8).inject(Slow(5, SLOW_FROM, 1.6))


def spoilt(metric: str, at_step: int, steps: int = 1) -> list[Timed]:
    """The job's telemetry with NaN in one metric of one rank; the metric is added where it is not reported."""
    entries = []
    for timed in telemetry("gpt", job()):
        message = wire.decode_batch(timed.entry.value)
        if message.steps is not None:
            message = msgspec.structs.replace(message, steps=with_nan(message.steps, metric, at_step, steps))
        entries.append(with_body(timed, wire.encode(message)))
    return entries


def with_nan(table: wire.Table, metric: str, at_step: int, steps: int) -> wire.Table:
    step = np.frombuffer(table.columns["step"].data, "<i8")
    rank = np.frombuffer(table.columns["rank"].data, "<u4")
    given = table.columns.get(metric)
    values = np.ones(table.rows) if given is None else np.frombuffer(given.data, "<f8").copy()
    values[(rank == RANK) & (step >= at_step) & (step < at_step + steps)] = math.nan
    return wire.Table(table.rows, {**table.columns, metric: column(values.tolist())})


@pytest.mark.parametrize("at_step", [0, 1, 63, 64, 100])
@pytest.mark.parametrize("metric", TRAINED)
def test_what_training_computed_as_nan_is_told_in_its_step_and_a_later_straggler_too(tmp_path, metric, at_step):
    lived = live_through(tmp_path, spoilt(metric, at_step))
    found = lived.outcome.of("gpt")
    (nonfinite,) = [row for row in found if row[0] == "nonfinite"]
    assert nonfinite[3] == at_step
    assert ("straggler", "rank:5", (5,)) in {row[:3] for row in found}
    lived.engine.dispose()


@pytest.mark.parametrize("metric", MEASURED)
def test_a_measurement_that_failed_for_long_leaves_the_others_judged(tmp_path, metric):
    lived = live_through(tmp_path, spoilt(metric, 20, steps=60))
    assert ("straggler", "rank:5", (5,)) in {row[:3] for row in lived.outcome.of("gpt")}
    assert {row[2] for row in lived.outcome.of("gpt") if row[0] == "straggler"} == {(5,)}
    lived.engine.dispose()
