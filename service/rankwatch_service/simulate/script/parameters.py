"""The parameters of a fault that is written as text: how each is parsed, and its range."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from rankwatch_service.simulate.job import Job

Read = Callable[[str, Job], Any]
"""Converts text to a value for this job; raises ValueError if it is malformed or out of range."""

SLOWER_MAX: Final = 1_000.0
"""Largest factor of a step time. Every second of the job is played, so a larger one would hardly ever finish."""

SECONDS_MAX: Final = 604_800.0
"""Longest duration: a week."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One `name=value`; without a default it must be given."""

    read: Read
    help: str
    default: Any = ...


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


def one_of(*words: str) -> Read:
    """One of some words."""

    def read(text: str, _job: Job) -> str:
        if text not in words:
            raise ValueError(f"must be {', '.join(words[:-1])} or {words[-1]}")
        return text

    return read


def step(text: str, job: Job) -> int:
    """A step of the job."""
    value = int(text)
    if not job.start_step <= value < job.steps:
        raise ValueError(f"the job has the steps {job.start_step} to {job.steps - 1}")
    return value


def rank(text: str, job: Job) -> int:
    """A rank of the job."""
    value = int(text)
    if not 0 <= value < job.world_size:
        raise ValueError(f"the job has the ranks 0 to {job.world_size - 1}")
    return value


def host(text: str, job: Job) -> str:
    """A host of the job."""
    hosts = job.topology().host
    if text not in hosts:
        raise ValueError(f"the job has the hosts {hosts[0]} to {hosts[-1]}")
    return text


def ranks(text: str, job: Job) -> tuple[int, ...]:
    """Ranks by number, by range, or all of a host."""
    if text.startswith("host-"):
        name = host(text, job)
        return tuple(number for number, where in enumerate(job.topology().host) if where == name)
    chosen: list[int] = []
    for part in text.split("+"):
        first, _, last = part.partition("-")
        chosen += range(rank(first, job), rank(last or first, job) + 1)
    if not chosen:
        raise ValueError("names no rank")
    return tuple(chosen)


def stage(text: str, job: Job) -> int:
    """A pipeline stage of the job."""
    value = int(text)
    if not 0 <= value < job.placement.pp:
        raise ValueError(f"the job has the stages 0 to {job.placement.pp - 1}")
    return value


AT: Final = Parameter(step, "first step affected")
UNTIL: Final = Parameter(integer(0), "first step no longer affected; without it, to the end of the job", None)
RANK: Final = Parameter(rank, "a rank")
RANKS: Final = Parameter(ranks, "17, 3+40, 8-15 or host-2")
HOST: Final = Parameter(host, "host-N")
STEPS: Final = Parameter(integer(1), "number of steps", 1)
RARELY: Final = Parameter(number(0.0, 1.0), "probability, for each rank and step", 0.001)
OF_BATCHES: Final = Parameter(number(0.0, 1.0), "probability, for each batch", 0.01)


def times(default: float) -> Parameter:
    """A factor of a value."""
    return Parameter(number(0.0), "times the usual", default)


def slower(default: float) -> Parameter:
    """A factor of a time."""
    return Parameter(number(0.0, SLOWER_MAX), "times the usual", default)


def seconds(default: float) -> Parameter:
    """A duration."""
    return Parameter(number(0.0, SECONDS_MAX), "duration", default)


def share(help_text: str, default: float) -> Parameter:
    """A share of the step time, at most one half."""
    return Parameter(number(0.0, 0.5), help_text, default)


def with_default(parameter: Parameter, default: Any) -> Parameter:
    """The same parameter with another default."""
    return replace(parameter, default=default)
