"""Records that nobody should have written, panics, and NaN anywhere: each is reported, and everything else goes on."""

import math
import random
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from rankwatch import wire
from rankwatch_detectors.base import OBSERVATIONS
from rankwatch_detectors.catalogue import detectors
from rankwatch_service.simulate.faults import NonFinite, Slow
from rankwatch_service.simulate.job import Job
from tests.support.recordings.outcome import live_through, with_body
from tests.support.recordings.recording import Timed, end_of, stream_over, telemetry
from tests.support.values.batches import batch, column, progress, ranks, table

GOOD = wire.encode(batch(ranks=ranks(2), steps=table([1, 1], [0, 1], loss=[1.0, 2.0])))
HUGE = wire.encode(
    batch(steps=table([1], [0], loss=[1.0]), events=(wire.Event("note", 1, fields={"text": "x" * 10**7}),))
)


def nested(depth: int) -> bytes:
    fields: object = 1
    for _ in range(depth):
        fields = [fields]
    return msgspec.msgpack.encode(fields)


def with_field(name: str, value: object) -> bytes:
    """A sound batch in which one field holds something else, as another program might encode it."""
    fields = msgspec.msgpack.decode(GOOD)
    return msgspec.msgpack.encode(fields | {name: value})


def with_invalid_text() -> bytes:
    body = wire.encode(batch(host="HOSTHOST"))
    return body.replace(b"HOSTHOST", b"HOST\xff\xfe\x80\x81")


BAD = {
    "random bytes": (random.Random(1).randbytes(512), {"malformed"}),
    "nothing": (b"", {"malformed"}),
    "cut off": (GOOD[:-7], {"malformed"}),
    "a list instead of a batch": (msgspec.msgpack.encode([1, 2, 3]), {"malformed"}),
    "a newer schema": (wire.encode(batch(schema=2)), {"version"}),
    "ten megabytes": (HUGE, {"too_large"}),
    "nine hundred lists in each other": (nested(900), {"malformed"}),
    "a bomb of open lists": (b"\x91" * 200_000, {"malformed"}),
    "text that is not UTF-8": (with_invalid_text(), {"malformed"}),
    "a number beyond 64 bits": (with_field("seq", 2**64 - 1), {"malformed", "range"}),
    "a negative number": (with_field("seq", -(2**63)), {"range"}),
    "a number where a name should be": (with_field("job", 7), {"malformed"}),
    "a table that lies about its rows": (
        wire.encode(batch(steps=wire.Table(10**12, {"step": column([1], "i8"), "rank": column([0], "u4")}))),
        {"columns", "too_large"},
    ),
    "a rank that cannot be": (wire.encode(batch(steps=table([1], [2**31], loss=[1.0]))), {"range"}),
    "an age that is no number": (wire.encode(batch(progress=(progress(0, 1, step_age_s=math.nan),))), {"range"}),
    "another job's name": (wire.encode(batch(job="other")), {"name"}),
}


def training() -> Job:
    return Job(world_size=4, steps=70, step_s=0.5, seed=4).inject(NonFinite(2, 60))


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    lived = live_through(tmp_path_factory.mktemp("clean"), list(telemetry("gpt", training())))
    yield lived
    lived.engine.dispose()


def test_every_kind_of_bad_record_is_refused_with_its_reason_and_harms_nobody(live, clean):
    entries = list(telemetry("gpt", training()))
    step = len(entries) // (len(BAD) + 1)
    for number, (body, _) in enumerate(BAD.values(), 1):
        # From the middle on, so that each meets a job that is being watched.
        place = number * step
        entries.insert(place, with_body(entries[place], body))
    lived = live(entries)
    reasons = [reason for reason, _ in lived.refused]
    assert len(reasons) == len(BAD)
    for (what, (_, possible)), reason in zip(BAD.items(), reasons, strict=True):
        assert reason in possible, what
    assert all(detail for _, detail in lived.refused)
    assert lived.outcome == clean.outcome
    assert lived.outcome.kinds("gpt") == {"nonfinite"}


def changed(job: Job, change: Callable[[wire.Table, float], wire.Table]) -> list[Timed]:
    """The job's telemetry with other tables of steps, each by what it was and when it was sent."""
    entries = []
    for timed in telemetry("gpt", job):
        message = wire.decode_batch(timed.entry.value)
        if message.steps is not None:
            message = msgspec.structs.replace(message, steps=change(message.steps, timed.time_s))
        entries.append(with_body(timed, wire.encode(message)))
    return entries


EDGES = (math.nan, math.inf, -math.inf, -0.0, 5e-324, 1e308, -1e308)
FIRST_EDGE_S = 10.0


def test_numbers_at_the_edge_are_no_errors_and_the_detectors_go_on(live):
    """Legal values that break careless arithmetic, in all metrics of one rank; a straggler afterwards is found."""
    job = Job(world_size=8, steps=200, step_s=0.5, seed=6).inject(Slow(5, 140, 1.6))
    edges = iter(EDGES)

    def with_edge(steps: wire.Table, time_s: float) -> wire.Table:
        edge = next(edges, None) if time_s > FIRST_EDGE_S else None
        return steps if edge is None else with_first(steps, edge)

    lived = live(changed(job, with_edge))
    assert next(edges, None) is None
    assert lived.refused == []
    assert ("straggler", "rank:5") in {(kind, scope) for kind, scope, *_ in lived.outcome.of("gpt")}


def with_first(steps: wire.Table, value: float) -> wire.Table:
    """The first row's values replaced in every column of real numbers."""
    columns = dict(steps.columns)
    for name, one in columns.items():
        if one.dtype == "f8":
            columns[name] = column([value, *np.frombuffer(one.data, "<f8")[1:]])
    return wire.Table(steps.rows, columns)


class PanicError(BaseException):
    """What an extension in another language raises when it gives up: no `Exception`."""


class Panics:
    """A detector that panics at every frame of one step, and when it is restored."""

    name, version, reads = "panics", 1, OBSERVATIONS

    def observe(self, observation):
        if getattr(observation, "step", None) == 30:
            raise PanicError("gives up")
        return ()

    def snapshot(self):
        return {}

    def restore(self, state):
        raise PanicError("cannot be restored")

    def inherit(self, before):
        pass


def test_a_panic_that_is_no_exception_stops_neither_the_stream_nor_the_other_detectors(live, clean):
    def make():
        return [*detectors(), Panics()]

    entries = list(telemetry("gpt", training()))
    lived = live(entries, make)
    assert lived.outcome == clean.outcome
    assert lived.refused == []
    stream = stream_over(lived.engine, end_of(entries), make)
    stream.start()
    stream.close()
    again = stream_over(lived.engine, end_of(entries), make)
    assert again.start().detectors_without_snapshot == {"gpt": ["panics"]}


RANK = 3
TRAINED = ("loss", "grad_norm", "local_grad_norm")
"""What training computes: NaN in these is an incident. NaN in a time says only that its clock failed."""
MEASURED = ("step_time_s", "busy_s", "busy_cpu_s", "wait_s", "tokens")


def corrupted(metric: str, at_step: int, steps: int = 1) -> list[Timed]:
    """The job's telemetry with NaN in one metric of one rank; the metric is added where it is not reported."""
    job = Job(world_size=8, steps=170, step_s=0.5, seed=8).inject(Slow(5, 120, 1.6))
    return changed(job, lambda table, _: with_nan(table, metric, at_step, steps))


def with_nan(table: wire.Table, metric: str, at_step: int, steps: int) -> wire.Table:
    step = np.frombuffer(table.columns["step"].data, "<i8")
    rank = np.frombuffer(table.columns["rank"].data, "<u4")
    given = table.columns.get(metric)
    values = np.ones(table.rows) if given is None else np.frombuffer(given.data, "<f8").copy()
    values[(rank == RANK) & (step >= at_step) & (step < at_step + steps)] = math.nan
    return wire.Table(table.rows, {**table.columns, metric: column(values.tolist())})


@pytest.mark.parametrize(
    ("metric", "at_step"),
    [*(("loss", step) for step in (0, 1, 63, 64, 100)), *((name, step) for name in TRAINED[1:] for step in (0, 64))],
)
def test_what_training_computed_as_nan_is_reported_in_its_step_and_a_later_straggler_too(live, metric, at_step):
    lived = live(corrupted(metric, at_step))
    found = lived.outcome.of("gpt")
    (nonfinite,) = [row for row in found if row[0] == "nonfinite"]
    assert nonfinite[3] == at_step
    assert ("straggler", "rank:5", (5,)) in {row[:3] for row in found}


@pytest.mark.parametrize("metric", MEASURED)
def test_a_measurement_that_failed_for_long_leaves_the_others_judged(live, metric):
    lived = live(corrupted(metric, 20, steps=60))
    assert ("straggler", "rank:5", (5,)) in {row[:3] for row in lived.outcome.of("gpt")}
    assert {row[2] for row in lived.outcome.of("gpt") if row[0] == "straggler"} == {(5,)}
