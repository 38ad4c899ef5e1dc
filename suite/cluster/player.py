"""Plays a job of the cluster model: the observations that the stream would make of it, with a tick each second."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rankwatch_detectors.base import (
    AttemptStart,
    Bools,
    Floats,
    Frame,
    Ints,
    Observation,
    Occurrence,
    Presence,
    StepKind,
    Tick,
)
from suite.cluster.faults import RankKill, Resize
from suite.cluster.training import TrainingCurves
from suite.cluster.work import StepCost, WorkModel

if TYPE_CHECKING:
    from suite.cluster.job import ClusterJob

EVAL_SIGMA: Final = 0.3
"""Of the logarithm of a rank's part of an evaluation: the parts are of uneven length."""
SAVE_EVERY: Final = 50
"""A resized job goes on from the last multiple."""
RENDEZVOUS_S: Final = 40.0
"""Until a resized job trains again."""
TEARDOWN_S: Final = 5.0
"""How soon a process ends that has lost its peers or was asked to end, on average."""
PHASES: Final = ("data_wait", "forward", "backward", "backward")
"""Of a rank in a step, one after the other; in the last it waits in a collective."""


class ClusterPlayer:
    """One play of a job."""

    def __init__(self, job: ClusterJob) -> None:
        self._job = job
        self._random = np.random.default_rng((job.seed, 0))
        self._curves = TrainingCurves(job, np.random.default_rng((job.seed, 2)))
        self._launch = 0
        self._now_s, self._next_tick_s = 0.0, 1.0
        self._step = job.start_step
        self._begin(tuple(range(job.hosts)))

    def _begin(self, hosts: tuple[int, ...]) -> None:
        self._topology = self._job.placement.topology(hosts)
        self._work = WorkModel(self._job, hosts, self._now_s, self._random)
        self._collective = 0
        self._step_since_s, self._elapsed_s = self._now_s, 0.0
        self._heard_s = np.full(self._ranks, self._now_s)
        self._state = ["running"] * self._ranks
        self._logged: deque[Frame] = deque()

    @property
    def _ranks(self) -> int:
        return self._topology.world_size

    @property
    def _attempt(self) -> str:
        return f"cluster{self._launch}.0"

    def play(self) -> Iterator[Observation]:
        """The observations, in stream order."""
        yield AttemptStart(self._attempt, self._topology, self._now_s)
        resizes = deque(self._job.resizes)
        while self._step < self._job.steps:
            if resizes and self._step >= resizes[0].at_step:
                yield from self._resize(resizes.popleft())
            for fault in self._job.faults:
                if isinstance(fault, RankKill) and fault.at_step == self._step:
                    yield from self._killed(fault.rank)
                    return
            yield from self._train()
            self._step += 1

    def _train(self) -> Iterator[Observation]:
        self._step_since_s, evaluated = self._now_s, np.zeros(self._ranks)
        if self._job.eval_every and self._step % self._job.eval_every == 0 and self._step > self._job.start_step:
            evaluated = self._job.eval_s * np.exp(EVAL_SIGMA * self._random.standard_normal(self._ranks))
            yield from self._pass(float(evaluated.max()), evaluated[np.newaxis], ("eval", "eval"))
            self._collective += 1
        cost = self._work.step(self._step, self._now_s, self._elapsed_s)
        changes = np.stack([cost.data_wait, cost.data_wait + cost.forward, cost.arrival])
        yield from self._pass(cost.seconds, changes, PHASES)
        self._collective += 1
        self._elapsed_s = self._now_s - self._step_since_s
        yield self._measured(cost, evaluated)
        self._logged.append(self._curves.frame(self._attempt, self._step, self._ranks))
        if len(self._logged) > self._job.log_lag:
            yield replace(self._logged.popleft(), time_s=self._now_s)

    def _measured(self, cost: StepCost, evaluated: Floats) -> Frame:
        values = {
            "step_time_s": np.full(self._ranks, self._elapsed_s),
            "busy_s": cost.busy + evaluated,
            "wait_s": self._elapsed_s - cost.busy - evaluated - cost.data_wait,
            "phase.data_wait": cost.data_wait,
            "phase.forward": cost.forward,
            "phase.backward": cost.backward,
        }
        kind = StepKind.TRAIN
        if evaluated.any():
            values["phase.eval"], kind = evaluated, StepKind.EVAL
        present = dict.fromkeys(values, np.ones(self._ranks, dtype=np.bool_))
        return Frame(self._attempt, "steps", self._step, kind, self._now_s, values, present)

    def _killed(self, rank: int) -> Iterator[Observation]:
        yield self._exit(rank, signal=9, error="")
        yield from self._ended([one for one in range(self._ranks) if one != rank], "RuntimeError: NCCL remote process")

    def _resize(self, resize: Resize) -> Iterator[Observation]:
        yield from self._ended(list(range(self._ranks)), "", signal=15)
        yield from self._pass(RENDEZVOUS_S, np.zeros((1, self._ranks)), ("", ""))
        self._launch += 1
        self._step -= self._step % SAVE_EVERY
        self._begin(resize.hosts)
        yield AttemptStart(self._attempt, self._topology, self._now_s)

    def _ended(self, ranks: list[int], error: str, signal: int | None = None) -> Iterator[Observation]:
        """The ends of these ranks, one after the other, and some time after the last."""
        since_s = np.sort(self._random.exponential(TEARDOWN_S, len(ranks)).clip(max=4 * TEARDOWN_S))
        waits = np.zeros((1, self._ranks))
        for rank, pause_s in zip(self._random.permutation(ranks), np.diff(since_s, prepend=0.0), strict=True):
            yield from self._pass(float(pause_s), waits, ("backward", "backward"))
            yield self._exit(int(rank), signal=signal, error=error)
        yield from self._pass(4 * TEARDOWN_S, waits, ("backward", "backward"))

    def _exit(self, rank: int, signal: int | None, error: str) -> Occurrence:
        self._state[rank] = "exited"
        code = None if signal else 1
        fields: dict[str, Any] = {"code": code, "signal": signal, "how": "pidfd", "error": error}
        host = self._topology.host[rank]
        return Occurrence("process_exit", self._attempt, host, self._now_s, rank, self._step, fields)

    def _pass(self, seconds: float, changes: Floats, phases: tuple[str, ...]) -> Iterator[Observation]:
        """Let time pass, with the ticks in it.

        Args:
            seconds: how long.
            changes: seconds from now at which each rank comes to its next phase, float64 [phases - 1, ranks].
            phases: the ranks' phases. In the last, a rank has entered one more collective.
        """
        began_s = self._now_s
        while self._next_tick_s <= began_s + seconds:
            self._now_s = self._next_tick_s
            self._next_tick_s += 1.0
            yield Tick(self._now_s, self._presence(self._now_s - began_s, changes, phases))
        self._now_s = began_s + seconds

    def _presence(self, age_s: float, changes: Floats, phases: tuple[str, ...]) -> Presence:
        place: Ints = (changes <= age_s).sum(axis=0)
        since = np.where(place > 0, np.take_along_axis(changes, np.maximum(place - 1, 0)[np.newaxis], axis=0)[0], 0.0)
        alive: Bools = np.asarray([state == "running" for state in self._state])
        self._heard_s = np.where(alive, self._now_s, self._heard_s)
        return Presence(
            attempt=self._attempt,
            heard=np.ones(self._ranks, dtype=np.bool_),
            heard_s=self._heard_s,
            told_s=self._heard_s,
            step=np.full(self._ranks, self._step, dtype=np.int64),
            phase=tuple(phases[number] for number in place),
            phase_age_s=age_s - since,
            step_age_s=np.full(self._ranks, self._now_s - self._step_since_s),
            collective_seq=self._collective + (place == len(phases) - 1).astype(np.int64),
            state=tuple(self._state),
            os_state=("R",) * self._ranks,
            # A rank that waits for its device or for others polls, so it uses its core all the time.
            cpu_s=self._heard_s,
            outside_s=np.full(self._ranks, -1.0),
        )
