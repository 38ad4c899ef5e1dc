"""The interface between the probe and an accelerator, and CUDA's form of it.

It describes the device that holds a rank's parameters, by its type and the driver's UUID.

It measures each step on its device: own work, and the wait for other ranks. It never synchronises with the device.

Events are recorded around the parts of the step, and read once the device has passed the end of the step. Between two
events a device may also idle, because its host launches work too late. Therefore the device's lag behind its host is
computed at the end of each part: it is 0 where the device had finished all earlier work, and grows by the device's time
of a part less the host's. Without lag the host is the slower one.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

import torch

from rankwatch.sink import Sink

ON_HOST: Final = frozenset({"cpu", "meta"})
"""Types of torch devices that are no accelerator."""
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_UNKNOWN: Final = "00000000-0000-0000-0000-000000000000"


def describe_device(
    home: torch.device, known_uuid: str, env: Mapping[str, str], failed: Callable[[Exception], None]
) -> dict[str, str]:
    """The fields `device_type` and `device_uuid` of a rank's identity; the latter only if it is new.

    Waits for no device, and initializes none: parameters lie there already.

    Args:
        home: the device of the parameters.
        known_uuid: the UUID that the script or the launcher gave; it stays. Else the driver is asked.
        env: the process's environment. An instance of a divided device (MIG) that it lists is what it is known by:
            what the driver then reports may be the whole device.
        failed: gets what this raises.
    """
    reported = {"device_type": home.type}
    if home.type != "cuda" or known_uuid:
        return reported
    try:
        uuid = _listed_instance(home, env) or _uuid(torch.cuda.get_device_properties(home))
    except Exception as error:  # noqa: BLE001 -- a driver or a build of torch that is not known
        failed(error)
        return reported
    return reported | ({"device_uuid": uuid} if uuid else {})


def _listed_instance(home: torch.device, env: Mapping[str, str]) -> str:
    listed = env.get(VISIBLE, "").split(",")
    named = listed[home.index].strip() if home.index is not None and home.index < len(listed) else ""
    return named if named.startswith("MIG-") else ""


def _uuid(properties: Any) -> str:
    """As NVML writes it; on ROCm, whose ids have another form, as torch gives it; "" where there is none."""
    text = str(getattr(properties, "uuid", None) or _UNKNOWN)
    if text == _UNKNOWN:
        return ""
    return text if torch.version.hip or text.startswith("GPU-") else f"GPU-{text}"


FREE_MAX: Final = 6144
"""Events kept to be recorded again: those of two steps in flight, with as many phases, parts of blocks and waits as are
measured (`SPANS_MAX` each). The driver makes one in microseconds and keeps some hundred bytes for it."""


class Moment(Protocol):
    """A point in the work of a device, such as a torch.cuda.Event."""

    def query(self) -> bool:
        """Whether the device has passed it. Returns at once."""
        ...

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds of device time to a later moment; the device must have passed both."""
        ...


class Device(Protocol):
    """The operations of an accelerator that the probe needs. None of them waits for the device."""

    def describe(self, known_uuid: str, failed: Callable[[Exception], None]) -> Mapping[str, str]:
        """The fields `device_type` and `device_uuid` of a rank's identity; see `describe_device`."""
        ...

    def pinned(self, rows: int, words: int) -> torch.Tensor:
        """Host memory of int64 words that the device can write without the host waiting."""
        ...

    def now(self) -> Moment:
        """Record a moment behind all work given to the current stream so far."""
        ...

    def stream(self) -> Any:
        """The stream to which this thread gives its work now."""
        ...

    def host_s(self) -> float:
        """Seconds on the clock of the host that gives the work."""
        ...

    def free(self, moment: Moment) -> None:
        """Return a moment that is needed no more, to be recorded again."""
        ...

    def captures(self) -> bool:
        """Whether work of the current stream is captured into a graph: then no moment may be recorded or queried."""
        ...


class CudaDevice:
    """A CUDA (or ROCm) device."""

    def __init__(self, home: torch.device) -> None:
        """Measure the device that holds the parameters."""
        self._home = home
        self._free: list[torch.cuda.Event] = []

    def describe(self, known_uuid: str, failed: Callable[[Exception], None]) -> Mapping[str, str]:
        """See `Device.describe`."""
        return describe_device(self._home, known_uuid, os.environ, failed)

    def pinned(self, rows: int, words: int) -> torch.Tensor:
        """See `Device.pinned`."""
        return torch.empty((rows, words), dtype=torch.int64, pin_memory=True)

    def now(self) -> torch.cuda.Event:
        """See `Device.now`."""
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self.stream())
        return event

    def stream(self) -> torch.cuda.Stream:
        """See `Device.stream`."""
        return torch.cuda.current_stream(self._home)

    def host_s(self) -> float:
        """See `Device.host_s`."""
        return time.monotonic()

    def free(self, moment: Any) -> None:
        """See `Device.free`."""
        if len(self._free) < FREE_MAX:
            self._free.append(moment)

    def captures(self) -> bool:
        """See `Device.captures`."""
        with torch.cuda.device(self._home):  # scripts need not make it the current one
            return torch.cuda.is_current_stream_capturing()


SPANS_MAX: Final = 512
"""Phases measured in one step at most, and parts of blocks: of 8 blocks in 32 micro-batches; and waits in collectives.
Reading one takes six calls of the driver. Where there are more, they are counted; from the next step on some are
measured for all."""
PHASES_MAX: Final = 100
"""Phases of one name in a step, of which there are five at most, that are all measured."""
WAITS_MAX: Final = SPANS_MAX // 4
"""Waits in collectives of a step that are all measured, in each part of it: forward, backward, optimizer, and outside
of these. A transformer layer with tensor parallelism waits four times in a forward."""
MEASURED_SHARE: Final = 0.5
"""Target share of the limit where parts are sampled: the next step may have more of them."""
BLOCKS_MAX: Final = 8
"""Blocks of a sharded model that are measured, evenly spaced; their time stands for all blocks."""
LAG_SHARE: Final = 0.1
"""A device that is behind its host by less than this share of a part was given the part late."""
STARVED_SHARE: Final = 0.5
"""A step with more than this share of its work given late says nothing about the speed of its device."""

WAIT: Final = "collective"
WORK: Final = ("forward", "backward", "optimizer")
BLOCK: Final = "block"
PASSES: Final = frozenset({"forward", "backward"})
"""Without these a step's own work is not known, as in the replay of a captured graph, in which no hook runs."""


class TimedMoment(NamedTuple):
    """A moment on the device, and when it was recorded."""

    moment: Moment
    host_s: float
    idle: bool = False
    """The device had passed everything before: it came to this moment at once."""


class Span(NamedTuple):
    """A part of a step."""

    name: str
    begin: TimedMoment
    end: TimedMoment
    chosen_as: str = ""
    """The name of the phase as one of which it was chosen to be measured; empty: its own."""


class StepSpans(NamedTuple):
    """What was marked in one step, in the order of ends."""

    begin: TimedMoment | None
    phases: tuple[Span, ...] = ()
    blocks: tuple[Span, ...] = ()
    blocks_each: float = 0.0
    """How many blocks each measured one stands for; 0: the model has none, and its phases hold no waits."""
    knows_waits: bool = False
    """Whether all waits for other ranks lie in what is marked."""
    is_cut: bool = False
    """There were parts that are neither measured nor stood for."""
    phases_each: Mapping[str, float] = MappingProxyType({})
    """How many phases each measured one stands for, by its name."""
    waits: tuple[Span, ...] = ()
    """Waits for other ranks in collectives, by the part of the step in which they lie: a phase, `BLOCK`, or "" outside
    of any."""
    waits_each: Mapping[str, float] = MappingProxyType({})
    """How many waits each measured one stands for, by that part."""

    @property
    def moments(self) -> list[Moment]:
        """All moments recorded for this step."""
        found = [mark.moment for span in (*self.phases, *self.blocks, *self.waits) for mark in (span.begin, span.end)]
        return found if self.begin is None else [self.begin.moment, *found]

    def read(self, end: Moment) -> dict[str, float]:
        """Seconds by metric; empty if the step began in a capture.

        Args:
            end: of the step, which the device must have passed.

        Returns:
            `device.PHASE`; `device_step_s`, from the step's start to its end; `device_busy_s`, the device's own work,
            unless most of it was given late; `device_wait_s`, its wait for other ranks, if all of it is known.
        """
        if self.begin is None:
            return {}
        phases, starved_s = self._phases(self.begin)
        found = {f"device.{name}": seconds for name, seconds in phases.items()}
        found["device_step_s"] = _seconds(self.begin.moment, end)
        marked_s = sum(phases.get(name, 0.0) for name in WORK)
        if self.is_cut or not phases.keys() >= PASSES or not self._has_both_passes_of_blocks():
            return found
        within_s, outside_s = self._waits_s()
        waiting_s = min(self._gathering_s(phases) + within_s, marked_s)
        if starved_s <= STARVED_SHARE * marked_s:
            found["device_busy_s"] = marked_s - waiting_s
        if self.knows_waits:
            found["device_wait_s"] = phases.get(WAIT, 0.0) + waiting_s + outside_s
        return found

    def _phases(self, begin: TimedMoment) -> tuple[dict[str, float], float]:
        """Seconds of each phase, and of work that was given late."""
        phases: dict[str, float] = {}
        starved_s = 0.0
        lag_s: float | None = None
        before_s, before = 0.0, begin
        for span in self.phases:
            begin_s, end_s = _seconds(begin.moment, span.begin.moment), _seconds(begin.moment, span.end.moment)
            if span.begin.idle:
                lag_s = 0.0
            elif lag_s is not None:
                lag_s = max(lag_s + begin_s - before_s - (span.begin.host_s - before.host_s), 0.0)
            seconds = end_s - begin_s
            stands_for = self.phases_each.get(span.chosen_as or span.name, 1.0)
            if lag_s is not None:
                lag_s = max(lag_s + seconds - (span.end.host_s - span.begin.host_s), 0.0)
                starved_s += stands_for * seconds if span.name in WORK and lag_s <= LAG_SHARE * seconds else 0.0
            phases[span.name] = phases.get(span.name, 0.0) + stands_for * seconds
            before_s, before = end_s, span.end
        return phases, starved_s

    def _has_both_passes_of_blocks(self) -> bool:
        counts = Counter(span.name for span in self.blocks)
        return not self.blocks_each or 0 < counts["forward"] == counts["backward"]

    def _gathering_s(self, phases: Mapping[str, float]) -> float:
        """Seconds of forward and backward that are no work of blocks: waits for parameters and gradients of others."""
        if not self.blocks_each:
            return 0.0
        blocks_s = self.blocks_each * sum(_seconds(span.begin.moment, span.end.moment) for span in self.blocks)
        return max(phases.get("forward", 0.0) + phases.get("backward", 0.0) - blocks_s, 0.0)

    def _waits_s(self) -> tuple[float, float]:
        """Seconds of waits in collectives: within the own work of phases and blocks, and outside of all phases."""
        within_s, outside_s = 0.0, 0.0
        for span in self.waits:
            seconds = self.waits_each.get(span.name, 1.0) * _seconds(span.begin.moment, span.end.moment)
            if not span.name:
                outside_s += seconds
            else:
                stands_for = self.blocks_each if span.name == BLOCK else self.phases_each.get(span.name, 1.0)
                within_s += stands_for * seconds
        return within_s, outside_s


NO_SPANS: Final = StepSpans(None)


class SpanSampling:
    """Chooses among the parts of one kind: all, or every n-th where the step before had too many of them.

    Another one is the first in each step, so that over some steps all are measured.
    """

    def __init__(self, most: int) -> None:
        """`most`: parts that a step may have without any being left out."""
        self._most = most
        self._every = 1
        self._steps = 0
        self.seen = 0
        """Parts of this step so far ..."""
        self.measured = 0
        """... and those of them that were taken."""

    def step_begins(self) -> None:
        """Choose by how many parts the step before had."""
        many = self.seen > self._most
        self._every = math.ceil(self.seen / (self._most * MEASURED_SHARE)) if many else 1
        self._steps += 1
        self.seen = self.measured = 0

    def takes(self) -> bool:
        """Whether the next part is measured."""
        taken = (self.seen + self._steps) % self._every == 0
        self.seen += 1
        self.measured += taken
        return taken

    @property
    def each(self) -> float:
        """How many parts of this step each measured one stands for."""
        return self.seen / self.measured if self._every > 1 and self.measured else 1.0


class DeviceTimer:
    """Marks the parts of one step at a time. Nothing is recorded or queried while a graph is captured."""

    def __init__(self, device: Device, sink: Sink) -> None:
        self._device = device
        self._sink = sink
        self._begin: TimedMoment | None = None
        self._phases: list[Span] = []
        self._blocks: list[Span] = []
        self._waits: list[Span] = []
        self._is_cut = False
        self._newest: TimedMoment | None = None
        """The newest mark, unless it is the start of something, or more was done after it."""
        self._sampling: dict[str, SpanSampling] = {}
        """Of phases, by name."""
        self._waits_sampling: dict[str, SpanSampling] = {}
        """Of waits, by the part of the step in which they lie."""
        self.phase: str | None = ""
        """The phase in which the device is given work now; "" outside of all that are timed; None in one left out, and
        in an evaluation."""
        self._others: list[SpanSampling] = []

    def step_begins(self) -> None:
        """Mark the start of a step; what is left of an earlier one is discarded."""
        for moment in self.take().moments:
            self._device.free(moment)
        for sampling in (*self._sampling.values(), *self._waits_sampling.values(), *self._others):
            sampling.step_begins()
        self._begin = self._newest = self.mark()

    def sampling(self, most: int) -> SpanSampling:
        """A choice among parts of another kind, which follows the steps of this timer."""
        self._others.append(SpanSampling(most))
        return self._others[-1]

    def phase_begins(self, name: str) -> TimedMoment | None:
        """The start of a phase; None in a capture, and where it is one of many and left out."""
        sampling = self._sampling.get(name) or self._sampling.setdefault(name, SpanSampling(PHASES_MAX))
        if not sampling.takes():
            self._newest = None
            return None
        return self.mark()

    def mark(self) -> TimedMoment | None:
        """The start of a part; None in a capture."""
        if self._device.captures():
            return None
        newest, self._newest = self._newest, None
        idle = newest is not None and newest.moment.query()
        return TimedMoment(self._device.now(), self._device.host_s(), idle)

    def phase_ends(self, name: str, begin: TimedMoment, chosen_as: str = "") -> None:
        """A phase ends that began at this mark; `chosen_as`: the name under which it began, if it was another."""
        self._newest = self._ends(self._phases, name, begin, chosen_as)

    def block_ends(self, name: str, begin: TimedMoment) -> None:
        """The work of a block ends, in this pass."""
        self._ends(self._blocks, name, begin)

    @property
    def waits_seen(self) -> bool:
        """Whether there were waits in collectives in this step, measured or left out."""
        return any(sampling.seen for sampling in self._waits_sampling.values())

    def wait_begins(self, part: str) -> TimedMoment | None:
        """A wait in a collective begins; None in a capture, and where it is one of many and left out.

        Args:
            part: of the step, in which it lies; see `StepSpans.waits`.
        """
        self._newest = None
        sampling = self._waits_sampling.get(part) or self._waits_sampling.setdefault(part, SpanSampling(WAITS_MAX))
        return self.mark() if sampling.takes() else None

    def wait_ends(self, part: str, begin: TimedMoment) -> None:
        """A wait ends that began at this mark."""
        end = self._ends(self._waits, part, begin)
        self._newest = None if part else end

    def _ends(self, spans: list[Span], name: str, begin: TimedMoment, chosen_as: str = "") -> TimedMoment | None:
        if self._device.captures():
            return None
        if len(spans) >= SPANS_MAX:
            self._device.free(begin.moment)
            self._is_cut = True
            self._sink.drop("spans")
            return None
        end = TimedMoment(self._device.now(), self._device.host_s())
        spans.append(Span(name, begin, end, chosen_as))
        return end

    def take(self, **known: Any) -> StepSpans:
        """What was marked in the step, to be read once its end has come; `known`: further fields of `StepSpans`."""
        each = {name: sampling.each for name, sampling in self._sampling.items()}
        waits_each = {part: sampling.each for part, sampling in self._waits_sampling.items()}
        # After a step with many waits, none of a few may have been taken.
        none_taken = any(sampling.seen and not sampling.measured for sampling in self._waits_sampling.values())
        taken = StepSpans(
            self._begin,
            tuple(self._phases),
            tuple(self._blocks),
            is_cut=self._is_cut or none_taken,
            phases_each=each,
            waits=tuple(self._waits),
            waits_each=waits_each,
            **known,
        )
        self._begin, self._newest, self._is_cut = None, None, False
        self._phases, self._blocks, self._waits = [], [], []
        return taken


def _seconds(begin: Moment, end: Moment) -> float:
    return begin.elapsed_time(end) / 1e3
