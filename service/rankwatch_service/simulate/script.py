"""What a person asks of a synthetic job, as text: `straggler:rank=17,factor=1.1,at=500`.

Two lists: `FAULTS` should be found, `HARMLESS` should raise nothing. An entry says what it is, which parameters it has
and what it does to a `Job`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rankwatch_service.simulate.scenario import Job

Read = Callable[[str, Job], Any]

SLOWER_MAX: Final = 1_000.0
"""Times the usual step. Every second of the job is lived through, so that a larger factor makes one without end."""

SECONDS_MAX: Final = 604_800.0
"""A week, as long as anything may last."""


class ScriptError(ValueError):
    """Something is not written as it should be; the message says what is wrong and how it is written."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One `name=value`; without a default it must be given."""

    read: Read
    told: str
    default: Any = ...


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that can happen to a job. `apply` is called with the job and all parameters by name."""

    told: str
    parameters: Mapping[str, Parameter]
    apply: Callable[..., object]


def integer(low: int) -> Read:
    """A whole number from `low` on."""

    def read(text: str, _job: Job) -> int:
        value = int(text)
        if value < low:
            raise ValueError(f"must be {low} or more")
        return value

    return read


def number(low: float, high: float = math.inf) -> Read:
    """A finite number between two others."""

    def read(text: str, _job: Job) -> float:
        value = float(text)
        if not low <= value <= high or math.isinf(value):
            raise ValueError(f"must be from {low:g} to {high:g}" if high < math.inf else f"must be {low:g} or more")
        return value

    return read


def one_of(*words: str) -> Read:
    """One of some words."""

    def read(text: str, _job: Job) -> str:
        if text not in words:
            raise ValueError(f"must be {', '.join(words[:-1])} or {words[-1]}")
        return text

    return read


def _step(text: str, job: Job) -> int:
    value = int(text)
    if not job.start_step <= value < job.steps:
        raise ValueError(f"the job has the steps {job.start_step} to {job.steps - 1}")
    return value


def _rank(text: str, job: Job) -> int:
    value = int(text)
    if not 0 <= value < job.world_size:
        raise ValueError(f"the job has the ranks 0 to {job.world_size - 1}")
    return value


def _host(text: str, job: Job) -> str:
    hosts = job.topology().host
    if text not in hosts:
        raise ValueError(f"the job has the hosts {hosts[0]} to {hosts[-1]}")
    return text


def _ranks(text: str, job: Job) -> tuple[int, ...]:
    if text.startswith("host-"):
        host = _host(text, job)
        return tuple(rank for rank, name in enumerate(job.topology().host) if name == host)
    ranks: list[int] = []
    for part in text.split("+"):
        first, _, last = part.partition("-")
        ranks += range(_rank(first, job), _rank(last or first, job) + 1)
    if not ranks:
        raise ValueError("names no rank")
    return tuple(ranks)


def _stage(text: str, job: Job) -> int:
    value = int(text)
    if not 0 <= value < job.pp:
        raise ValueError(f"the job has the stages 0 to {job.pp - 1}")
    return value


AT: Final = Parameter(_step, "step at which it begins")
UNTIL: Final = Parameter(integer(0), "step before which it ends; never, if not given", None)
RANK: Final = Parameter(_rank, "a rank")
RANKS: Final = Parameter(_ranks, "17, 3+40, 8-15 or host-2")
HOST: Final = Parameter(_host, "host-N")
STEPS: Final = Parameter(integer(1), "for so many steps", 1)
RARELY: Final = Parameter(number(0.0, 1.0), "probability, for each rank and step", 0.001)
OF_BATCHES: Final = Parameter(number(0.0, 1.0), "probability, for each batch", 0.01)


def _factor(default: float) -> Parameter:
    return Parameter(number(0.0), "times the usual", default)


def _slower(default: float) -> Parameter:
    return Parameter(number(0.0, SLOWER_MAX), "times the usual", default)


def _seconds(default: float) -> Parameter:
    return Parameter(number(0.0, SECONDS_MAX), "how long", default)


def _straggler(job: Job, rank: tuple[int, ...], at: int, factor: float, until: int | None, every: int, by: str) -> None:
    job.slow(rank, at, factor, until, every=every, data_wait=by == "data", wall_only=by == "descheduled")


FAULTS: Final[dict[str, Entry]] = {
    "straggler": Entry(
        "ranks work more slowly than their peers",
        {
            "rank": RANKS, "at": AT, "factor": _slower(1.2), "until": UNTIL,
            "every": Parameter(integer(1), "only every so many steps", 1),
            "by": Parameter(
                one_of("compute", "data", "descheduled"), "what takes time: compute, data or descheduled", "compute"
            ),
        },
        _straggler,
    ),
    "slowdown": Entry(
        "all ranks are slower than before",
        {"at": AT, "factor": _slower(1.1), "until": UNTIL},
        lambda job, at, factor, until: job.slow_all(at, factor, until),
    ),
    "drift": Entry(
        "all ranks become slower, little by little",
        {"at": AT, "factor": _slower(1.25), "steps": Parameter(integer(1), "over so many steps", 1800)},
        lambda job, at, factor, steps: job.drift(at, factor, steps),
    ),
    "hang": Entry(
        "ranks do not arrive, the others wait for them",
        {
            "rank": RANKS, "at": AT, "seconds": _seconds(60.0),
            "by": Parameter(one_of("loop", "stopped"), "busy in a loop, or stopped by a signal", "loop"),
        },
        lambda job, rank, at, seconds, by: job.hang(rank, at, seconds, stopped=by == "stopped"),
    ),
    "rank_lost": Entry(
        "a process ends, its peers after it",
        {
            "rank": RANK, "at": AT,
            "signal": Parameter(integer(1), "by this signal", 9),
            "error": Parameter(lambda text, _job: text, "or with this error, and status 1", ""),
        },
        lambda job, rank, at, signal, error: (
            job.kill(rank, at, None, 1, error) if error else job.kill(rank, at, signal)
        ),
    ),
    "host_lost": Entry(
        "a host goes, with its ranks",
        {"host": HOST, "at": AT, "seconds": _seconds(60.0)},
        lambda job, host, at, seconds: job.lose_host(host, at, seconds),
    ),
    "telemetry_lost": Entry(
        "nothing is heard of a host, which trains on",
        {"host": HOST, "at": AT, "until": Parameter(_step, "step before which it is heard again")},
        lambda job, host, at, until: job.silence(host, at, until),
    ),
    "nonfinite": Entry(
        "NaN in ranks' local gradients, then in every loss",
        {"rank": RANKS, "at": AT},
        lambda job, rank, at: job.nonfinite(rank, at),
    ),
    "overflow": Entry(
        "one rank's gradient norm is infinite in one step",
        {"rank": RANK, "at": AT},
        lambda job, rank, at: job.overflow(rank, at),
    ),
    "corruption": Entry(
        "a flipped bit in one replica's parameters", {"rank": RANK, "at": AT}, lambda job, rank, at: job.flip(rank, at)
    ),
    "gradient": Entry(
        "one rank's local gradients leave its peers'",
        {"rank": RANK, "at": AT, "factor": _factor(1.5)},
        lambda job, rank, at, factor: job.gradient(rank, at, factor),
    ),
    "loss_spike": Entry(
        "the loss jumps and comes back",
        {"at": AT, "factor": _factor(3.0), "steps": STEPS},
        lambda job, at, factor, steps: job.loss_spike(at, factor, steps),
    ),
    "loss_divergence": Entry(
        "the loss grows for good",
        {"at": AT, "growth": Parameter(number(0.0), "share for each step", 0.01)},
        lambda job, at, growth: job.diverge(at, growth),
    ),
    "loss_climb": Entry(
        "the loss climbs, little by little",
        {"at": AT, "factor": _factor(2.0), "steps": Parameter(integer(1), "over so many steps", 1300)},
        lambda job, at, factor, steps: job.climb(at, factor, steps),
    ),
    "grad_norm": Entry(
        "the gradient norm jumps",
        {"at": AT, "factor": _factor(50.0), "steps": STEPS},
        lambda job, at, factor, steps: job.norm_spike(at, factor, steps),
    ),
}  # fmt: skip

HARMLESS: Final[dict[str, Entry]] = {
    "uneven": Entry(
        "sequences of uneven length",
        {
            "cv": Parameter(number(0.0, 1.0), "coefficient of variation", 0.1),
            "tokens": Parameter(one_of("yes", "no"), "whether steps tell their tokens, yes or no", "no"),
        },
        lambda job, cv, tokens: job.uneven(cv, report_tokens=tokens == "yes"),
    ),
    "gc": Entry(
        "garbage collection: each rank pauses now and then",
        {"every": Parameter(integer(1), "steps between", 100), "seconds": _seconds(0.4)},
        lambda job, every, seconds: job.collections(every, seconds),
    ),
    "hiccups": Entry(
        "single slow steps of single ranks",
        {"probability": RARELY, "seconds": _seconds(0.4)},
        lambda job, probability, seconds: job.hiccups(probability, seconds),
    ),
    "bursts": Entry(
        "two to four slow steps of single ranks",
        {"probability": Parameter(RARELY.read, RARELY.told, 1e-5)},
        lambda job, probability: job.bursts(probability),
    ),
    "eval": Entry(
        "evaluations",
        {"every": Parameter(integer(1), "steps between", 200), "seconds": _seconds(30.0)},
        lambda job, every, seconds: job.standstill(every, seconds, "eval"),
    ),
    "save": Entry(
        "checkpoint saves",
        {"every": Parameter(integer(1), "steps between", 100), "seconds": _seconds(5.0)},
        lambda job, every, seconds: job.standstill(every, seconds, "checkpoint_save"),
    ),
    "warm_up": Entry(
        "slow first steps of every attempt",
        {"steps": Parameter(integer(1), "so many", 50), "factor": _slower(3.0)},
        lambda job, steps, factor: job.warm_up(steps, factor),
    ),
    "wave": Entry(
        "step times that wave over the day",
        {"amplitude": Parameter(number(0.0, 0.5), "share of the step time", 0.02)},
        lambda job, amplitude: job.daily_wave(amplitude),
    ),
    "wander": Entry(
        "a pace that goes from level to level by itself",
        {
            "low": Parameter(number(0.0, 0.5), "share of the step time, at least", 0.05),
            "high": Parameter(number(0.0, 0.5), "and at most", 0.13),
            "every": Parameter(integer(3), "steps between, about", 300),
        },
        lambda job, low, high, every: job.wander(low, high, every),
    ),
    "batch_ramp": Entry(
        "a schedule makes the batches larger", {"at": AT, "factor": _slower(1.5)},
        lambda job, at, factor: job.ramp(at, factor),
    ),
    "loss_step": Entry(
        "another mix of data or learning rate: the loss goes to another level",
        {"at": AT, "factor": _factor(0.95)},
        lambda job, at, factor: job.loss_step(at, factor),
    ),
    "loss_bump": Entry(
        "the loss is somewhat higher for a few steps and comes back",
        {"at": AT, "factor": _factor(1.3), "steps": Parameter(STEPS.read, STEPS.told, 3)},
        lambda job, at, factor, steps: job.loss_bump(at, factor, steps),
    ),
    "scaler_skip": Entry(
        "a step that the loss scaler skips", {"at": AT}, lambda job, at: job.scaler_skip(at)
    ),
    "flap": Entry(
        "a link that is down for a moment", {"at": AT, "seconds": _seconds(4.0)},
        lambda job, at, seconds: job.flap(at, seconds),
    ),
    "pause": Entry(
        "the job is held by an order", {"at": AT, "seconds": _seconds(30.0)},
        lambda job, at, seconds: job.pause(at, seconds),
    ),
    "restart": Entry(
        "a new launch, from an earlier step",
        {"at": AT, "to": Parameter(_step, "step it goes on from"), "away": _seconds(20.0)},
        lambda job, at, to, away: job.restart(at, to, away_s=away),
    ),
    "rollback": Entry(
        "the processes go back to an earlier step",
        {"at": AT, "to": Parameter(_step, "step they go on from")},
        lambda job, at, to: job.restart(at, to, relaunch=False),
    ),
    "heavy_stage": Entry(
        "a pipeline stage that has more to do",
        {"stage": Parameter(_stage, "its number"), "factor": _slower(1.3)},
        lambda job, stage, factor: job.heavy_stage(stage, factor),
    ),
    "absent": Entry(
        "a rank whose step records are missing",
        {"rank": RANK, "at": AT, "until": Parameter(_step, "step before which they come again")},
        lambda job, rank, at, until: job.absent(rank, at, until),
    ),
    "lean_host": Entry(
        "a host with one device less, and accepted so",
        {"host": Parameter(integer(0), "its number", 0)},
        lambda job, host: job.lean(host),
    ),
    "clock_skew": Entry(
        "a host whose clock is ahead",
        {"host": HOST, "seconds": Parameter(number(-86_400.0), "by so much", 0.5)},
        lambda job, host, seconds: job.skew(host, seconds),
    ),
    "doubled": Entry(
        "batches that come twice (live only)",
        {"probability": OF_BATCHES},
        lambda job, probability: job.doubled(probability),
    ),
    "late": Entry(
        "batches that come late (live only)",
        {"probability": OF_BATCHES, "seconds": _seconds(3.0)},
        lambda job, probability, seconds: job.late(probability, seconds),
    ),
    "new_collector": Entry(
        "a host's collector starts anew (live only)",
        {"host": HOST, "after": Parameter(number(0.0), "seconds of the job")},
        lambda job, host, after: job.new_collector(host, after),
    ),
}  # fmt: skip


def apply(text: str, job: Job) -> None:
    """Let one thing happen to a job: `name` or `name:parameter=value,…`.

    Raises:
        ScriptError: it is malformed, or this job cannot have it.
    """
    name, _, given = text.partition(":")
    entry = FAULTS.get(name) or HARMLESS.get(name)
    if entry is None:
        near = difflib.get_close_matches(name, [*FAULTS, *HARMLESS], 1)
        hint = f"did you mean {near[0]}?" if near else "`--list-faults` names all"
        raise ScriptError(f"there is no {name!r}; {hint}")
    try:
        entry.apply(job, **_values(entry, given, job))
    except ValueError as error:
        raise ScriptError(f"{text}: {error}; it is written {usage(name)}") from error


def usage(name: str) -> str:
    """How an entry is written, with its defaults: `hang:rank=…,at=…[,seconds=60]`."""
    entry = FAULTS.get(name) or HARMLESS[name]
    shown = ""
    for called, parameter in entry.parameters.items():
        if parameter.default is ...:
            shown += f",{called}=…"
        else:
            default = "…" if parameter.default in (None, "") else parameter.default
            shown += f"[,{called}={default:g}]" if isinstance(default, float) else f"[,{called}={default}]"
    if shown.startswith("["):
        return f"{name}[:{shown[2:]}"
    return f"{name}:{shown[1:]}"


def _values(entry: Entry, given: str, job: Job) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for called, text in _pairs(given):
        if called not in entry.parameters:
            raise ValueError(f"there is no parameter {called!r}")
        if called in values:
            raise ValueError(f"{called} is given twice")
        try:
            values[called] = entry.parameters[called].read(text, job)
        except ValueError as error:
            told = (
                f"{text!r} is not a number" if "could not convert" in str(error) or "invalid" in str(error) else error
            )
            raise ValueError(f"{called}: {told}") from error
    missing = [name for name, one in entry.parameters.items() if name not in values and one.default is ...]
    if missing:
        raise ValueError(f"{', '.join(missing)} must be given")
    values = {name: values.get(name, one.default) for name, one in entry.parameters.items()}
    if values.get("until") is not None and values["until"] <= values["at"]:
        raise ValueError(f"until: must be after {values['at']}")
    if "to" in values and values["to"] > values["at"]:
        raise ValueError(f"to: must not be after {values['at']}")
    return values


def _pairs(given: str) -> Iterator[tuple[str, str]]:
    for part in given.split(",") if given else ():
        called, equals, text = part.partition("=")
        if not equals:
            raise ValueError(f"{part!r} is not name=value")
        yield called.strip(), text.strip()
