"""Progress blocks of a small job, as the stream gives them to detectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rankwatch_detectors.base import AttemptStart, Finding, Frame, Presence, StepKind, Tick, Topology
from rankwatch_service.policy.traces import TraceAnswer

ATTEMPT = "run.0"


def topology(world_size: int, *, hosts: int = 1, replicated: bool = False, devices: bool = True) -> Topology:
    """A data-parallel job, its ranks spread evenly over hosts."""
    ranks = np.arange(world_size, dtype=np.int64)
    zero = np.zeros_like(ranks)
    return Topology(
        world_size=world_size,
        host=tuple(f"host-{rank * hosts // world_size}" for rank in range(world_size)),
        device_uuid=tuple(f"GPU-{rank}" if devices else "" for rank in range(world_size)),
        dp=ranks,
        tp=zero,
        pp=zero,
        cp=zero,
        ep=zero,
        replicated=replicated,
        parameters=("first", "second"),
    )


def frame(
    step: int,
    values: Mapping[str, Sequence[float]],
    exact: Mapping[str, Sequence[int]] | None = None,
    *,
    attempt: str = ATTEMPT,
    family: str = "steps",
    kind: StepKind = StepKind.TRAIN,
    time_s: float | None = None,
) -> Frame:
    """A frame in which every rank has every value."""
    floats = {name: np.asarray(column, dtype=np.float64) for name, column in values.items()}
    ints = {name: np.asarray(column, dtype=np.int64) for name, column in (exact or {}).items()}
    present = {name: np.ones(len(column), dtype=np.bool_) for name, column in {**floats, **ints}.items()}
    return Frame(attempt, family, step, kind, float(step) if time_s is None else time_s, floats, present, ints)


@dataclass
class Clockwork:
    """A job known by ticks only: one a second, with every rank where the test put it."""

    detector: Any
    ranks: int = 4
    attempt: str = ATTEMPT
    now_s: float = 0.0
    step: list[int] = field(default_factory=list)
    phase: list[str] = field(default_factory=list)
    sequence: list[int] = field(default_factory=list)
    state: list[str] = field(default_factory=list)
    os_state: list[str] = field(default_factory=list)
    doing: list[str] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    entered_s: list[float] = field(default_factory=list)
    received_s: list[float] = field(default_factory=list)
    outside_since_s: list[float | None] = field(default_factory=list)
    work_s: list[float] = field(default_factory=list)
    """How long the work of its step took a rank that is outside of it."""
    silent: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.begin(self.attempt)

    def begin(self, attempt: str) -> list[Finding]:
        """A new attempt: all ranks before their first step."""
        self.attempt = attempt
        count = self.ranks
        self.step, self.sequence = [-1] * count, [0] * count
        self.phase, self.state, self.os_state = [""] * count, ["running"] * count, ["R"] * count
        self.doing = [""] * count
        self.outside_since_s, self.work_s = [None] * count, [0.0] * count
        self.cpu_s, self.entered_s, self.received_s = [0.0] * count, [self.now_s] * count, [self.now_s] * count
        return list(self.detector.observe(AttemptStart(attempt, topology(count), self.now_s)))

    def train(self, seconds: int, steps_per_s: int = 10) -> list[Finding]:
        """All ranks make progress."""
        findings: list[Finding] = []
        for _ in range(seconds):
            for rank in range(self.ranks):
                self.step[rank] += steps_per_s
                self.sequence[rank] += steps_per_s
                self.entered_s[rank] = self.now_s + 1.0
                self.outside_since_s[rank], self.work_s[rank] = None, 0.0
            findings += self.tick()
        return findings

    def pause(self, *ranks: int) -> None:
        """The work of their step is done on these ranks, or on all of them."""
        for rank in ranks or range(self.ranks):
            self.outside_since_s[rank] = self.now_s
            self.work_s[rank] = 0.1

    def rest(self, rank: int) -> None:
        """A rank is outside of its step since that began: the optimizer's step before has ended the one before."""
        self.outside_since_s[rank] = self.entered_s[rank]

    def stand(self, seconds: int) -> list[Finding]:
        """No rank makes progress."""
        return [finding for _ in range(seconds) for finding in self.tick()]

    def tick(self) -> list[Finding]:
        """One second passes."""
        self.now_s += 1.0
        for rank in range(self.ranks):
            if rank not in self.silent:
                self.received_s[rank] = self.now_s
        age = np.asarray(
            [has_reported - entered for has_reported, entered in zip(self.received_s, self.entered_s, strict=True)]
        )
        outside = [-1.0 if since is None else self.now_s - since for since in self.outside_since_s]
        presence = Presence(
            attempt=self.attempt,
            has_reported=np.ones(self.ranks, dtype=np.bool_),
            received_s=np.asarray(self.received_s),
            sent_s=np.asarray(self.received_s),
            step=np.asarray(self.step, dtype=np.int64),
            phase=tuple(self.phase),
            phase_age_s=age,
            step_age_s=age + np.asarray(self.work_s),
            collective_seq=np.asarray(self.sequence, dtype=np.int64),
            state=tuple(self.state),
            os_state=tuple(self.os_state),
            cpu_s=np.asarray(self.cpu_s),
            outside_s=np.asarray(outside),
            doing=tuple(self.doing),
        )
        return list(self.detector.observe(Tick(self.now_s, presence)))


SUMMARY: dict[str, Any] = {
    "step": 41,
    "step_times_s": [0.5, 0.25, 0.25],
    "on_device": True,
    "wall_s": 1.0,
    "idle_ratio": 0.125,
    "spans": 1_000,
    "kinds": {"matmul": 0.6, "collective": 0.3},
    "streams": [{"device": 0, "stream": 7, "count": 900, "time_s": 0.6}],
    "collectives": [{"group": "mesh_dp", "name": "allreduce", "count": 6, "bytes": 12_582_912, "time_s": 0.3}],
    "top": [{"name": "sm80_gemm", "kind": "matmul", "count": 90, "time_s": 0.6}],
    "left_out": 0,
}


def trace_fields(request: str = "cmd_1", **changes: Any) -> dict[str, Any]:
    """The fields of an event `trace`."""
    return {"request": request, **SUMMARY, **changes}


def trace_answer(command: str, rank: int, error: str = "", *, job: str = "j", step: int = 41) -> TraceAnswer:
    """As the stream hands it over; with an error there is no summary."""
    return TraceAnswer(job, command, rank, error, {} if error else SUMMARY | {"step": step}, 1)
