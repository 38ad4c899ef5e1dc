"""Faults written as text: `straggler:rank=17,factor=1.1,at=500`.

`FAULTS` should be found, `HARMLESS` events should not. The parameters of an event are the fields of its dataclass in
`simulate.faults`, or fields of the job's noise, placement and transit.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from rankwatch_service.simulate import faults
from rankwatch_service.simulate.faults import Fault
from rankwatch_service.simulate.job import Job

Read = Callable[[str, Job], Any]
"""Converts text to a value for this job; raises ValueError if it is malformed or out of range."""

SLOWER_MAX: Final = 1_000.0
"""Largest factor of a step time. Every second of the job is played, so a larger one would hardly ever finish."""
SECONDS_MAX: Final = 604_800.0
"""Longest duration: a week."""


class ScriptError(ValueError):
    """A fault has invalid syntax; the message says what is wrong and shows the right form."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One `name=value`. A dict that `read` returns sets several fields."""

    name: str
    read: Read
    help: str
    default: str | None = None
    """The default as it is written; "": none; None: the parameter is required."""


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """One event of a job. `apply` gets the job and all values by field, and returns the new job."""

    summary: str
    fields: Mapping[str, Parameter]
    apply: Callable[..., Job]

    @property
    def parameters(self) -> dict[str, Parameter]:
        """By name, in the order in which they are written."""
        return {parameter.name: parameter for parameter in self.fields.values()}


def apply(text: str, job: Job) -> Job:
    """The same job with one more fault, written as `name` or `name:parameter=value,…`.

    Raises:
        ScriptError: the text is malformed, or this job cannot have the fault.
    """
    name, _, given = text.partition(":")
    spec = FAULTS.get(name) or HARMLESS.get(name)
    if spec is None:
        near = difflib.get_close_matches(name, [*FAULTS, *HARMLESS], 1)
        hint = f"did you mean {near[0]}?" if near else "`--list-faults` lists all"
        raise ScriptError(f"there is no {name!r}; {hint}")
    try:
        return spec.apply(job, **_values(spec, given, job))
    except ValueError as error:
        raise ScriptError(f"{text}: {error}; it is written {usage(name)}") from error


def usage(name: str) -> str:
    """How a fault is written, with its defaults: `hang:rank=…,at=…[,seconds=60]`."""
    spec = FAULTS.get(name) or HARMLESS[name]
    shown = "".join(
        f",{called}=…" if one.default is None else f"[,{called}={one.default or '…'}]"
        for called, one in spec.parameters.items()
    )
    return f"{name}[:{shown[2:]}" if shown.startswith("[") else f"{name}:{shown[1:]}"


def _values(spec: FaultSpec, given: str, job: Job) -> dict[str, Any]:
    texts: dict[str, str] = {}
    for called, text in _pairs(given):
        if called not in spec.parameters:
            raise ValueError(f"there is no parameter {called!r}")
        if called in texts:
            raise ValueError(f"{called} is given twice")
        _read(spec.parameters[called], text, job)
        texts[called] = text
    if missing := [one.name for one in spec.parameters.values() if one.default is None and one.name not in texts]:
        raise ValueError(f"{', '.join(missing)} must be given")
    values: dict[str, Any] = {}
    for field, one in spec.fields.items():
        text = texts.get(one.name, one.default or "")
        value = _read(one, text, job) if text or one.name in texts else None
        values |= value if isinstance(value, dict) else {} if value is None else {field: value}
        if one.name == "until" and value is not None and value <= int(texts["at"]):
            raise ValueError(f"until: must be after {int(texts['at'])}")
        if one.name == "to" and value is not None and value > int(texts["at"]):
            raise ValueError(f"to: must not be after {int(texts['at'])}")
    return values


def _read(one: Parameter, text: str, job: Job) -> Any:
    try:
        return one.read(text, job)
    except ValueError as error:
        unreadable = "could not convert" in str(error) or "invalid" in str(error)
        raise ValueError(f"{one.name}: {f'{text!r} is not a number' if unreadable else error}") from error


def _pairs(given: str) -> Iterator[tuple[str, str]]:
    for part in given.split(",") if given else ():
        called, equals, text = part.partition("=")
        if not equals:
            raise ValueError(f"{part!r} is not name=value")
        yield called.strip(), text.strip()


# ---- how values are read ----


def integer(low: int) -> Read:
    """A whole number from `low` on."""

    def read(text: str, _job: Job) -> int:
        value = int(text)
        if value < low:
            raise ValueError(f"must be {low} or more")
        return value

    return read


def number(low: float, high: float = math.inf) -> Read:
    """A finite number from `low` to `high`."""

    def read(text: str, _job: Job) -> float:
        value = float(text)
        if not low <= value <= high or math.isinf(value):
            raise ValueError(f"must be from {low:g} to {high:g}" if high < math.inf else f"must be {low:g} or more")
        return value

    return read


def word(**sets: dict[str, Any]) -> Read:
    """One of some words, each of which sets fields."""

    def read(text: str, _job: Job) -> dict[str, Any]:
        if text not in sets:
            *others, last = sets
            raise ValueError(f"must be {', '.join(others)} or {last}")
        return sets[text]

    return read


def within(what: str, count: Callable[[Job], int], first: Callable[[Job], int] = lambda _job: 0) -> Read:
    """A step, rank or stage of the job, by number."""

    def read(text: str, job: Job) -> int:
        value, low, end = int(text), first(job), count(job)
        if not low <= value < end:
            raise ValueError(f"the job has the {what} {low} to {end - 1}")
        return value

    return read


def _host(text: str, job: Job) -> str:
    hosts = job.topology().host
    if text not in hosts:
        raise ValueError(f"the job has the hosts {hosts[0]} to {hosts[-1]}")
    return text


def _ranks(text: str, job: Job) -> tuple[int, ...]:
    """Ranks by number, by range, or all of a host."""
    if text.startswith("host-"):
        name = _host(text, job)
        return tuple(number for number, where in enumerate(job.topology().host) if where == name)
    chosen: list[int] = []
    for part in text.split("+"):
        first, _, last = part.partition("-")
        chosen += range(_rank(first, job), _rank(last or first, job) + 1)
    if not chosen:
        raise ValueError("names no rank")
    return tuple(chosen)


_step = within("steps", lambda job: job.steps, lambda job: job.start_step)
_rank = within("ranks", lambda job: job.world_size)

_stage = within("stages", lambda job: job.placement.pp)

_AT: Final = Parameter("at", _step, "first step affected")
USUAL: Final = {
    "ranks": Parameter("rank", _ranks, "17, 3+40, 8-15 or host-2"),
    "rank": Parameter("rank", _rank, "a rank"),
    "host": Parameter("host", _host, "host-N"),
    "at_step": _AT,
    "from_step": _AT,
    "until_step": Parameter(
        "until", integer(0), "first step no longer affected; without it, to the end of the job", ""
    ),
}
"""What faults mean by a field, where they say nothing else."""


def slower(default: str) -> Parameter:
    """A factor of a time."""
    return Parameter("factor", number(0.0, SLOWER_MAX), "times the usual", default)


def times(default: str) -> Parameter:
    """A factor of a value."""
    return Parameter("factor", number(0.0), "times the usual", default)


def count(reported: str = "number of steps", default: str = "1") -> Parameter:
    """A number of steps."""
    return Parameter("steps", integer(1), reported, default)


def every(default: str) -> Parameter:
    """An interval."""
    return Parameter("every", integer(1), "number of steps between", default)


def lasting(default: str, name: str = "seconds") -> Parameter:
    """A duration."""
    return Parameter(name, number(0.0, SECONDS_MAX), "duration", default)


def share(name: str, reported: str, default: str) -> Parameter:
    """A share of the step time, at most one half."""
    return Parameter(name, number(0.0, 0.5), reported, default)


def rarely(default: str) -> Parameter:
    """A probability of single steps."""
    return Parameter("probability", number(0.0, 1.0), "probability, for each rank and step", default)


def of_batches() -> Parameter:
    """A probability of batches."""
    return Parameter("probability", number(0.0, 1.0), "probability, for each batch", "0.01")


# ---- the events ----


def _fault(summary: str, kind: type[Fault], fixed: Mapping[str, Any] | None = None, **own: Parameter) -> FaultSpec:
    """An event whose parameters are fields of its class: the usual ones, and `own`, some of which set others."""
    always = fixed or {}
    names = dict.fromkeys([*(field.name for field in fields(kind)), *own])
    taken = {name: own.get(name) or USUAL[name] for name in names if name in own or name in USUAL}
    return FaultSpec(summary, taken, lambda job, **values: job.inject(kind(**always, **values)))


def _of_job(summary: str, part: str, **parameters: Parameter) -> FaultSpec:
    """An event that is a change of the job's noise, placement or transit."""
    return FaultSpec(
        summary, parameters, lambda job, **values: replace(job, **{part: replace(getattr(job, part), **values)})
    )


def _uneven(job: Job, uneven_cv: float, report_tokens: bool) -> Job:
    return replace(job, noise=replace(job.noise, uneven_cv=uneven_cv), report_tokens=report_tokens)


def _skew(job: Job, host: str, seconds: float) -> Job:
    return replace(job, transit=replace(job.transit, skews_s={**job.transit.skews_s, host: seconds}))


def _new_collector(job: Job, host: str, after: float) -> Job:
    restarts_s = {**job.transit.collector_restarts_s, host: after}
    return replace(job, transit=replace(job.transit, collector_restarts_s=restarts_s))


def _ended_by(text: str, _job: Job) -> dict[str, Any] | None:
    return {"signal": None, "code": 1, "error": text} if text else None


_COMPUTE: Final = word(compute={}, data={"data_wait": True}, descheduled={"wall_only": True}, asleep={"asleep": True})
_BUSY: Final = word(loop={}, stopped={"stopped": True})
_TOKENS: Final = word(yes={"report_tokens": True}, no={"report_tokens": False})

FAULTS: Final[dict[str, FaultSpec]] = {
    "straggler": _fault(
        "ranks work more slowly than their peers", faults.Slow, factor=slower("1.2"),
        every=Parameter("every", integer(1), "2 = only every second step", "1"),
        by=Parameter("by", _COMPUTE, "what takes longer: compute, data, descheduled or asleep", "compute"),
    ),
    "slowdown": _fault("all ranks are slower than before", faults.SlowJob, factor=slower("1.1")),
    "drift": _fault(
        "all ranks become slower gradually", faults.Drift, factor=slower("1.25"),
        steps=count("number of steps it takes", "1800"),
    ),
    "hang": _fault(
        "ranks do not arrive at a collective, the others wait for them", faults.Hang, seconds=lasting("60"),
        by=Parameter("by", _BUSY, "busy in a loop, or stopped by a signal", "loop"),
    ),
    "rank_lost": _fault(
        "a process ends, then its peers", faults.Kill, signal=Parameter("signal", integer(1), "the signal", "9"),
        error=Parameter("error", _ended_by, "exit with this error and status 1 instead", ""),
    ),
    "xid": _fault(
        "the driver reports an error of a rank's device", faults.DeviceXid,
        xid=Parameter("xid", integer(1), "its number", "79"),
    ),
    "throttle": _fault(
        "the hardware slows a rank's device down because of heat", faults.Throttle, factor=slower("1.2")
    ),
    "host_lost": _fault("a host fails, with its ranks", faults.HostLoss, seconds=lasting("60")),
    "telemetry_lost": _fault(
        "no telemetry from a host that trains on", faults.HostSilence,
        until_step=Parameter("until", _step, "first step with telemetry again"),
    ),
    "nonfinite": _fault("NaN in ranks' local gradients, then in every loss", faults.NonFinite),
    "overflow": _fault("one rank's gradient norm is infinite in one step", faults.Overflow),
    "corruption": _fault("a flipped bit in one replica's parameters", faults.BitFlip),
    "gradient": _fault(
        "one rank's local gradients differ from its peers'", faults.LocalGradient, factor=times("1.5")
    ),
    "loss_spike": _fault("the loss jumps and comes back", faults.LossSpike, factor=times("3"), steps=count()),
    "loss_divergence": _fault(
        "the loss grows until the end", faults.LossDivergence,
        growth=Parameter("growth", number(0.0), "share for each step", "0.01"),
    ),
    "loss_climb": _fault(
        "the loss climbs gradually", faults.LossClimb, factor=times("2"),
        steps=count("number of steps it takes", "1300"),
    ),
    "grad_norm": _fault("the gradient norm jumps", faults.NormSpike, factor=times("50"), steps=count()),
}  # fmt: skip

HARMLESS: Final[dict[str, FaultSpec]] = {
    "uneven": FaultSpec(
        "sequences of uneven length",
        {
            "uneven_cv": Parameter("cv", number(0.0, 1.0), "coefficient of variation", "0.1"),
            "report_tokens": Parameter("tokens", _TOKENS, "whether steps report token counts: yes or no", "no"),
        },
        _uneven,
    ),
    "gc": _of_job(
        "garbage collection: each rank pauses now and then", "noise",
        collect_every=every("100"), collect_s=lasting("0.4"),
    ),
    "hiccups": _of_job(
        "single slow steps of single ranks", "noise", hiccup_probability=rarely("0.001"), hiccup_s=lasting("0.4")
    ),
    "bursts": _of_job("two to four slow steps of single ranks", "noise", burst_probability=rarely("1e-05")),
    "eval": _fault(
        "evaluations", faults.RecurringStall, {"phase": "eval"}, every=every("200"), seconds=lasting("30")
    ),
    "save": _fault(
        "checkpoint saves", faults.RecurringStall, {"phase": "checkpoint_save"},
        every=every("100"), seconds=lasting("5"),
    ),
    "warm_up": _of_job(
        "slow first steps of every attempt", "noise",
        warm_up_steps=count("number of steps", "50"), warm_up_factor=slower("3"),
    ),
    "wave": _of_job(
        "step times that vary over the day", "noise", wave=share("amplitude", "share of the step time", "0.02")
    ),
    "wander": _fault(
        "a pace that changes by itself", faults.WanderingPace,
        low=share("low", "smallest change, as a share of the step time", "0.05"),
        high=share("high", "largest change", "0.13"),
        every=Parameter("every", integer(3), "average number of steps between changes", "300"),
    ),
    "batch_ramp": _fault("a schedule makes the batches larger", faults.BatchRamp, factor=slower("1.5")),
    "loss_step": _fault(
        "other data or another learning rate: the loss moves to another level", faults.LossLevel, factor=times("0.95")
    ),
    "loss_bump": _fault(
        "the loss is somewhat higher for a few steps", faults.LossBump, factor=times("1.3"),
        steps=count("number of steps", "3"),
    ),
    "scaler_skip": _fault("a step that the loss scaler skips", faults.ScalerSkip),
    "flap": _fault("a link that is down for a moment", faults.LinkFlap, seconds=lasting("4")),
    "pause": _fault("an order holds the job", faults.OrderedPause, seconds=lasting("30")),
    "restart": _fault(
        "a new launch, from an earlier step", faults.Restart,
        to_step=Parameter("to", _step, "step it continues from"), away_s=lasting("20", "away"),
    ),
    "rollback": _fault(
        "the processes go back to an earlier step", faults.Restart, {"relaunch": False},
        to_step=Parameter("to", _step, "step they continue from"),
    ),
    "heavy_stage": FaultSpec(
        "a pipeline stage with more work",
        {"stage": Parameter("stage", _stage, "number of the stage"), "factor": slower("1.3")},
        lambda job, stage, factor: replace(job, placement=replace(job.placement, heavy_stage=(stage, factor))),
    ),
    "absent": _fault(
        "a rank whose step records are missing", faults.MissingRows,
        until_step=Parameter("until", _step, "first step with records again"),
    ),
    "lean_host": _of_job(
        "a host with one device less from the start", "placement",
        lean_host=Parameter("host", integer(0), "number of the host", "0"),
    ),
    "clock_skew": FaultSpec(
        "a host whose clock is ahead",
        {"host": USUAL["host"], "seconds": Parameter("seconds", number(-86_400.0), "how far ahead", "0.5")},
        _skew,
    ),
    "doubled": _of_job("batches that arrive twice (live only)", "transit", doubled=of_batches()),
    "late": _of_job("batches that arrive late (live only)", "transit", late=of_batches(), late_s=lasting("3")),
    "new_collector": FaultSpec(
        "a host's collector starts anew (live only)",
        {"host": USUAL["host"], "after": Parameter("after", number(0.0), "seconds after the job starts")},
        _new_collector,
    ),
}  # fmt: skip
