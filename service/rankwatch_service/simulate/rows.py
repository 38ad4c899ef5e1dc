"""A synthetic job as a table: one row for each (rank, step), in the columns that `rankwatch replay` reads.

A step after an evaluation or a save has that kind, and its time includes both, as the SDK records it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankwatch_detectors.base import AttemptStart, Bools, Frame, StepKind, Tick
from rankwatch_detectors.metrics import DEVICE_TIMES
from rankwatch_service.simulate.disturbances import disturbances_of
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job

Array = NDArray[Any]

TEXTS: Final = ("host", "device_type", "device_uuid", "switch", "attempt", "kind")
HARDWARE: Final = ("device_type", "device_uuid", "switch")
"""Columns that say where a rank runs, besides its host; only where a job has them."""

INTEGERS: Final = frozenset({"step", "rank", "dp", "tp", "pp", "nonfinite", "nonfinite_first", "fingerprint"})
"""Columns of whole numbers; all others but `TEXTS` are floats."""

COLUMN_OF: Final = {"phase.data_wait": "data_wait_s", "phase.forward": "forward_s", "phase.backward": "backward_s"}
"""Metrics whose column has a different name."""

KIND_OF_PHASE: Final = {"eval": StepKind.EVAL, "checkpoint_save": StepKind.CHECKPOINT}


@dataclass(frozen=True, slots=True)
class StepRows:
    """Some rows of the table. Where `here[name]` is False, or the column is missing, the value was not measured."""

    count: int
    columns: dict[str, Array]
    here: dict[str, Bools]


def columns_of(job: Job) -> tuple[str, ...]:
    """The columns that may occur in this job's table, in order."""
    nonfinites = disturbances_of(job).nonfinites.values()
    named = ["time_s", "step", "rank", "host", "dp", "tp", "pp", "attempt", "kind", "step_time_s", "busy_s", "wait_s"]
    named += ["data_wait_s", "forward_s", "backward_s", "loss", "grad_norm", "nonfinite"]
    named += ["fingerprint"] if job.fingerprint_every else []
    named += ["local_grad_norm"]
    named += [] if job.placement.accelerated else ["busy_cpu_s", "queued_s"]
    named += _device_columns(job)
    named += ["switch"] if job.placement.hosts_per_switch else []
    named += DEVICE_TIMES if job.placement.device_times else []
    named += ["tokens", "tokens_squared"] if job.has_tokens else []
    named += ["nonfinite_first"] if any(not skipped for _, skipped in nonfinites) else []
    named += ["optimizer_skipped"] if any(skipped for _, skipped in nonfinites) else []
    return tuple(named)


def _device_columns(job: Job) -> tuple[str, ...]:
    """CPU time that must not be judged, and the column that marks it."""
    if not (job.placement.accelerated and job.placement.launch_cpu):
        return ()
    return "busy_cpu_s", "device_uuid" if job.placement.uuids else "device_type"


def rows_of(job: Job) -> Iterator[StepRows]:
    """The rows of each step in turn, with ascending ranks. Times are by the clocks of the hosts."""
    hardware = [name for name in columns_of(job) if name in HARDWARE]
    table = _StepTable(job.transit.skews_s, hardware)
    for observation in generate(job):
        match observation:
            case AttemptStart():
                yield from table.finish()
                table.start = observation
            case Frame():
                if observation.family == "steps":
                    yield from table.finish()
                table.add(observation)
            case Tick():
                table.see(observation)
            case _:
                pass
    yield from table.finish()


class _StepTable:
    """Collects one step: its frame, its late values, and the evaluation or save before it."""

    def __init__(self, skews_s: Mapping[str, float], hardware: Sequence[str]) -> None:
        self.start: AttemptStart | None = None
        self._hardware = hardware
        self._skews_s = skews_s
        self._frames: list[Frame] = []
        self._kind = StepKind.TRAIN
        self._stood_s = 0.0
        self._next_kind = StepKind.TRAIN
        self._ended_s = 0.0

    def see(self, tick: Tick) -> None:
        """Note whether the whole job evaluates or saves before its next step."""
        if tick.presence is not None and (kind := KIND_OF_PHASE.get(tick.presence.phase[0])) is not None:
            self._next_kind = kind

    def add(self, frame: Frame) -> None:
        """Add a step's frame, or its late values."""
        if frame.family == "steps":
            self._kind, self._next_kind = self._next_kind, StepKind.TRAIN
            step_s = float(frame.values["step_time_s"].max())
            self._stood_s = max(frame.time_s - self._ended_s - step_s, 0.0)
            self._ended_s = frame.time_s
        self._frames.append(frame)

    def finish(self) -> Iterator[StepRows]:
        """The rows of the collected step; none if there is no frame."""
        if not self._frames:
            return
        frames, self._frames = self._frames, []
        assert self.start is not None
        here = np.zeros(self.start.topology.world_size, dtype=bool)
        for frame in frames:
            for present in frame.present.values():
                here |= present
        ranks = np.flatnonzero(here)
        if len(ranks):
            yield self._rows(frames, self.start, ranks)

    def _rows(self, frames: list[Frame], start: AttemptStart, ranks: Array) -> StepRows:
        steps, count, topology = frames[0], len(ranks), start.topology
        columns: dict[str, Array] = {
            "time_s": steps.time_s + self._ahead_s(start)[ranks],
            "step": np.full(count, steps.step, np.int64),
            "rank": ranks.astype(np.int64),
            "host": np.asarray(topology.host, dtype=object)[ranks],
            "dp": topology.dp[ranks],
            "tp": topology.tp[ranks],
            "pp": topology.pp[ranks],
            "attempt": np.full(count, start.attempt, dtype=object),
            "kind": np.full(count, self._kind.value, dtype=object),
        }
        for name in self._hardware:
            columns[name] = np.asarray(getattr(topology, name), dtype=object)[ranks]
        present = {}
        for frame in frames:
            for name, column in {**frame.values, **frame.exact}.items():
                called = COLUMN_OF.get(name, name)
                columns[called] = column[ranks]
                if not frame.present[name].all():
                    present[called] = frame.present[name][ranks]
        if self._kind is not StepKind.TRAIN:
            columns["step_time_s"] = columns["step_time_s"] + self._stood_s
        return StepRows(count, columns, present)

    def _ahead_s(self, start: AttemptStart) -> Array:
        hosts = start.topology.host
        if not self._skews_s:
            return np.zeros(len(hosts))
        return np.asarray([self._skews_s.get(host, 0.0) for host in hosts])
