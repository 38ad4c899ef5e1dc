"""The step that is being recorded: its values, phases, busy and waiting time.

This is the hot path of the training thread. A boundary reads the wall clock and the CPU clock once, for the step that
ends and the one that begins; a phase mark reads the wall clock only. The CPU clock is read again only when busy time
ends or begins: around data_wait and collective phases, and around the waits that the probe reports.
"""

from __future__ import annotations

import math
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from threading import get_ident
from typing import Any, Final

from rankwatch import layout
from rankwatch.layout import NO_PHASE, OUTSIDE, PHASE, PHASE_ENTERED, POSITION, STEP_ENTERED
from rankwatch.recorder import Recorder

IDLE_PHASES: Final = {"data_wait": False, "collective": True}
"""Phases that are not busy time; True: the rank waits for other ranks."""
KIND_OF_PHASE: Final = {"eval": 1, "checkpoint_save": 2}
"""A step that has one of these phases is of that kind (`layout.KINDS`) and is not compared with train steps."""
FAILURE_OF_PHASE: Final = {"checkpoint_save": "save", "checkpoint_load": "restore"}
"""What has failed when an exception leaves one of these phases, and has succeeded when none does."""
PAUSES: Final = frozenset({*KIND_OF_PHASE, *FAILURE_OF_PHASE})
"""Phases that are no work of a step."""
KIND_OF_PAUSE: Final = 1
"""Kind of a step that has a pause under another name."""
NOT_LAID_OUT: Final = -1
"""In place of the bits of phases: the entry has to be laid out again."""

SAME_EDGE_NS: Final = 20_000
"""Changes of busy time closer together than this share one reading of the CPU clock, a system call that takes 0.3 us
between such calls and 8 us with the cold caches of a real training. data_wait begins right after the boundary, and
20 us are a five-hundredth of a short step."""
READ_FROM_NS: Final = 1_000_000
"""Steps below a millisecond do not read how long they waited for a core: a reading would take a hundredth of them."""
CROWDED_PARTS: Final = 64
"""A reading of the time of waiting for a core takes 1.3 us with warm caches. As long as that time is a smaller part of
the step than one of so many, it is read once a step, and all of it counts as within busy time."""
EXACT_METRICS: Final = frozenset(
    {"fingerprint", "nonfinite", "nonfinite_first", *(f"fingerprint.{number}" for number in range(layout.SLICES_MAX))}
)
"""Metrics whose values are always 64-bit integers."""


class PhaseTimer:
    """One named part of the step, as a context manager that is created once and reused."""

    __slots__ = ("bit", "failure", "index", "kind", "meter", "now", "ns", "outer", "since", "waiting", "words")

    def __init__(self, meter: StepMeter, name: str, index: int) -> None:
        self.meter = meter
        self.now = meter.now
        self.words = meter.words
        self.index = index
        self.bit = 1 << index
        self.kind = KIND_OF_PHASE.get(name, 0)
        self.waiting = IDLE_PHASES.get(name)
        self.failure = FAILURE_OF_PHASE.get(name)
        self.ns = 0
        self.since = 0
        self.outer: PhaseTimer | None = None

    def __enter__(self) -> None:
        words = self.words
        self.since = words[PHASE_ENTERED] = now = self.now()
        words[PHASE] = self.index
        meter = self.meter
        self.outer = meter.inner
        meter.inner = self
        if self.waiting is not None:
            meter.busy_off(now, self.waiting)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        now = self.now()
        meter = self.meter
        words = self.words
        if meter.marked & self.bit:
            self.ns += now - self.since
        else:
            meter.marked |= self.bit
            self.ns = now - self.since
        since, self.since = self.since, 0
        outer = meter.inner = self.outer
        if outer is None:
            words[PHASE_ENTERED] = now
            words[PHASE] = NO_PHASE
        else:
            words[PHASE_ENTERED] = outer.since
            words[PHASE] = outer.index
        if self.waiting is not None:
            meter.busy_on(now)
        if self.failure is None:
            return
        if error is None:
            meter.succeeded(self.failure, since)
        else:
            meter.failed(self.failure, error)


class PausePhase(PhaseTimer):
    """A phase that is no work of the step that it is in."""

    __slots__ = ("name",)

    def __init__(self, meter: StepMeter, name: str, index: int) -> None:
        super().__init__(meter, name, index)
        self.name = name

    def __enter__(self) -> None:
        self.meter.interrupted(f"{self.name} began")
        super().__enter__()


class NoPhase:
    """Used for a phase that does not fit into the name table, or that is already open."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        pass


NOTHING: Final = NoPhase()


def _this_threads_clock() -> Callable[[], int]:
    """A clock of the calling thread's CPU time that any thread can read: autograd calls hooks from its own threads.

    With cold caches a thread reads its own clock in half the time of a clock that is named.
    """
    thread = get_ident()
    by_name = partial(time.clock_gettime_ns, time.pthread_getcpuclockid(thread))
    own = time.thread_time_ns
    return lambda: own() if get_ident() == thread else by_name()


def _queue_clock() -> Callable[[], float] | None:
    """A clock of the time in which the calling thread wanted a core and had none; None if the kernel keeps none.

    NaN once it cannot be read any more: a script may close files that are not its own.
    """
    try:
        opened = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    except OSError:
        return None

    def read() -> float:
        try:
            return int(os.pread(opened, 64, 0).split()[1])
        except (OSError, ValueError, IndexError):
            return math.nan

    weakref.finalize(read, os.close, opened).atexit = False
    return read


def _computes_with_several_threads() -> bool:
    """Whether torch is loaded and computes with several threads, so that one thread's CPU time means little."""
    torch = sys.modules.get("torch")
    return torch is not None and hasattr(torch, "get_num_threads") and torch.get_num_threads() > 1


def _computes_on_a_device() -> bool:
    """Whether torch is loaded and uses a GPU: then what its host waits for judges nobody."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda is not None and cuda.is_initialized()


class StepMeter:
    """Measures one step at a time and writes its entry at its end. Implements `rankwatch.sink.Sink`."""

    def __init__(
        self,
        recorder: Recorder,
        *,
        now: Callable[[], int] = time.monotonic_ns,
        cpu: Callable[[], int] | None = None,
        queue: Callable[[], float] | None = None,
    ) -> None:
        """Measure the calling thread, which must be the training thread.

        Args:
            recorder: where entries go.
            now: monotonic nanoseconds.
            cpu: CPU nanoseconds; if None, see `choose_clocks`.
            queue: nanoseconds of waiting for a core, used with `cpu`.
        """
        self.recorder = recorder
        self.now = now
        self._thread_clock = cpu or _this_threads_clock()
        self._process_clock = cpu or time.process_time_ns
        self._own_queue = queue if cpu else _queue_clock()
        self.cpu = self._thread_clock
        self._queue = self._own_queue
        """Waiting of the training thread for a core is what its work waited for only if it works alone."""
        self.failed: Callable[[str, BaseException], None] = lambda _what, _error: None
        """Records the exception with which a save or a restore has failed."""
        self.succeeded: Callable[[str, int], None] = lambda _what, _since_ns: None
        """Records that a save or a restore which began at this time has succeeded."""
        self.interrupted: Callable[[str], None] = lambda _why: None
        """Called when something begins that is no work of a step; does not raise."""
        self.k = 0
        self.step = -1
        self.inner: PhaseTimer | None = None
        self.marked = 0
        """Bits of the phases that the running step has had so far; the time of any other is an earlier step's."""
        self._laid_out = 0
        """The bits of the phases that the entry is laid out for."""
        self._in_entry: list[PhaseTimer] = []
        self._kind = 0
        self.phases: dict[str, PhaseTimer] = {}
        self.mask = 0
        self._relative_step = 0
        self._begin_ns = 0
        self._ended_ns = 0
        self._begin_cpu_ns = 0
        self._read_ns = 0
        self._read_cpu_ns = 0
        self._off_depth = 0
        self._off_waiting = False
        self._off_ns = 0
        self._off_cpu_ns = 0
        self._idle_ns = 0
        self._idle_cpu_ns = 0
        self._begin_queue_ns = 0.0
        self._read_queue_ns = 0.0
        self._off_queue_ns = 0.0
        self._idle_queue_ns = 0.0
        self._is_stale = False
        """The step before was too short to read the time of waiting for a core, so that this one has no beginning."""
        self._is_crowded = False
        """In the step before, the thread waited for a core so long that it matters when in a step it does."""
        self._wait_ns = 0
        self._floats = recorder.floats
        recorder.on_switch_off.append(self._take_words)
        self._take_words()

    def _take_words(self) -> None:
        self.words = self.recorder.words
        for phase in self.phases.values():
            phase.words = self.words

    # ---- the step ----------------------------------------------------------------------------------------------------

    @property
    def begun(self) -> int:
        """How many steps have begun in this process."""
        return self._relative_step

    def choose_clocks(self) -> None:
        """Use the training thread's clocks, or the process's if torch uses several threads. Only between steps."""
        several = _computes_with_several_threads()
        self.cpu = self._process_clock if several else self._thread_clock
        self._queue = None if several or _computes_on_a_device() else self._own_queue
        self._ended_ns = 0  # what was read then was perhaps read of other clocks

    def begin(self, step: int, now_ns: int, cpu_ns: int) -> None:
        """Begin a step at this wall and CPU time."""
        if self.mask:
            self.flush()
        self.step = step
        self._begin_ns = self._read_ns = now_ns
        self._begin_cpu_ns = self._read_cpu_ns = cpu_ns
        if self._queue is not None and now_ns != self._ended_ns and not self._is_stale:
            self._read_queue_ns = self._queue()
        self._begin_queue_ns = self._read_queue_ns
        self._idle_ns = self._idle_cpu_ns = self._wait_ns = 0
        self._idle_queue_ns = 0.0
        self._off_depth = 0
        self.marked = 0  # phases marked between two steps belong to neither
        self._relative_step += 1
        words = self.words
        words[OUTSIDE] = 0
        words[STEP_ENTERED] = now_ns
        words[POSITION] = self.k << 48 | step + 1

    def end(self, now_ns: int, cpu_ns: int) -> None:
        """End the step at this wall and CPU time, and write its entry."""
        words = self.words
        if not words[OUTSIDE]:
            words[OUTSIDE] = now_ns
        if self.marked != self._laid_out:
            self._lay_out(self.marked)
        step_ns = now_ns - self._begin_ns
        self._ended_ns = now_ns
        queued_ns = math.nan
        was_stale, self._is_stale = self._is_stale, step_ns < READ_FROM_NS
        if self._queue is not None and not self._is_stale:
            self._read_queue_ns = self._queue()
            if not was_stale:
                in_step_ns = self._read_queue_ns - self._begin_queue_ns
                queued_ns = in_step_ns - self._idle_queue_ns
                self._is_crowded = in_step_ns * CROWDED_PARTS > step_ns
        self.recorder.write_step(
            step=self.step,
            k=self.k,
            kind=self._kind,
            relative_step=self._relative_step,
            end_ns=now_ns,
            step_ns=step_ns,
            busy_ns=step_ns - self._idle_ns,
            busy_cpu_ns=cpu_ns - self._begin_cpu_ns - self._idle_cpu_ns,
            wait_ns=self._wait_ns,
            phases_ns=[phase.ns for phase in self._in_entry],
            mask=self.mask,
            queued_ns=queued_ns,
        )
        self.mask = 0

    def abandon(self) -> None:
        """The step that has begun is not recorded, nor are its values."""
        self.mask = 0
        self.outside()

    def cut_short(self) -> None:
        """An exception ends the process within the step, which is not recorded: only its values that are not finite."""
        put = [index for index in range(self.mask.bit_length()) if self.mask >> index & 1]
        whole = [index for index in put if not self.recorder.is_exact(index) and math.isfinite(self._floats[index])]
        self.mask &= ~sum(1 << index for index in whole)
        if self.mask:
            self.flush()

    def flush(self) -> None:
        """Write values put since the step ended as late values of that step; drop those before the first step."""
        mask, self.mask = self.mask, 0
        if self.step < 0:
            self.recorder.drop("values_before_steps", mask.bit_count())
            return
        put = [index for index in range(mask.bit_length()) if mask >> index & 1]
        exact = {index: self.recorder.integers[index] for index in put if self.recorder.is_exact(index)}
        values = {index: self._floats[index] for index in put if index not in exact}
        self.recorder.write_values(self.step, self.k, self.now(), values, exact)

    def _lay_out(self, marked: int) -> None:
        """Store which phases the step had; called only when they differ from the last step's."""
        had = [phase for phase in self.phases.values() if marked & phase.bit]
        extra = had[layout.PHASES_PER_STEP_MAX :]
        if extra:
            self.recorder.drop("phases", len(extra))
            del had[layout.PHASES_PER_STEP_MAX :]
        self._laid_out = NOT_LAID_OUT if extra else marked
        self._in_entry = had
        self._kind = max((phase.kind for phase in had), default=0)
        self.recorder.phase_index[: len(had)] = bytes(phase.index for phase in had)

    def go_back(self, step: int, k: int) -> None:
        """After a rollback: the next step is `step`, in attempt `k` of this launch."""
        self.mask = 0
        self.k = k
        self.step = step - 1
        self.words[POSITION] = k << 48 | step

    def phase(self, name: str) -> PhaseTimer | NoPhase:
        """The context manager of a phase. A phase nested in itself counts once."""
        phase = self.phases.get(name) or self._new_phase(name)
        return NOTHING if phase is None or phase.since else phase

    def pause(self, name: str) -> PhaseTimer | NoPhase:
        """The context manager of a phase that is no training: a step that has it is not compared with train steps."""
        phase = self.phase(name)
        if isinstance(phase, PhaseTimer) and not phase.kind:
            phase.kind = KIND_OF_PAUSE
            self._laid_out = NOT_LAID_OUT
        return phase

    def _new_phase(self, name: str) -> PhaseTimer | None:
        index = self.recorder.phase(name)
        if index < 0:
            return None
        phase = (PausePhase if name in PAUSES else PhaseTimer)(self, name, index)
        self.phases[name] = phase
        return phase

    @property
    def is_outside(self) -> bool:
        """Whether the step's work is done, or no step runs."""
        return bool(self.words[OUTSIDE])

    # ---- the sink ----------------------------------------------------------------------------------------------------

    def metric(self, name: str, *, exact: bool = False) -> int:
        """See `Sink.metric`. Names of the step record's own columns are refused."""
        if layout.is_own_column(name):
            self.recorder.drop("metric_names")
            return -1
        return self.recorder.metric(name, exact=exact or name in EXACT_METRICS)

    def put(self, index: int, value: float) -> None:
        """See `Sink.put`."""
        if index >= 0:
            self._floats[index] = value
            self.mask |= 1 << index

    def put_exact(self, name: str, number: int) -> None:
        """See `Sink.put_exact`."""
        index = self.metric(name, exact=True)
        if index >= 0:
            self.recorder.integers[index] = number
            self.mask |= 1 << index

    def late(self, step: int, k: int, values: Mapping[int, float], exact: Mapping[str, int] | None = None) -> None:
        """See `Sink.late`."""
        numbers = {self.metric(name, exact=True): number for name, number in (exact or {}).items()}
        self.recorder.write_values(step, k, self.now(), values, numbers)

    def busy_off(self, now_ns: int, waiting: bool = True) -> None:
        """See `Sink.busy_off`."""
        self._off_depth += 1
        if self._off_depth == 1:
            self._off_waiting = waiting
            self._off_ns = now_ns
            self._read(now_ns)
            self._off_cpu_ns = self._read_cpu_ns
            self._off_queue_ns = self._read_queue_ns

    def busy_on(self, now_ns: int) -> None:
        """See `Sink.busy_on`."""
        self._off_depth -= 1
        if self._off_depth == 0:  # below 0: the matching busy_off was in an earlier step
            off_ns = now_ns - self._off_ns
            self._idle_ns += off_ns
            self._read(now_ns)
            self._idle_cpu_ns += self._read_cpu_ns - self._off_cpu_ns
            self._idle_queue_ns += self._read_queue_ns - self._off_queue_ns
            if self._off_waiting:
                self._wait_ns += off_ns

    def _read(self, now_ns: int) -> None:
        """Read the CPU clock and that of waiting for a core, unless that was just done."""
        if now_ns - self._read_ns > SAME_EDGE_NS:
            self._read_ns = now_ns
            self._read_cpu_ns = self.cpu()
            if self._queue is not None and self._is_crowded:
                self._read_queue_ns = self._queue()

    def collective(self) -> None:
        """See `Sink.collective`."""
        self.words[layout.COLLECTIVES] += 1

    def outside(self) -> None:
        """See `Sink.outside`."""
        self.words[OUTSIDE] = self.now()

    def rest(self) -> None:
        """The step has begun, but its work has not: it is outside since it began."""
        self.words[OUTSIDE] = self.words[STEP_ENTERED]

    def inside(self) -> None:
        """See `Sink.inside`."""
        self.words[OUTSIDE] = 0

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        """See `Sink.note`."""
        self.recorder.note(kind, fields, self.step, self.k, self.now())

    def drop(self, reason: str, count: int = 1) -> None:
        """See `Sink.drop`."""
        self.recorder.drop(reason, count)

    def declare(self, fields: Mapping[str, Any]) -> bool:
        """See `Sink.declare`."""
        return self.recorder.declare(fields)
