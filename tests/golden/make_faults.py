"""Plays 40 simulated faults through the stream, the router, and the order driver where the policy acts.

`python -m tests.golden.make_faults` writes `faults.txt`: for each fault one line that names it, then one digest for
each row of what users see and the database holds. `test_faults.py` plays them again and compares line by line. A change
of what the product says about a fault changes this file. To read the change, write the rows themselves before and after
it, with `python -m tests.golden.make_faults PATH`, and compare the two.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Engine, select

from rankwatch import wire
from rankwatch_detectors.base import Observation, Occurrence
from rankwatch_detectors.metric_rule import Condition, MetricRule
from rankwatch_service.log.base import Entry
from rankwatch_service.log.control_log import ControlLog
from rankwatch_service.names import ALL_JOBS
from rankwatch_service.notify.pipeline import ReceiverRoute
from rankwatch_service.orders.driver import Driver, open_orders
from rankwatch_service.orders.order import Order, Phase
from rankwatch_service.orders.running_attempt import ReceivedView, k_of, read_training, store_views
from rankwatch_service.policy.control_records import RulesSet, encode_control
from rankwatch_service.policy.policy import Mode, Policy, PolicyLimits, Rule, policy_record
from rankwatch_service.simulate.batches import batches
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job, RankPlacement
from rankwatch_service.simulate.script import apply
from rankwatch_service.store import models
from rankwatch_service.store.engine import read, write
from tests.support.clock import FakeClock
from tests.support.recordings.recording import RecordedLog, declared, saves, stream_over
from tests.support.service.webhook_receiver import route_all, subscribe
from tests.support.store.database import new_database

FILE: Final = Path(__file__).parent / "faults.txt"
START_NS: Final = 1_700_000_000_000_000_000
STRETCH_S: Final = 4.0
"""Seconds of telemetry that the stream reads at once."""
S: Final = 10**9

POLICY: Final = Policy(
    (
        Rule("r1", Mode.ACT, kind="nonfinite", action="rollback"),
        Rule("r2", Mode.ACT, kind="corruption", action="rollback", rollback_mode="relaunch"),
        Rule("r3", Mode.ACT, kind="hang", action="relaunch"),
        Rule("r4", Mode.ACT, kind="loss_divergence", action="pause"),
        Rule("r5", Mode.ACT, kind="device_fault", action="checkpoint", confidence_min=0.5),
        Rule("r6", Mode.ACT, kind="rank_lost", action="stop"),
        Rule("r7", Mode.SUGGEST, kind="straggler", action="pause"),
        Rule("r8", Mode.NOTIFY, kind="loss_spike"),
    ),
    PolicyLimits(cool_down_s=20.0, confidence_min=0.5),
)
RECEIVERS: Final = (ReceiverRoute("oncall"), ReceiverRoute("pager", severities=("critical",)))
RULES: Final = RulesSet(
    (
        MetricRule("slow steps", "step_time_s", Condition.ABOVE, 1.2, hold_s=5.0, severity="info", jobs=("rule-*",)),
        MetricRule("uneven norms", "local_grad_norm", Condition.PEERS, 1.5, hold_s=5.0, jobs=("rule-*",)),
    )
)
TWO_HOSTS: Final = RankPlacement(ranks_per_host=4)


@dataclass(frozen=True)
class Reported:
    """An event that an agent sends for a job, at a step."""

    step: int
    kind: str
    rank: int
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Fault:
    """A job with its script, as `rankwatch simulate --fault` takes it, and what else its agents report."""

    name: str
    script: str
    steps: int = 160
    ranks: int = 8
    placement: RankPlacement = TWO_HOSTS
    reported: Sequence[Reported] = ()
    late_values: bool = False


NO_ROOM: Final = {
    "what": "save",
    "tier": "local",
    "location": "/saved/x",
    "type": "OSError",
    "message": "[Errno 28] No space left on device",
    "errno": 28,
}
CPU: Final = RankPlacement(ranks_per_host=4, accelerated=False)
DEVICE: Final = RankPlacement(ranks_per_host=4, device_times=True)
STAGES: Final = RankPlacement(ranks_per_host=4, pp=2)
SLICES: Final = RankPlacement(ranks_per_host=4, tp=2)

FAULTS: Final = (
    Fault("straggler", "straggler:rank=5,at=60,factor=1.6"),
    Fault("straggler-over", "straggler:rank=2,at=50,factor=2,until=110", 200),
    Fault("straggler-data", "straggler:rank=3,at=60,factor=2,by=data"),
    Fault("straggler-descheduled", "straggler:rank=1,at=60,factor=2,by=descheduled", placement=CPU),
    Fault("straggler-host", "straggler:rank=host-1,at=60,factor=1.8"),
    Fault("straggler-device", "straggler:rank=6,at=60,factor=1.7", placement=DEVICE),
    Fault("straggler-stage", "straggler:rank=7,at=60,factor=1.8", placement=STAGES),
    Fault("straggler-every", "straggler:rank=4,at=60,factor=2.5,every=2", 220),
    Fault("slowdown", "slowdown:at=120,factor=1.5", 260),
    Fault("slowdown-over", "slowdown:at=120,factor=1.6,until=200", 300),
    Fault("drift", "drift:at=120,factor=1.8,steps=150", 420),
    Fault("hang", "hang:rank=2,at=60,seconds=70"),
    Fault("hang-stopped", "hang:rank=3,at=60,seconds=50,by=stopped"),
    Fault("hang-ranks", "hang:rank=host-1,at=60,seconds=50", placement=SLICES),
    Fault("rank-lost", "rank_lost:rank=5,at=60 restart:at=60,to=40"),
    Fault("rank-lost-error", "rank_lost:rank=1,at=60,error=CUDA_error restart:at=60,to=59"),
    Fault("rank-lost-last", "rank_lost:rank=1,at=60,signal=11"),
    Fault(
        "restart-loop",
        "rank_lost:rank=2,at=40 restart:at=40,to=20,away=5 rank_lost:rank=2,at=40 restart:at=40,to=20,away=5 "
        "rank_lost:rank=2,at=40 restart:at=40,to=20,away=5 rank_lost:rank=2,at=40 restart:at=40,to=20,away=5",
        80,
    ),
    Fault("host-lost", "host_lost:host=host-1,at=60,seconds=60 rank_lost:rank=4,at=61 restart:at=61,to=40"),
    Fault("telemetry-lost", "telemetry_lost:host=host-1,at=60,until=130", 200),
    Fault("nonfinite", "nonfinite:rank=3,at=80 rollback:at=86,to=60"),
    Fault("nonfinite-ranks", "nonfinite:rank=1+6,at=80", 110),
    Fault("nonfinite-late", "nonfinite:rank=3,at=80 restart:at=90,to=60,away=2", late_values=True),
    Fault("overflow", "overflow:rank=4,at=80", 110),
    Fault("corruption", "corruption:rank=2,at=75 restart:at=90,to=60,away=2", 140),
    Fault("corruption-stage", "corruption:rank=6,at=75", 120, placement=STAGES),
    Fault("gradient", "gradient:rank=3,at=70,factor=3", 200),
    Fault("loss-spike", "loss_spike:at=120,factor=4,steps=3", 200),
    Fault("loss-divergence", "loss_divergence:at=420,growth=0.02", 520),
    Fault("loss-climb", "loss_climb:at=420,factor=4,steps=60", 540),
    Fault("grad-norm", "grad_norm:at=120,factor=80,steps=4", 200),
    Fault("xid", "xid:rank=3,at=60,xid=79"),
    Fault("xid-memory", "xid:rank=6,at=60,xid=94 rank_lost:rank=6,at=62 restart:at=62,to=40"),
    Fault("throttle", "throttle:rank=5,at=60,factor=1.5", 400),
    Fault("throttle-unfelt", "throttle:rank=5,at=60,factor=1.0", 400),
    Fault(
        "checkpoint-failed", "", reported=[Reported(step, "checkpoint_failed", 2, NO_ROOM) for step in (99, 119, 139)]
    ),
    Fault("rule-pace", "slowdown:at=120,factor=1.8,until=170", 220),
    Fault("rule-peers", "gradient:rank=6,at=90,factor=2.5", 160),
    Fault("cascade", "straggler:rank=2,at=50,factor=2 nonfinite:rank=2,at=100 rank_lost:rank=2,at=106", 140),
    Fault(
        "harmless", "gc:every=40 hiccups eval:every=60 scaler_skip:at=70 flap:at=90,seconds=1 batch_ramp:at=120", 200
    ),
)


def play(fault: Fault) -> list[dict[str, Any]]:
    """The rows that the fault leaves, in an order that depends on nothing but them."""
    with tempfile.TemporaryDirectory() as folder:
        engine = new_database(Path(folder))
        try:
            _Play(engine, fault).run()
            with read(engine) as connection:
                return list(_rows(connection))
        finally:
            engine.dispose()


class _Play:
    """One fault in a database of its own; time passes as the telemetry says."""

    def __init__(self, engine: Engine, fault: Fault) -> None:
        self._engine = engine
        self._fault = fault
        self._clock = FakeClock(START_NS)
        self._log = RecordedLog()
        self._controls = ControlLog(engine, self._clock)
        self._stream = stream_over(engine, self._clock, source=self._log)
        self._driver = Driver(engine, self._controls, self._clock)

    def run(self) -> None:
        subscribe(self._engine, *RECEIVERS)
        records = (policy_record(POLICY), RULES)
        with write(self._engine) as connection:
            self._controls.append_in(connection, [Entry(ALL_JOBS, encode_control(record)) for record in records])
        self._stream.start()
        for second, stretch in groupby(_telemetry(self._fault), lambda one: math.floor(one[0] / STRETCH_S)):
            for time_s, body in stretch:
                self._log.record(Entry(self._fault.name, body), START_NS + round(time_s * S))
            self._clock.now_ns = max(self._clock.now_ns, START_NS + round((second + 1) * STRETCH_S * S))
            self._read_all()
            self._carry_out()
        self._read_all()
        route_all(self._engine, self._clock.now_ns)

    def _read_all(self) -> None:
        while self._stream.step():
            pass

    def _carry_out(self) -> None:
        """Let the driver carry out the commands that wait; every rank answers at once, and exits when it must."""
        ranks = _Ranks(self._engine, self._fault.name)
        for _ in range(600):
            if not self._driver.run_once():
                return
            ranks.answer(self._clock)
            self._clock.advance(0.05)
            if ranks.stand:
                return


class _Ranks:
    """Ranks that do what an order says."""

    def __init__(self, engine: Engine, job: str) -> None:
        self._engine = engine
        self._job = job
        self.stand = False
        """The ranks are paused, which lasts until a person resumes them."""

    def answer(self, clock: FakeClock) -> None:
        with read(self._engine) as connection:
            orders = open_orders(connection, self._job)
            step = connection.scalar(select(models.Job.step)) or 0
            training = [read_training(connection, order.job, order.attempt) for order in orders]
        for order, one in zip(orders, training, strict=True):
            for host, ranks in one.hosts.items():
                reported = tuple(_answer(order, rank, step) for rank in ranks)
                attempt = order.attempt
                view = wire.View(self._job, attempt, host, "boot-1", clock.unix_ns(), reported)
                store_views(self._engine, [ReceivedView(view)], clock.unix_ns())
            self.stand = self.stand or order.pause_applied


_ANSWERS: Final = {Phase.HOLD: "held", Phase.DO: "done", Phase.GO: "went", Phase.RELEASE: "released"}


def _answer(order: Order, rank: int, step: int) -> wire.Progress:
    answer = _ANSWERS.get(order.phase, "")
    state = {Phase.HOLD: "held", Phase.KILL: "exited"}.get(order.phase, "running")
    at_step = max(step, order.step)
    k = order.k if answer in ("done", "went") else k_of(order.attempt)
    detail = f"/saved/{at_step}" if answer == "done" and order.action == "checkpoint" else ""
    mine = order.id if answer else ""
    return wire.Progress(rank, at_step, "", 0.0, 0.0, 0, state, mine, answer, at_step, k, 7, answer_detail=detail)


def _telemetry(fault: Fault) -> Iterator[tuple[float, bytes]]:
    job = Job(fault.ranks, fault.steps, 11, step_s=0.5, placement=fault.placement, late_values=fault.late_values)
    for text in fault.script.split():
        job = apply(text, job)
    observations = _with_reported(saves(generate(job)), fault.reported)
    for message in batches(fault.name, observations, start_unix_ns=START_NS):
        yield message.time_s, wire.encode(declared(message.batch))


def _with_reported(observations: Iterator[Observation], reported: Sequence[Reported]) -> Iterator[Observation]:
    waiting = list(reported)
    for observation in observations:
        yield observation
        step = getattr(observation, "step", None)
        while waiting and step is not None and step >= waiting[0].step:
            one = waiting.pop(0)
            reported_of = (observation.attempt, "host-0", observation.time_s, one.rank, one.step)
            yield Occurrence(one.kind, *reported_of, dict(one.fields))


# ---- what is left of it ----------------------------------------------------------------------------------------------

_ID: Final = re.compile(r"\b(inc|cmd|msg)_[0-9a-f]{24,32}\b")
"""Ids are derived from names and times: they are named by the order in which they are met."""


def written(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Each row as one line: its names sorted, without what is empty, ids in the order in which they are met.

    Of floats 9 digits, since the last digits of `exp` and `log` differ between processors.
    """
    ids: dict[str, str] = {}
    counts: Counter[str] = Counter()

    def name(match: re.Match[str]) -> str:
        if match[0] not in ids:
            counts[match[1]] += 1
            ids[match[0]] = f"{match[1]}_{counts[match[1]]}"
        return ids[match[0]]

    full = [{name: _rounded(value) for name, value in row.items() if value not in (None, "", [], {})} for row in rows]
    lines = [json.dumps(row, sort_keys=True, ensure_ascii=False) for row in full]
    return [_ID.sub(name, line) for line in lines]


def _rounded(value: Any) -> Any:
    match value:
        case float():
            return float(f"{value:.9g}")
        case dict():
            return {name: _rounded(one) for name, one in value.items()}
        case list():
            return [_rounded(one) for one in value]
        case _:
            return value


def digests(lines: Iterable[str]) -> list[str]:
    """What the file holds of each line: the beginning of its SHA-256, and for the reader of a diff what it is."""
    return [f"{sha256(line.encode()).hexdigest()[:16]} {_title(json.loads(line))}" for line in lines]


def _title(row: Mapping[str, Any]) -> str:
    return " ".join(str(row[name]) for name in ("row", "kind", "what", "action", "phase", "verdict") if row.get(name))


def stored() -> dict[str, list[str]]:
    """The digests in the file by the name of their fault."""
    faults: dict[str, list[str]] = {}
    for line in FILE.read_text().splitlines():
        if line.startswith("# "):
            faults[line[2:]] = lines = []
        else:
            lines.append(line)
    return faults


def _rows(connection: Connection) -> Iterator[dict[str, Any]]:
    changes = _all(connection, models.IncidentTransition, "incident_id", "number")
    for incident in _all(connection, models.Incident, "detected_unix_ns", "onset_unix_ns", "id"):
        yield {"row": "incident", **incident}
        yield from ({"row": "transition", **change} for change in changes if change["incident_id"] == incident["id"])
    said: set[bytes] = set()
    for message in _all(connection, models.Outbox, "created_unix_ns", "transition", "receiver", "id"):
        body = "as the one before" if message["body"] in said else json.loads(message["body"])
        said.add(message["body"])
        yield {"row": "message", **message, "body": body}
    for command in _all(connection, models.Command, "requested_unix_ns", "action", "id"):
        yield {"row": "command", **command}
    for order in _all(connection, models.Order, "phase_unix_ns", "id"):
        yield {"row": "order", **order}
    for control in _all(connection, models.ControlRecord, "position"):
        record = json.loads(control["value"])
        if record["record"] == "order":
            yield {"row": "phase", **record}
    for checkpoint in _all(connection, models.Checkpoint, "saved_unix_ns", "id"):
        yield {
            "row": "checkpoint",
            **{name: checkpoint[name] for name in ("id", "shards", "verdict", "verdict_reason")},
        }


def _all(connection: Connection, table: type[models.Base], *order: str) -> list[dict[str, Any]]:
    query = select(table.__table__).order_by(*(table.__table__.c[name] for name in order))
    return [dict(row) for row in connection.execute(query).mappings()]


def main() -> None:
    """Write the digests or, with a path as argument, the lines themselves."""
    path, form = (Path(sys.argv[1]), list[str]) if len(sys.argv) > 1 else (FILE, digests)
    with path.open("w") as file:
        for fault in FAULTS:
            file.write(f"# {fault.name}\n")
            file.writelines(f"{line}\n" for line in form(written(play(fault))))
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
