"""Traces: a person asks ranks to record some steps in detail, and each rank answers with a summary. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from rankwatch_detectors.base import Occurrence
from rankwatch_service.policy.actions import TRACE_STEPS_MAX

ERROR_CHARACTERS_MAX: Final = 400

Name = Annotated[str, Meta(max_length=120)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Count = Annotated[int, Meta(ge=0, le=2**53)]


class StreamTime(msgspec.Struct, frozen=True):
    """A stream of a device."""

    device: Count
    stream: Count
    count: Count
    """Kernels and copies on it."""
    time_s: Seconds
    """Time in which at least one of them ran."""


class CollectiveTime(msgspec.Struct, frozen=True):
    """The calls of one collective in one process group."""

    group: Name
    """Its description if it has one, else its name; empty: not known."""
    name: Name
    count: Count
    bytes: Count
    """Given to it by this rank, or got from it, whichever is more."""
    time_s: Seconds
    """Time from its begin to its end, waits for other ranks included."""


class KernelTime(msgspec.Struct, frozen=True):
    """A kernel, or an operation of the host, by its name."""

    name: Name
    kind: Name
    count: Count
    time_s: Seconds
    """Time of the operation itself, without those that it calls."""


class TraceSummary(msgspec.Struct, frozen=True):
    """What a rank recorded in the steps of a trace. Times are sums over these steps."""

    step: Annotated[int, Meta(ge=0, le=2**53)]
    """The first one."""
    step_times_s: Annotated[list[Seconds], Meta(max_length=TRACE_STEPS_MAX)]
    """Wall time of each step, with the wait for its device. The step after each of them was not recorded."""
    on_device: bool
    """Whether kernels of a device were recorded; else times are of operations on the host."""
    wall_s: Seconds
    """Wall time of all of these steps."""
    idle_ratio: Annotated[float, Meta(ge=0, le=1)] | None
    """Share of `wall_s` in which nothing ran on the device; None: no device."""
    spans: Count
    """Recorded."""
    kinds: Annotated[dict[Name, Seconds], Meta(max_length=16)]
    streams: Annotated[list[StreamTime], Meta(max_length=16)]
    collectives: Annotated[list[CollectiveTime], Meta(max_length=32)]
    top: Annotated[list[KernelTime], Meta(max_length=10)]
    left_out: Count
    """Streams and collectives for which there was no room."""


@dataclass(frozen=True, slots=True)
class TraceAnswer:
    """What one rank answered to a command `trace`."""

    job: str
    command: str
    rank: int
    error: str
    """Why there is no summary, or what is wrong with it; empty: it is whole."""
    summary: Mapping[str, Any]
    """The fields of `TraceSummary`, JSON types; empty: there is none."""
    at_unix_ns: int
    """Stream time."""


def trace_answer(job: str, occurrence: Occurrence, at_unix_ns: int) -> TraceAnswer | None:
    """The answer in an event `trace`; None if it does not say to what. A malformed summary becomes an error."""
    request, error = occurrence.fields.get("request"), str(occurrence.fields.get("error", ""))
    if not isinstance(request, str) or occurrence.rank is None:
        return None
    summary: Mapping[str, Any] = {}
    if "step_times_s" in occurrence.fields:
        try:
            summary = msgspec.to_builtins(msgspec.convert(dict(occurrence.fields), TraceSummary))
        except msgspec.ValidationError as bad:
            error = f"its summary cannot be read: {bad}"
    elif not error:
        error = "its answer is empty"
    return TraceAnswer(job, request, occurrence.rank, error[:ERROR_CHARACTERS_MAX], summary, at_unix_ns)
