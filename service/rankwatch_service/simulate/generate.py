"""Plays a scripted job step by step, with a tick each second: yields the observations that the stream would make."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

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
from rankwatch_detectors.metrics import DEVICE_TIMES
from rankwatch_service.simulate.disturbances import Wait, disturbances_of
from rankwatch_service.simulate.faults import Kill, Restart, Throttle
from rankwatch_service.simulate.job import Job

DAY_S = 86_400.0
# Student's t with 5 degrees of freedom: one step in some thousand is beyond five sigmas, as in real jobs.
TAIL_FREEDOM = 5
# Launching the work of a step takes the host a tenth of the step, or it would keep the device waiting.
LAUNCH_SHARE = 0.1
# The loss falls from 11 to 2.2 with e^(-step / 200): steeply at first, hardly at the end.
LOSS_START, LOSS_END, LOSS_SCALE = 11.0, 2.2, 200.0


def generate(job: Job) -> Iterator[Observation]:
    """Yield the job's observations in stream order; each call begins anew."""
    return _Player(job).play()


AtStep = TypeVar("AtStep", Kill, Restart)


def _by_step(faults: tuple[AtStep, ...]) -> dict[int, list[AtStep]]:
    """The faults of each step; each repetition of a step plays the next of its list."""
    by_step: dict[int, list[AtStep]] = {}
    for fault in faults:
        by_step.setdefault(fault.at_step, []).append(fault)
    return by_step


def _grown(step: int, from_step: int, factor: float, steps: int) -> float:
    """Factor at `step` of a value that grows linearly to `factor` within `steps` steps."""
    return 1.0 + (factor - 1.0) * min(max((step - from_step) / steps, 0.0), 1.0)


class _Player:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.disturbances = disturbances = disturbances_of(job)
        self.topology = job.topology()
        self.stage_weights = job.placement.stage_weights()
        self.random = np.random.default_rng(job.seed)
        self.launching = np.random.default_rng((job.seed, 1))
        """Apart from the others, so that the job is the same with and without this column."""
        ranks = job.world_size
        self.silicon: Floats = np.exp(job.noise.silicon * self.random.standard_normal(ranks))
        self.usual_norm: Floats = np.exp(0.1 * self.random.standard_normal(ranks))
        self.burst: Ints = np.zeros(ranks, dtype=np.int64)
        self.launch, self.rollbacks = 0, 0
        self.now_s, self.next_tick_s = 0.0, job.tick_s
        self.step, self.collective = job.start_step, 0
        self.first_step = job.start_step
        """First step of this attempt."""
        self.step_since_s = 0.0
        self.received_s: Floats = np.zeros(ranks)
        self.cpu_s: Floats = np.zeros(ranks)
        self.state = ["running"] * ranks
        self.poisoned = False
        # Copies, from which played faults are removed: they do not come again when their step is repeated.
        self.nonfinites, self.flips = dict(disturbances.nonfinites), list(disturbances.flips)
        self.waits, self.silences = list(disturbances.waits), list(disturbances.silences)
        self.xids = list(disturbances.xids)
        self.throttled: dict[Throttle, tuple[float, int]] = {}
        """When each began, and the minutes of it that have been reported."""
        self.shown_step: Ints = np.full(ranks, job.start_step, dtype=np.int64)

    @property
    def attempt(self) -> str:
        return f"{self.job.launch}{self.launch}.{self.rollbacks}"

    def play(self) -> Iterator[Observation]:
        yield AttemptStart(self.attempt, self.topology, self.now_s)
        restarts, kills = _by_step(self.disturbances.restarts), _by_step(self.disturbances.kills)
        while self.step < self.job.steps:
            for wait in [wait for wait in self.waits if wait.at_step == self.step]:
                yield from self._stand_still(wait)
            done_step = self.step
            if kills.get(self.step):
                done_step -= 1
                yield from self._end_process(kills[self.step].pop(0))
                if not restarts.get(self.step):
                    return
            else:
                yield from self._train()
            if restarts.get(self.step):
                yield from self._begin_again(restarts[self.step].pop(0), done_step)
            else:
                self.step += 1
        if self.job.ends:
            self.state = ["left"] * self.job.world_size
            for rank in range(self.job.world_size):
                yield self._occurrence("rank_left", rank, reason="end")
            yield from self._let_pass(30.0, "", ())

    def _train(self) -> Iterator[Observation]:
        self.step_since_s = self.now_s
        yield from self._reported_of_devices()
        steps, values, seconds = self._rows()
        self.cpu_s += steps["busy_s"]
        yield from self._let_pass(seconds, "backward", ())
        self.collective += 1
        train = StepKind.TRAIN
        late: dict[str, Floats] = {}
        if self.job.late_values:
            late = values | {name: steps.pop(name) for name in DEVICE_TIMES if name in steps}
        else:
            steps |= values
        exact = self._exact()
        present = self._present(steps, exact)
        yield Frame(self.attempt, "steps", self.step, train, self.now_s, steps, present, exact)
        if late:
            yield Frame(self.attempt, "values", self.step, train, self.now_s, late, self._present(late, {}))

    def _rows(self) -> tuple[dict[str, Floats], dict[str, Floats], float]:
        job, random, ranks = self.job, self.random, self.job.world_size
        scatter = math.sqrt((TAIL_FREEDOM - 2) / TAIL_FREEDOM)
        noise = np.exp(job.noise.busy * scatter * random.standard_t(TAIL_FREEDOM, ranks))
        load = self._load()
        load = load * math.prod(ramp.factor for ramp in self.disturbances.ramps if self.step >= ramp.at_step)
        wave = 1.0 + job.noise.wave * math.sin(2 * math.pi * self.now_s / DAY_S)
        wave *= next((level for at_step, level in reversed(self.disturbances.levels) if self.step >= at_step), 1.0)
        work = 0.7 * job.step_s * wave * self.silicon * noise * load
        work = work * math.prod(
            _grown(self.step, drift.from_step, drift.factor, drift.steps) for drift in self.disturbances.drifts
        )
        trained = self.step - self.first_step
        if trained < job.noise.warm_up_steps:
            work = work * (1 + (job.noise.warm_up_factor - 1) * (1 - trained / job.noise.warm_up_steps))
        if self.stage_weights:
            work = work * np.asarray(self.stage_weights)[self.topology.pp]
        work = work + self._interruptions()
        data_wait = 0.01 * job.step_s * np.exp(0.3 * random.standard_normal(ranks))
        descheduled, asleep = np.ones(ranks), np.zeros(ranks)
        for slowed in self.disturbances.slows:
            if slowed.active(self.step):
                chosen, slow = list(slowed.ranks), slowed.slow
                if slow.data_wait:
                    data_wait[chosen] += (slow.factor - 1) * work[chosen]
                elif slow.wall_only:
                    descheduled[chosen] *= slow.factor
                elif slow.asleep:
                    asleep[chosen] += (slow.factor - 1) * work[chosen]
                else:
                    work[chosen] *= slow.factor
        if job.noise.contention:
            descheduled = descheduled * np.exp(job.noise.contention * np.abs(random.standard_normal(ranks)))
        busy = work * descheduled + asleep
        transfer = 0.1 * job.step_s * float(np.exp(0.05 * random.standard_normal()))
        transfer *= math.prod(one.factor for one in self.disturbances.congestions if self.step >= one.from_step)
        seconds = float((busy + data_wait).max()) + transfer
        steps = {
            "busy_s": busy,
            "wait_s": seconds - busy - data_wait,
            "step_time_s": np.full(ranks, seconds),
            "phase.data_wait": data_wait,
            "phase.forward": busy / 3,
            "phase.backward": busy * 2 / 3,
        }
        if not job.placement.accelerated:
            steps["busy_cpu_s"] = work * np.exp(0.02 * random.standard_normal(ranks))
            steps["queued_s"] = work * (descheduled - 1)
        elif job.placement.launch_cpu:
            steps["busy_cpu_s"] = LAUNCH_SHARE * job.step_s * np.exp(0.02 * self.launching.standard_normal(ranks))
        if job.placement.device_times:
            host = seconds - data_wait
            steps |= dict(zip(DEVICE_TIMES, (np.full(ranks, seconds), work, host - busy), strict=True))
            steps |= {"busy_s": host, "wait_s": np.zeros(ranks)}
            steps |= {"phase.forward": host / 3, "phase.backward": host * 2 / 3}
        if job.has_tokens:
            steps["tokens"] = np.round(4096 * load)
            steps["tokens_squared"] = np.round(4096 * load) ** 2
        return steps, self._training_values(), seconds

    def _load(self) -> Floats:
        if not self.job.noise.uneven_cv:
            return np.ones(self.job.world_size)
        replicas = int(self.topology.dp.max()) + 1
        sigma = math.sqrt(math.log(1 + self.job.noise.uneven_cv**2))
        return np.asarray(np.exp(sigma * self.random.standard_normal(replicas))[self.topology.dp], dtype=np.float64)

    def _interruptions(self) -> Floats:
        noise, ranks = self.job.noise, self.job.world_size
        added = np.zeros(ranks)
        if noise.collect_every:
            # 7,919 is a prime, so neighbouring ranks pause in steps far apart.
            added += noise.collect_s * ((self.step + np.arange(ranks) * 7_919) % noise.collect_every == 0)
        if noise.hiccup_probability:
            added += noise.hiccup_s * (self.random.random(ranks) < noise.hiccup_probability)
        if noise.burst_probability:
            begins = (self.random.random(ranks) < noise.burst_probability) & (self.burst == 0)
            self.burst = np.where(begins, self.random.integers(2, 5, ranks), np.maximum(self.burst - 1, 0))
            added += 0.5 * self.job.step_s * (self.burst > 0)
        return added

    def _training_values(self) -> dict[str, Floats]:
        job, disturbances, ranks = self.job, self.disturbances, self.job.world_size
        curve = LOSS_END + (LOSS_START - LOSS_END) * math.exp(-self.step / LOSS_SCALE)
        common = float(self.random.standard_normal())
        loss = curve * (1 + job.noise.loss * (common + self.random.standard_normal(ranks)))
        norm = 1.0 * math.exp(0.15 * float(self.random.standard_normal()))
        for one in disturbances.factors:
            since = self.step - one.at_step
            if since >= 0 and (one.steps is None or since < one.steps):
                factor = one.factor * (1 + one.growth) ** since
                loss, norm = (loss * factor, norm) if one.metric == "loss" else (loss, norm * factor)
        loss = loss * math.prod(
            _grown(self.step, rise.at_step, rise.factor, rise.steps) for rise in disturbances.climbs
        )
        local = self.usual_norm * np.exp(0.1 * self.random.standard_normal(ranks))
        for gradient in disturbances.gradients:
            if self.step >= gradient.from_step:
                local[gradient.rank] *= gradient.factor
        values = {"loss": loss, "grad_norm": np.full(ranks, norm), "local_grad_norm": local}
        values["grad_norm"][[one.rank for one in disturbances.overflows if one.at_step == self.step]] = math.inf
        if self.poisoned:
            values["loss"] = np.full(ranks, math.nan)
        if self.step in self.nonfinites:
            bad, skipped = self.nonfinites[self.step]
            values["grad_norm"] = np.full(ranks, math.inf if skipped else math.nan)
            if skipped:
                values["optimizer_skipped"] = np.ones(ranks)
            else:
                values["local_grad_norm"][list(bad)] = math.nan
                self.poisoned = True
        return values

    def _exact(self) -> dict[str, Ints]:
        ranks = self.job.world_size
        exact: dict[str, Ints] = {"nonfinite": np.zeros(ranks, dtype=np.int64)}
        bad, skipped = self.nonfinites.get(self.step, ((), True))
        if bad and not skipped:
            exact["nonfinite"][list(bad)] = 7
            exact["nonfinite_first"] = np.ones(ranks, dtype=np.int64)
        if self.job.fingerprint_every and self.step % self.job.fingerprint_every == 0:
            shard = self.topology.peer_group
            prints = (self.step + 1) * np.int64(1_000_003) + shard * np.int64(7_919)
            for rank in {flip.rank for flip in self.flips if self.step >= flip.at_step}:
                prints[rank] ^= np.int64(1 << 17)
            exact["fingerprint"] = prints
        return exact

    def _present(self, values: dict[str, Floats], exact: dict[str, Ints]) -> dict[str, Bools]:
        here = np.ones(self.job.world_size, dtype=np.bool_)
        for missing in self.disturbances.missing:
            here[missing.rank] &= not missing.from_step <= self.step < missing.until_step
        for silence in self.silences:
            if silence.from_step <= self.step < silence.until_step:
                here &= np.asarray([name != silence.host for name in self.topology.host])
        return dict.fromkeys([*values, *exact], here)

    def _stand_still(self, wait: Wait) -> Iterator[Observation]:
        if wait.phase not in ("eval", "checkpoint_save"):
            self.waits.remove(wait)
        self.step_since_s = self.now_s
        if wait.held:
            self.state = ["held"] * self.job.world_size
            yield self._occurrence("order", None, order="o1", phase="do", action="pause", step=self.step)
        yield from self._let_pass(wait.seconds, wait.phase if not wait.ranks else "backward", wait.ranks, wait)
        if wait.held:
            self.state = ["running"] * self.job.world_size
            yield self._occurrence("order", None, order="o1", phase="go", action="pause", step=self.step)

    def _end_process(self, end: Kill) -> Iterator[Observation]:
        fields = {"code": end.code, "signal": end.signal, "how": "pidfd", "error": end.error}
        self.state[end.rank] = "exited"
        yield self._occurrence("process_exit", end.rank, **fields)
        yield from self._let_pass(1.0, "backward", ())
        for rank in range(self.job.world_size):
            if rank != end.rank:
                self.state[rank] = "exited"
                error = "RuntimeError: Connection closed by peer"
                yield self._occurrence("process_exit", rank, code=1, signal=None, how="pidfd", error=error)
        yield from self._let_pass(20.0, "", ())

    def _begin_again(self, restart: Restart, done_step: int) -> Iterator[Observation]:
        if restart.relaunch:
            self.launch, self.rollbacks = self.launch + 1, 0
            yield from self._let_pass(restart.away_s, "", ())
        else:
            self.rollbacks += 1
        self.state = ["running"] * self.job.world_size
        self.poisoned = False
        self.flips = [flip for flip in self.flips if flip.at_step > done_step]
        self.nonfinites = {step: what for step, what in self.nonfinites.items() if step > done_step}
        self.silences = [silence for silence in self.silences if silence.from_step > restart.at_step]
        self.step = self.first_step = restart.to_step
        self.step_since_s = self.now_s
        self.received_s[:] = self.now_s
        yield AttemptStart(self.attempt, self.topology, self.now_s)

    def _let_pass(
        self, seconds: float, phase: str, late: tuple[int, ...], wait: Wait | None = None
    ) -> Iterator[Observation]:
        end_s = self.now_s + seconds
        while self.next_tick_s <= end_s:
            self.now_s = self.next_tick_s
            self.next_tick_s += self.job.tick_s
            if wait is not None and wait.ranks and not wait.stopped:
                self.cpu_s[list(late)] += self.job.tick_s
            yield Tick(self.now_s, self._presence(phase, late, wait))
        self.now_s = end_s

    def _presence(self, phase: str, late: tuple[int, ...], wait: Wait | None) -> Presence:
        ranks = self.job.world_size
        silent = np.zeros(ranks, dtype=np.bool_)
        for silence in self.silences:
            if silence.from_step <= self.step < silence.until_step:
                silent |= np.asarray([name == silence.host for name in self.topology.host])
        gone = np.asarray([state == "exited" for state in self.state]) if "exited" in self.state else np.False_
        self.received_s = np.where(silent | gone, self.received_s, self.now_s)
        self.shown_step = np.where(silent, self.shown_step, self.step)
        age = np.full(ranks, self.now_s - self.step_since_s)
        collective = np.full(ranks, self.collective + 1, dtype=np.int64)
        collective[list(late)] -= 1
        phases = [phase] * ranks
        os_state = ["S" if wait is not None else "R"] * ranks
        for rank in late:
            phases[rank] = wait.phase if wait is not None else phase
            os_state[rank] = "T" if wait is not None and wait.stopped else "R"
        return Presence(
            attempt=self.attempt,
            has_reported=np.ones(ranks, dtype=np.bool_),
            received_s=self.received_s.copy(),
            sent_s=self.received_s.copy(),
            step=self.shown_step.copy(),
            phase=tuple(phases),
            phase_age_s=age,
            step_age_s=age,
            collective_seq=collective,
            state=tuple(self.state),
            os_state=tuple(os_state),
            cpu_s=self.cpu_s.copy(),
            outside_s=age if wait is not None and wait.outside else np.full(ranks, -1.0),
            doing=("",) * ranks,
        )

    def _reported_of_devices(self) -> Iterator[Occurrence]:
        for error in [error for error in self.xids if error.at_step == self.step]:
            self.xids.remove(error)
            yield self._of_device("device_error", error.rank, xid=error.xid, text="")
        for throttle in self.disturbances.throttles:
            until_step = self.job.steps if throttle.until_step is None else throttle.until_step
            if throttle.from_step <= self.step < until_step:
                began_s, reported = self.throttled.setdefault(throttle, (self.now_s, 0))
                minutes = int((self.now_s - began_s) // 60)
                if minutes > reported:
                    self.throttled[throttle] = began_s, minutes
                    yield self._of_device("device_throttled", throttle.rank, minutes=min(minutes, 10), reasons=["heat"])
            elif self.throttled.pop(throttle, None) is not None:
                yield self._of_device("device_throttled", throttle.rank, minutes=0, reasons=[])

    def _of_device(self, kind: str, rank: int, **fields: Any) -> Occurrence:
        occurrence = self._occurrence(kind, rank, device_uuid=self.topology.device_uuid[rank], **fields)
        return replace(occurrence, rank=None)

    def _occurrence(self, kind: str, rank: int | None, **fields: Any) -> Occurrence:
        host = self.topology.host[rank] if rank is not None else ""
        return Occurrence(kind, self.attempt, host, self.now_s, rank, self.step, fields)
