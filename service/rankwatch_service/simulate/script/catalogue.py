"""All events that can be scripted for a synthetic job: `FAULTS` should be found, `HARMLESS` ones should not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from rankwatch_service.simulate import faults
from rankwatch_service.simulate.job import Job
from rankwatch_service.simulate.script.parameters import (
    AT,
    HOST,
    OF_BATCHES,
    RANK,
    RANKS,
    RARELY,
    STEPS,
    UNTIL,
    Parameter,
    integer,
    number,
    one_of,
    seconds,
    share,
    slower,
    stage,
    step,
    times,
    with_default,
)


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """One event of a job. `apply` gets the job and all parameters by name, and returns the new job."""

    summary: str
    parameters: Mapping[str, Parameter]
    apply: Callable[..., Job]


def _straggler(job: Job, rank: tuple[int, ...], at: int, factor: float, until: int | None, every: int, by: str) -> Job:
    return job.inject(
        faults.Slow(rank, at, factor, until, every, data_wait=by == "data", wall_only=by == "descheduled")
    )


def _lost(job: Job, rank: int, at: int, signal: int, error: str) -> Job:
    return job.inject(faults.Kill(rank, at, None, 1, error) if error else faults.Kill(rank, at, signal))


def _noise(job: Job, **changes: Any) -> Job:
    return replace(job, noise=replace(job.noise, **changes))


def _placement(job: Job, **changes: Any) -> Job:
    return replace(job, placement=replace(job.placement, **changes))


def _transit(job: Job, **changes: Any) -> Job:
    return replace(job, transit=replace(job.transit, **changes))


def _uneven(job: Job, cv: float, tokens: str) -> Job:
    return replace(_noise(job, uneven_cv=cv), report_tokens=tokens == "yes")


def _skew(job: Job, host: str, seconds: float) -> Job:
    return _transit(job, skews_s={**job.transit.skews_s, host: seconds})


def _new_collector(job: Job, host: str, after: float) -> Job:
    return _transit(job, collector_restarts_s={**job.transit.collector_restarts_s, host: after})


FAULTS: Final[dict[str, FaultSpec]] = {
    "straggler": FaultSpec(
        "ranks work more slowly than their peers",
        {
            "rank": RANKS, "at": AT, "factor": slower(1.2), "until": UNTIL,
            "every": Parameter(integer(1), "2 = only every second step", 1),
            "by": Parameter(
                one_of("compute", "data", "descheduled"), "what takes longer: compute, data or descheduled", "compute"
            ),
        },
        _straggler,
    ),
    "slowdown": FaultSpec(
        "all ranks are slower than before",
        {"at": AT, "factor": slower(1.1), "until": UNTIL},
        lambda job, at, factor, until: job.inject(faults.SlowJob(at, factor, until)),
    ),
    "drift": FaultSpec(
        "all ranks become slower gradually",
        {"at": AT, "factor": slower(1.25), "steps": Parameter(integer(1), "number of steps it takes", 1800)},
        lambda job, at, factor, steps: job.inject(faults.Drift(at, factor, steps)),
    ),
    "hang": FaultSpec(
        "ranks do not arrive at a collective, the others wait for them",
        {
            "rank": RANKS, "at": AT, "seconds": seconds(60.0),
            "by": Parameter(one_of("loop", "stopped"), "busy in a loop, or stopped by a signal", "loop"),
        },
        lambda job, rank, at, seconds, by: job.inject(faults.Hang(rank, at, seconds, stopped=by == "stopped")),
    ),
    "rank_lost": FaultSpec(
        "a process ends, then its peers",
        {
            "rank": RANK, "at": AT,
            "signal": Parameter(integer(1), "the signal", 9),
            "error": Parameter(lambda text, _job: text, "exit with this error and status 1 instead", ""),
        },
        _lost,
    ),
    "xid": FaultSpec(
        "the driver reports an error of a rank's device",
        {"rank": RANK, "at": AT, "xid": Parameter(integer(1), "its number", 79)},
        lambda job, rank, at, xid: job.inject(faults.DeviceXid(rank, at, xid)),
    ),
    "throttle": FaultSpec(
        "the hardware slows a rank's device down because of heat",
        {"rank": RANK, "at": AT, "factor": slower(1.2), "until": UNTIL},
        lambda job, rank, at, factor, until: job.inject(faults.Throttle(rank, at, factor, until)),
    ),
    "host_lost": FaultSpec(
        "a host fails, with its ranks",
        {"host": HOST, "at": AT, "seconds": seconds(60.0)},
        lambda job, host, at, seconds: job.inject(faults.HostLoss(host, at, seconds)),
    ),
    "telemetry_lost": FaultSpec(
        "no telemetry from a host that trains on",
        {"host": HOST, "at": AT, "until": Parameter(step, "first step with telemetry again")},
        lambda job, host, at, until: job.inject(faults.HostSilence(host, at, until)),
    ),
    "nonfinite": FaultSpec(
        "NaN in ranks' local gradients, then in every loss",
        {"rank": RANKS, "at": AT},
        lambda job, rank, at: job.inject(faults.NonFinite(rank, at)),
    ),
    "overflow": FaultSpec(
        "one rank's gradient norm is infinite in one step",
        {"rank": RANK, "at": AT},
        lambda job, rank, at: job.inject(faults.Overflow(rank, at)),
    ),
    "corruption": FaultSpec(
        "a flipped bit in one replica's parameters", {"rank": RANK, "at": AT},
        lambda job, rank, at: job.inject(faults.BitFlip(rank, at)),
    ),
    "gradient": FaultSpec(
        "one rank's local gradients differ from its peers'",
        {"rank": RANK, "at": AT, "factor": times(1.5)},
        lambda job, rank, at, factor: job.inject(faults.LocalGradient(rank, at, factor)),
    ),
    "loss_spike": FaultSpec(
        "the loss jumps and comes back",
        {"at": AT, "factor": times(3.0), "steps": STEPS},
        lambda job, at, factor, steps: job.inject(faults.LossSpike(at, factor, steps)),
    ),
    "loss_divergence": FaultSpec(
        "the loss grows until the end",
        {"at": AT, "growth": Parameter(number(0.0), "share for each step", 0.01)},
        lambda job, at, growth: job.inject(faults.LossDivergence(at, growth)),
    ),
    "loss_climb": FaultSpec(
        "the loss climbs gradually",
        {"at": AT, "factor": times(2.0), "steps": Parameter(integer(1), "number of steps it takes", 1300)},
        lambda job, at, factor, steps: job.inject(faults.LossClimb(at, factor, steps)),
    ),
    "grad_norm": FaultSpec(
        "the gradient norm jumps",
        {"at": AT, "factor": times(50.0), "steps": STEPS},
        lambda job, at, factor, steps: job.inject(faults.NormSpike(at, factor, steps)),
    ),
}  # fmt: skip

HARMLESS: Final[dict[str, FaultSpec]] = {
    "uneven": FaultSpec(
        "sequences of uneven length",
        {
            "cv": Parameter(number(0.0, 1.0), "coefficient of variation", 0.1),
            "tokens": Parameter(one_of("yes", "no"), "whether steps report token counts: yes or no", "no"),
        },
        _uneven,
    ),
    "gc": FaultSpec(
        "garbage collection: each rank pauses now and then",
        {"every": Parameter(integer(1), "number of steps between", 100), "seconds": seconds(0.4)},
        lambda job, every, seconds: _noise(job, collect_every=every, collect_s=seconds),
    ),
    "hiccups": FaultSpec(
        "single slow steps of single ranks",
        {"probability": RARELY, "seconds": seconds(0.4)},
        lambda job, probability, seconds: _noise(job, hiccup_probability=probability, hiccup_s=seconds),
    ),
    "bursts": FaultSpec(
        "two to four slow steps of single ranks",
        {"probability": with_default(RARELY, 1e-5)},
        lambda job, probability: _noise(job, burst_probability=probability),
    ),
    "eval": FaultSpec(
        "evaluations",
        {"every": Parameter(integer(1), "number of steps between", 200), "seconds": seconds(30.0)},
        lambda job, every, seconds: job.inject(faults.RecurringStall(every, seconds, "eval")),
    ),
    "save": FaultSpec(
        "checkpoint saves",
        {"every": Parameter(integer(1), "number of steps between", 100), "seconds": seconds(5.0)},
        lambda job, every, seconds: job.inject(faults.RecurringStall(every, seconds, "checkpoint_save")),
    ),
    "warm_up": FaultSpec(
        "slow first steps of every attempt",
        {"steps": Parameter(integer(1), "number of steps", 50), "factor": slower(3.0)},
        lambda job, steps, factor: _noise(job, warm_up_steps=steps, warm_up_factor=factor),
    ),
    "wave": FaultSpec(
        "step times that vary over the day",
        {"amplitude": share("share of the step time", 0.02)},
        lambda job, amplitude: _noise(job, wave=amplitude),
    ),
    "wander": FaultSpec(
        "a pace that changes by itself",
        {
            "low": share("smallest change, as a share of the step time", 0.05),
            "high": share("largest change", 0.13),
            "every": Parameter(integer(3), "average number of steps between changes", 300),
        },
        lambda job, low, high, every: job.inject(faults.WanderingPace(low, high, every)),
    ),
    "batch_ramp": FaultSpec(
        "a schedule makes the batches larger", {"at": AT, "factor": slower(1.5)},
        lambda job, at, factor: job.inject(faults.BatchRamp(at, factor)),
    ),
    "loss_step": FaultSpec(
        "other data or another learning rate: the loss moves to another level",
        {"at": AT, "factor": times(0.95)},
        lambda job, at, factor: job.inject(faults.LossLevel(at, factor)),
    ),
    "loss_bump": FaultSpec(
        "the loss is somewhat higher for a few steps",
        {"at": AT, "factor": times(1.3), "steps": with_default(STEPS, 3)},
        lambda job, at, factor, steps: job.inject(faults.LossBump(at, factor, steps)),
    ),
    "scaler_skip": FaultSpec(
        "a step that the loss scaler skips", {"at": AT}, lambda job, at: job.inject(faults.ScalerSkip(at))
    ),
    "flap": FaultSpec(
        "a link that is down for a moment", {"at": AT, "seconds": seconds(4.0)},
        lambda job, at, seconds: job.inject(faults.LinkFlap(at, seconds)),
    ),
    "pause": FaultSpec(
        "an order holds the job", {"at": AT, "seconds": seconds(30.0)},
        lambda job, at, seconds: job.inject(faults.OrderedPause(at, seconds)),
    ),
    "restart": FaultSpec(
        "a new launch, from an earlier step",
        {"at": AT, "to": Parameter(step, "step it continues from"), "away": seconds(20.0)},
        lambda job, at, to, away: job.inject(faults.Restart(at, to, away_s=away)),
    ),
    "rollback": FaultSpec(
        "the processes go back to an earlier step",
        {"at": AT, "to": Parameter(step, "step they continue from")},
        lambda job, at, to: job.inject(faults.Restart(at, to, relaunch=False)),
    ),
    "heavy_stage": FaultSpec(
        "a pipeline stage with more work",
        {"stage": Parameter(stage, "number of the stage"), "factor": slower(1.3)},
        lambda job, stage, factor: _placement(job, heavy_stage=(stage, factor)),
    ),
    "absent": FaultSpec(
        "a rank whose step records are missing",
        {"rank": RANK, "at": AT, "until": Parameter(step, "first step with records again")},
        lambda job, rank, at, until: job.inject(faults.MissingRows(rank, at, until)),
    ),
    "lean_host": FaultSpec(
        "a host with one device less from the start",
        {"host": Parameter(integer(0), "number of the host", 0)},
        lambda job, host: _placement(job, lean_host=host),
    ),
    "clock_skew": FaultSpec(
        "a host whose clock is ahead",
        {"host": HOST, "seconds": Parameter(number(-86_400.0), "how far ahead", 0.5)},
        _skew,
    ),
    "doubled": FaultSpec(
        "batches that arrive twice (live only)",
        {"probability": OF_BATCHES},
        lambda job, probability: _transit(job, doubled=probability),
    ),
    "late": FaultSpec(
        "batches that arrive late (live only)",
        {"probability": OF_BATCHES, "seconds": seconds(3.0)},
        lambda job, probability, seconds: _transit(job, late=probability, late_s=seconds),
    ),
    "new_collector": FaultSpec(
        "a host's collector starts anew (live only)",
        {"host": HOST, "after": Parameter(number(0.0), "seconds after the job starts")},
        _new_collector,
    ),
}  # fmt: skip
