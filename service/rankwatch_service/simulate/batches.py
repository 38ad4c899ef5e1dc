"""A synthetic job as telemetry: the batches that the agent of each host would send.

    for message in batches("gpt", generate(Job(world_size=64))): post(message.batch)

The stream makes the same observations of them again, so that everything that tests and benchmarks pass to detectors can
also be sent through a running service.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankwatch import wire
from rankwatch_detectors.base import AttemptStart, Bools, Frame, Observation, Occurrence, Presence, StepKind, Tick

_BACK: Final = ("rollback", "rollback_memory", "rollback_disk", "relaunch")
CAN: Final = ("pause", "resume", "checkpoint", *_BACK, "stop", "trace")
PID: Final = 4_000
"""Process id of rank 0; the others follow."""
_KINDS: Final = tuple(StepKind)


@dataclass(frozen=True, slots=True)
class TimedBatch:
    """One batch and when it is sent, in seconds of the job's own time."""

    time_s: float
    batch: wire.Batch


@dataclass(slots=True)
class _Agent:
    """The agent of one host, with the records that it has not sent yet."""

    host: str
    ranks: NDArray[np.intp]
    seq: int = 0
    introduced: bool = False
    tables: dict[str, list[wire.Table]] = field(default_factory=lambda: {"steps": [], "values": []})
    progress: list[wire.Progress] = field(default_factory=list)
    events: list[wire.Event] = field(default_factory=list)


def batches(
    job: str,
    observations: Iterable[Observation],
    steps_per_batch: int = 1,
    start_unix_ns: int = 0,
    *,
    boot: str = "boot-1",
    can: tuple[str, ...] = CAN,
) -> Iterator[TimedBatch]:
    """Turn observations into the batches that agents would send, in the order of sending.

    Args:
        job: the job's name on the wire.
        observations: observations of one job; orders are skipped, since they are not telemetry.
        steps_per_batch: steps whose rows are sent in one batch; progress and events flush it earlier.
        start_unix_ns: the job's time 0 on the agents' clocks.
        boot: boot id of every agent; it must differ if the same job is sent again.
        can: the commands that the ranks declare as supported.
    """
    player = _Batcher(job, steps_per_batch, start_unix_ns, boot, can)
    for observation in observations:
        yield from player.take(observation)
    yield from player.send()


class _Batcher:
    def __init__(self, job: str, steps_per_batch: int, start_unix_ns: int, boot: str, can: tuple[str, ...]) -> None:
        self._job = job
        self._boot = boot
        self._can = can
        self._steps_per_batch = steps_per_batch
        self._start_unix_ns = start_unix_ns
        self._now_s = 0.0
        self._start: AttemptStart | None = None
        self._agents: list[_Agent] = []
        self._seqs: dict[str, int] = {}

    def take(self, observation: Observation) -> Iterator[TimedBatch]:
        match observation:
            case AttemptStart():
                yield from self.send()
                self._begin(observation)
            case Frame():
                self._now_s = observation.time_s
                for agent in self._agents:
                    self._frame(agent, observation)
                if any(len(agent.tables["steps"]) >= self._steps_per_batch for agent in self._agents):
                    yield from self.send()
            case Tick():
                self._now_s = observation.now_s
                if observation.presence is not None:
                    for agent in self._agents:
                        agent.progress = _progress(observation.presence, agent.ranks, observation.now_s)
                yield from self.send()
            case Occurrence():
                self._now_s = observation.time_s
                self._event(observation)
                yield from self.send()

    def send(self) -> Iterator[TimedBatch]:
        """Send everything that waits, one batch for each host."""
        assert self._start is not None or not self._agents
        for agent in self._agents:
            steps, values = (_joined(agent.tables[family]) for family in ("steps", "values"))
            if not (steps or values or agent.progress or agent.events):
                continue
            assert self._start is not None
            batch = wire.Batch(
                schema=wire.SCHEMA_VERSION,
                job=self._job,
                attempt=self._start.attempt,
                host=agent.host,
                boot=self._boot,
                seq=agent.seq,
                sent_unix_ns=self._start_unix_ns + round(self._now_s * 1e9),
                ranks=() if agent.introduced else self._infos(agent),
                steps=steps,
                values=values,
                progress=tuple(agent.progress),
                events=tuple(agent.events),
            )
            agent.introduced = True
            agent.seq += 1
            self._seqs[agent.host] = agent.seq
            agent.tables, agent.progress, agent.events = {"steps": [], "values": []}, [], []
            yield TimedBatch(self._now_s, batch)

    def _begin(self, start: AttemptStart) -> None:
        self._start = start
        hosts = np.asarray(start.topology.host)
        self._agents = [
            _Agent(host, np.flatnonzero(hosts == host), self._seqs.get(host, 0))
            for host in dict.fromkeys(start.topology.host)
        ]

    def _infos(self, agent: _Agent) -> tuple[wire.RankInfo, ...]:
        assert self._start is not None
        topology = self._start.topology
        return tuple(
            wire.RankInfo(
                rank=int(rank),
                world_size=topology.world_size,
                local_rank=local,
                host=agent.host,
                device_uuid=topology.device_uuid[rank],
                pid=PID + int(rank),
                device_type=topology.device_type[rank] if topology.device_type else "",
                switch=topology.switch[rank] if topology.switch else "",
                dp=int(topology.dp[rank]),
                tp=int(topology.tp[rank]),
                pp=int(topology.pp[rank]),
                cp=int(topology.cp[rank]),
                ep=int(topology.ep[rank]),
                parameters=topology.parameters,
                replicated=topology.replicated,
                can=self._can,
            )
            for local, rank in enumerate(agent.ranks)
        )

    def _frame(self, agent: _Agent, frame: Frame) -> None:
        here = np.zeros(len(agent.ranks), dtype=bool)
        for present in frame.present.values():
            here |= present[agent.ranks]
        ranks = agent.ranks[here]
        if len(ranks) == 0:
            return
        columns = {
            "step": wire.Column("i8", np.full(len(ranks), frame.step, "<i8").tobytes()),
            "rank": wire.Column("u4", ranks.astype("<u4").tobytes()),
            "kind": wire.Column("u1", np.full(len(ranks), _KINDS.index(frame.kind), "<u1").tobytes()),
        }
        columns |= _columns(frame.values, frame.present, ranks, "f8")
        columns |= _columns(frame.exact, frame.present, ranks, "i8")
        agent.tables[frame.family].append(wire.Table(len(ranks), columns))

    def _event(self, occurrence: Occurrence) -> None:
        if occurrence.kind not in wire.EVENT_KINDS:
            return
        agent = next((a for a in self._agents if a.host == occurrence.host), self._agents[0])
        unix_ns = self._start_unix_ns + round(occurrence.time_s * 1e9)
        event = wire.Event(occurrence.kind, unix_ns, occurrence.rank, occurrence.step, dict(occurrence.fields))
        agent.events.append(event)


def _columns(
    values: Mapping[str, NDArray[Any]], present: Mapping[str, Bools], ranks: NDArray[np.intp], dtype: str
) -> dict[str, wire.Column]:
    columns = {}
    for name, column in values.items():
        here = present[name][ranks]
        if here.any():
            data = np.where(here, column[ranks], 0).astype(f"<{dtype}").tobytes()
            columns[name] = wire.Column(dtype, data, 0, None if here.all() else _bits(here))
    return columns


def _bits(here: Bools) -> bytes:
    return np.packbits(here, bitorder="little").tobytes()


def _joined(tables: list[wire.Table]) -> wire.Table | None:
    """Joins tables of several steps; a column that a table does not have is absent in its rows."""
    if len(tables) < 2:
        return tables[0] if tables else None
    joined = {}
    for name in dict.fromkeys(name for table in tables for name in table.columns):
        dtype = next(table.columns[name].dtype for table in tables if name in table.columns)
        data, here = [], []
        for table in tables:
            column = table.columns.get(name)
            blank = bytes(table.rows * np.dtype(dtype).itemsize)
            data.append(blank if column is None else column.data)
            if column is None or column.mask is None:
                here.append(np.full(table.rows, column is not None))
            else:
                bits = np.frombuffer(column.mask, np.uint8)
                here.append(np.unpackbits(bits, count=table.rows, bitorder="little").astype(bool))
        mask = np.concatenate(here)
        joined[name] = wire.Column(dtype, b"".join(data), 0, None if mask.all() else _bits(mask))
    return wire.Table(sum(table.rows for table in tables), joined)


def _progress(presence: Presence, ranks: NDArray[np.intp], now_s: float) -> list[wire.Progress]:
    return [
        wire.Progress(
            rank=int(rank),
            step=int(presence.step[rank]),
            phase=presence.phase[rank],
            phase_age_s=float(presence.phase_age_s[rank]),
            step_age_s=float(presence.step_age_s[rank]),
            collective_seq=int(presence.collective_seq[rank]),
            state=presence.state[rank],
            os_state=presence.os_state[rank],
            cpu_s=float(presence.cpu_s[rank]),
            outside_s=float(presence.outside_s[rank]),
            doing=presence.doing[rank],
        )
        for rank in ranks
        if presence.has_reported[rank] and presence.received_s[rank] == now_s
    ]
