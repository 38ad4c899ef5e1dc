"""A log of one partition in memory, with the times at which its records were appended."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from heapq import merge
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Engine, insert, select

from rankwatch import wire
from rankwatch_detectors.base import Frame, Observation, Occurrence
from rankwatch_detectors.catalogue import detectors
from rankwatch_detectors.metric_rule import Condition, MetricRule
from rankwatch_detectors.tuning import Profile
from rankwatch_service.incidents.model import incident_id
from rankwatch_service.log.base import Entry, Record
from rankwatch_service.log.control_log import ControlLog
from rankwatch_service.names import ALL_JOBS
from rankwatch_service.policy.control_records import (
    AlertsReceived,
    IncidentReview,
    ReportedAlert,
    RulesSet,
    encode_control,
)
from rankwatch_service.policy.policy import Mode, Policy, PolicyLimits, Rule, policy_record
from rankwatch_service.series.writer import SeriesWriter
from rankwatch_service.simulate.batches import batches
from rankwatch_service.simulate.faults import Hang, Kill, NonFinite, Restart, Slow
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job, RankPlacement
from rankwatch_service.store import models
from rankwatch_service.store.engine import read, write
from rankwatch_service.stream.loop import Stream
from rankwatch_service.stream.sources import Source, SqlSource
from rankwatch_service.tuning import Tuning, TuningSet
from tests.support.clock import FakeClock
from tests.support.store.database import new_database


class RecordedLog:
    """What a stream needs of `rankwatch_service.stream.sources.Source`."""

    def __init__(self) -> None:
        self._records: list[Record] = []

    def record(self, entry: Entry, appended_unix_ns: int) -> None:
        self._records.append(Record(0, len(self._records), entry.key, entry.value, appended_unix_ns))

    @property
    def partitions(self) -> int:
        return 1

    def partition_of(self, key: str) -> int:
        return 0

    def read(self, partition: int, position: int, limit: int, wait_s: float = 0.0) -> list[Record]:
        return self._records[position : position + limit]

    def drained(self, partition: int, position: int) -> bool:
        return position >= len(self._records)

    def end(self, partition: int) -> int:
        return len(self._records)

    def begin(self, partition: int) -> int:
        return 0

    def processed(self, partition: int, committed: int, needed: int) -> None:
        """It keeps everything."""


UNEVEN = MetricRule("uneven", "busy_s", Condition.PEERS, 1.5, hold_s=3.0, jobs=("slo?",))
HIGH = MetricRule("high", "loss", Condition.ABOVE, 1.0, severity="info", jobs=("hang",))
MOVED = MetricRule("moved", "local_grad_norm", Condition.CHANGE, jobs=("nan",))
START_NS = 1_700_000_000_000_000_000
FIRST = incident_id("nan", "launch0.0", "nonfinite", "rank:3", 1)
"""The incident that a person acknowledges in the recording."""


@dataclass(frozen=True)
class Timed:
    time_s: float
    entry: Entry
    control: bool = False
    """Whether it goes to the control log."""


def telemetry(name: str, job: Job) -> Iterator[Timed]:
    for message in batches(name, saves(generate(job)), start_unix_ns=START_NS):
        yield Timed(message.time_s, Entry(name, wire.encode(declared(message.batch))))


def declared(message: wire.Batch) -> wire.Batch:
    """The message of an agent that declares where its ranks save, and that one of them does."""
    where: dict[str, Any] = {"checkpoint_roots": ("/saved",), "checkpoint_shards": 1}
    infos = tuple(msgspec.structs.replace(info, **where) for info in message.ranks)
    return msgspec.structs.replace(message, ranks=infos)


def saves(observations: Iterable[Observation]) -> Iterator[Observation]:
    """The same job, with a checkpoint every 20 steps, every other one on disk."""
    for observation in observations:
        yield observation
        if isinstance(observation, Frame) and observation.family == "steps" and observation.step % 20 == 19:
            attempt, step = observation.attempt, observation.step
            tier = "local" if step % 40 == 39 else "memory"
            fields = {"tier": tier, "location": f"/saved/{step}", "seconds": 0.1, "bytes": 10, "shards": 1}
            yield Occurrence("checkpoint_saved", attempt, "host-0", observation.time_s, 0, step, fields)


def control(time_s: float, key: str, record) -> Timed:
    return Timed(time_s, Entry(key, encode_control(record)), control=True)


def alerts(state: str, *hosts: str) -> AlertsReceived:
    """An alert of each of these hosts."""
    return AlertsReceived(
        tuple(ReportedAlert(host, "DiskFull", state, summary="full", hosts=(host,)) for host in hosts)
    )


def recording() -> list[Timed]:
    """About 1,200 records: five kinds of faults, what people set, an acknowledgement, alerts that outlast a
    launch, repeats, rubbish."""
    size = {"world_size": 8, "step_s": 0.5}
    nan = Job(steps=130, seed=1, **size, placement=RankPlacement(ranks_per_host=4)).inject(
        NonFinite(3, 80), Restart(84, 70, relaunch=False)
    )
    slow = Job(steps=220, seed=2, **size).inject(Slow(5, 60, 2.0, until_step=110))
    hang = Job(steps=90, seed=3, **size).inject(Hang(2, 60, seconds=15), Kill(2, 75), Restart(75, 60))
    rules = (
        Rule("r1", Mode.ACT, kind="nonfinite", action="rollback"),
        Rule("r2", Mode.ACT, kind="hang", action="relaunch"),
        Rule("r3", Mode.SUGGEST, kind="straggler", action="pause"),
    )
    policy = Policy(rules, PolicyLimits(cool_down_s=5.0))
    people = [
        control(0.0, ALL_JOBS, policy_record(policy)),
        control(0.5, ALL_JOBS, RulesSet((UNEVEN, MOVED, HIGH))),
        control(20.0, ALL_JOBS, RulesSet((UNEVEN, MOVED, replace(HIGH, value=1.5)))),
        control(20.0, ALL_JOBS, TuningSet(1, (Tuning("s*", settings={"straggler.wall.ratio_min": 1.5}),))),
        control(33.0, ALL_JOBS, TuningSet(2, (Tuning("slow", Profile.SENSITIVE), Tuning("*", Profile.QUIET)))),
        control(60.0, ALL_JOBS, TuningSet(3)),
        control(34.8, "nan", IncidentReview(FIRST, "acknowledged", "ann", "looking")),
        control(35.0, "nan", IncidentReview(FIRST, "commented", "ann", "bad batch of data")),
        control(12.0, "slow", alerts("firing", "host-0", "elsewhere")),
        control(30.0, "slow", alerts("resolved", "elsewhere")),
        control(48.0, "slow", alerts("expired", "host-0")),
        control(25.0, "hang", alerts("firing", "host-0")),
        control(60.0, "hang", alerts("resolved", "host-0")),
        Timed(20.0, Entry("slow", b"rubbish")),
    ]
    sources = [telemetry("nan", nan), telemetry("slow", slow), telemetry("hang", hang)]
    entries = list(merge(*sources, sorted(people, key=lambda t: t.time_s), key=lambda t: t.time_s))
    # Every tenth record comes again, three records later.
    again = [(index + 3, timed) for index, timed in enumerate(entries) if index % 10 == 0]
    for shift, (index, timed) in enumerate(again):
        later = entries[min(index + shift, len(entries) - 1)].time_s
        entries.insert(index + shift, replace(timed, time_s=later))
    return entries


def record_log(folder: Path, entries: list[Timed]) -> Path:
    """A database that holds the log and nothing that stream makes of it."""
    engine = new_database(folder)
    record_controls(engine, entries)
    rows = [
        {"partition": 0, "position": position, "key": timed.entry.key, "value": timed.entry.value}
        | {"appended_unix_ns": START_NS + round(timed.time_s * 1e9)}
        for position, timed in enumerate(timed for timed in entries if not timed.control)
    ]
    with write(engine) as connection:
        connection.execute(insert(models.LogPartition), {"partition": 0, "next_position": len(rows)})
        connection.execute(insert(models.LogRecord), rows)
    engine.dispose()
    return folder / "rankwatch.db"


def telemetry_records(entries: list[Timed]) -> int:
    return sum(not timed.control for timed in entries)


def end_of(entries: list[Timed]) -> FakeClock:
    """A clock that stands at the end of the recording, so that every tick comes from the records."""
    return FakeClock(START_NS + round(entries[-1].time_s * 1e9))


def record_controls(engine: Engine, entries: list[Timed]) -> None:
    """What people did in a recording, without its telemetry."""
    clock = FakeClock(START_NS)
    controls = ControlLog(engine, clock)
    for timed in entries:
        if timed.control:
            clock.now_ns = START_NS + round(timed.time_s * 1e9)
            with write(engine) as connection:
                controls.append_in(connection, [timed.entry])


def stream_over(engine: Engine, clock: FakeClock, make_detectors=detectors, source: Source | None = None) -> Stream:
    """A stream over the log in the store, or over another one."""
    series = SeriesWriter(engine, clock)
    return Stream(
        engine,
        source or SqlSource(engine, clock),
        ControlLog(engine, clock),
        clock,
        make_detectors,
        lambda job, incident: {"incident": incident},
        series,
    )


def results(engine: Engine) -> dict[str, list[dict[str, Any]]]:
    """Everything that people and other systems get to see, in an order that does not depend on row numbers."""
    tables = (
        models.Incident,
        models.IncidentTransition,
        models.Announcement,
        models.Command,
        models.Checkpoint,
        models.HostRecord,
        models.Job,
        models.Attempt,
        models.Feed,
        models.DeadLetter,
    )
    found = {}
    with read(engine) as connection:
        for model in tables:
            rows = [dict(row) for row in connection.execute(select(model.__table__)).mappings()]
            for row in rows:
                if model in (models.Announcement, models.Feed, models.DeadLetter):
                    del row["id"]
            found[model.__tablename__] = sorted(rows, key=repr)
    return found
