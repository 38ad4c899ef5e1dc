"""The step that is being recorded: its values, phases, busy and waiting time; and the interface to the torch probe.

This is the hot path of the training thread. A boundary reads the wall clock and the CPU clock once, for the step that
ends and the one that begins; a phase mark reads the wall clock only. The CPU clock is read again only when busy time
ends or begins: around data_wait and collective phases, and around the waits that the probe reports.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final, Protocol

from rankwatch import layout
from rankwatch.layout import NO_PHASE, PHASE, PHASE_ENTERED
from rankwatch.recorder import Recorder

IDLE_PHASES: Final = {"data_wait": False, "collective": True}
"""Phases that are not busy time; True: the rank waits for other ranks."""
KIND_OF_PHASE: Final = {"eval": 1, "checkpoint_save": 2}
"""A step that has one of these phases is of that kind (`layout.KINDS`) and is not compared with train steps."""

SAME_EDGE_NS: Final = 5_000
"""Changes of busy time closer together than this share one reading of the CPU clock, a system call of 0.3 us. data_wait
begins right after the boundary, and 5 us are a thousandth of a short step."""
EXACT_METRICS: Final = frozenset({"fingerprint", "nonfinite", "nonfinite_first"})
"""Metrics whose values are always 64-bit integers."""
_RESERVED: Final = frozenset(
    {"step", "rank", "time_unix_ns", "relative_step", "kind", "step_time_s", "busy_s", "busy_cpu_s", "wait_s"}
)


class Sink(Protocol):
    """Where a probe writes. For the training thread; no method raises, and what has no room is counted.

    Times are monotonic nanoseconds (`time.monotonic_ns`).
    """

    def metric(self, name: str, *, exact: bool = False) -> int:
        """Index of a metric in the file's name table, for `put` and `late`; -1 if there is no room."""

    def put(self, index: int, value: float) -> None:
        """Set a value of the current step; a later one replaces it. NaN and Inf are values."""

    def put_exact(self, name: str, number: int) -> None:
        """Set a 64-bit signed integer of the current step: fingerprint, nonfinite, nonfinite_first."""

    def late(self, step: int, k: int, values: Mapping[int, float], exact: Mapping[str, int] | None = None) -> None:
        """Record values of a step that has ended; `step` and `k` are those of its `step_begin`."""

    def busy_off(self, now_ns: int, waiting: bool = True) -> None:
        """Busy time ends here; `waiting`: the rank waits for others, so it counts as wait time. May nest.

        Call `busy_off` and `busy_on` from the training thread, whose CPU time they read.
        """

    def busy_on(self, now_ns: int) -> None:
        """Busy time resumes. The end of a step discards an open `busy_off`."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """The context manager of a phase of the current step; a phase nested in itself counts once."""

    def collective(self) -> None:
        """One more collective was entered; the progress block shows it at once."""

    def outside(self) -> None:
        """The step's work is done: what the loop does until the next step is no part of it."""

    def inside(self) -> None:
        """The step's work goes on after all: takes back `outside`."""

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Record a small event; `kind` is one of `rankwatch.wire.EVENT_KINDS`."""

    def drop(self, reason: str, count: int = 1) -> None:
        """Count values that could not be recorded, for instance reason `late_values`."""

    def declare(self, fields: Mapping[str, Any]) -> None:
        """Add to the identity block: `parameters` (names), `replicated`, `optimizers`, `watched`, `device_uuid`."""


class Probe(Protocol):
    """A probe as the watch calls it; `rankwatch.torch_probe.TorchProbe` is one."""

    def step_begin(self, step: int, k: int) -> None:
        """A step begins, after its boundary."""

    def step_end(self, step: int, k: int) -> None:
        """The loop's body of this step has ended; values may still be put."""

    def log(self, name: str, value: Any) -> None:
        """Record a tensor, on any device. Must not wait for the device."""

    def after_restore(self) -> int:
        """State was loaded in place: discard the old steps' values and return the parameters' fingerprint.

        Ranks that must be equal return equal numbers; 0 if parameters are sharded or unknown.
        """

    def close(self) -> None:
        """Remove all hooks."""


class PhaseTimer:
    """One named part of the step, as a context manager that is created once and reused."""

    __slots__ = ("index", "kind", "meter", "now", "ns", "outer", "since", "waiting", "words")

    def __init__(self, meter: StepMeter, name: str, index: int) -> None:
        self.meter = meter
        self.now = meter.now
        self.words = meter.words
        self.index = index
        self.kind = KIND_OF_PHASE.get(name, 0)
        self.waiting = IDLE_PHASES.get(name)
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

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        now = self.now()
        meter = self.meter
        words = self.words
        if not self.ns:
            meter.touched.append(self)
        self.ns += now - self.since
        self.since = 0
        outer = meter.inner = self.outer
        if outer is None:
            words[PHASE_ENTERED] = now
            words[PHASE] = NO_PHASE
        else:
            words[PHASE_ENTERED] = outer.since
            words[PHASE] = outer.index
        if self.waiting is not None:
            meter.busy_on(now)


class NoPhase:
    """Used for a phase that does not fit into the name table, or that is already open."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        pass


NOTHING: Final = NoPhase()


def _this_threads_clock() -> Callable[[], int]:
    """A clock of the calling thread's CPU time that any thread can read: autograd calls hooks from its own threads."""
    return partial(time.clock_gettime_ns, time.pthread_getcpuclockid(threading.get_ident()))


def _computes_with_several_threads() -> bool:
    """Whether torch is loaded and computes with several threads, so that one thread's CPU time says little."""
    torch = sys.modules.get("torch")
    return torch is not None and hasattr(torch, "get_num_threads") and torch.get_num_threads() > 1


class StepMeter:
    """Measures one step at a time and writes its entry at its end. Implements `Sink`."""

    def __init__(
        self,
        recorder: Recorder,
        *,
        now: Callable[[], int] = time.monotonic_ns,
        cpu: Callable[[], int] | None = None,
    ) -> None:
        """Measure the calling thread, which must be the training thread.

        Args:
            recorder: where entries go.
            now: monotonic nanoseconds.
            cpu: CPU nanoseconds; if None, see `choose_cpu_clock`.
        """
        self.recorder = recorder
        self.now = now
        self._thread_clock = cpu or _this_threads_clock()
        self._process_clock = cpu or time.process_time_ns
        self.cpu = self._thread_clock
        self.k = 0
        self.step = -1
        self.inner: PhaseTimer | None = None
        self.touched: list[PhaseTimer] = []
        self._laid_out: list[PhaseTimer] = []
        self._kind = 0
        self.phases: dict[str, PhaseTimer] = {}
        self.mask = 0
        self._relative_step = 0
        self._begin_ns = 0
        self._begin_cpu_ns = 0
        self._read_ns = 0
        self._read_cpu_ns = 0
        self._off_depth = 0
        self._off_waiting = False
        self._off_ns = 0
        self._off_cpu_ns = 0
        self._idle_ns = 0
        self._idle_cpu_ns = 0
        self._wait_ns = 0
        self._floats = recorder.floats
        recorder.on_switch_off.append(self._take_words)
        self._take_words()

    def _take_words(self) -> None:
        self.words = self.recorder.words
        for phase in self.phases.values():
            phase.words = self.words

    # ---- the step ----------------------------------------------------------------------------------------------------

    def choose_cpu_clock(self) -> None:
        """Use the training thread's CPU clock, or the process's if torch uses several threads. Only between steps."""
        self.cpu = self._process_clock if _computes_with_several_threads() else self._thread_clock

    def begin(self, step: int, now_ns: int, cpu_ns: int) -> None:
        """Begin a step at this wall and CPU time."""
        if self.mask:
            self.flush()
        self.step = step
        self._begin_ns = self._read_ns = now_ns
        self._begin_cpu_ns = self._read_cpu_ns = cpu_ns
        self._idle_ns = self._idle_cpu_ns = self._wait_ns = 0
        self._off_depth = 0
        if self.touched:  # phases marked between two steps belong to neither
            for phase in self.touched:
                phase.ns = 0
            self.touched.clear()
        self._relative_step += 1
        words = self.words
        words[layout.OUTSIDE] = 0
        words[layout.STEP_ENTERED] = now_ns
        words[layout.POSITION] = self.k << 48 | step + 1

    def end(self, now_ns: int, cpu_ns: int) -> None:
        """End the step at this wall and CPU time, and write its entry."""
        words = self.words
        if not words[layout.OUTSIDE]:
            words[layout.OUTSIDE] = now_ns
        touched = self.touched
        if touched != self._laid_out:
            self._lay_out(touched)
        phases_ns = []
        for phase in touched:
            phases_ns.append(phase.ns)
            phase.ns = 0
        touched.clear()
        step_ns = now_ns - self._begin_ns
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
            phases_ns=phases_ns,
            mask=self.mask,
        )
        self.mask = 0

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

    def _lay_out(self, touched: list[PhaseTimer]) -> None:
        """Store which phases the step had; called only when they differ from the last step's."""
        extra = touched[layout.PHASES_PER_STEP_MAX :]
        for phase in extra:
            phase.ns = 0
        if extra:
            self.recorder.drop("phases", len(extra))
            del touched[layout.PHASES_PER_STEP_MAX :]
        self._laid_out = touched.copy()
        self._kind = max((phase.kind for phase in touched), default=0)
        self.recorder.phase_index[: len(touched)] = bytes(phase.index for phase in touched)

    def go_back(self, step: int, k: int) -> None:
        """After a rollback: the next step is `step`, in attempt `k` of this launch."""
        self.mask = 0
        self.k = k
        self.step = step - 1
        self.words[layout.POSITION] = k << 48 | step

    def phase(self, name: str) -> PhaseTimer | NoPhase:
        """The context manager of a phase. A phase nested in itself counts once."""
        phase = self.phases.get(name) or self._new_phase(name)
        return NOTHING if phase is None or phase.since else phase

    def _new_phase(self, name: str) -> PhaseTimer | None:
        index = self.recorder.phase(name)
        if index < 0:
            return None
        phase = PhaseTimer(self, name, index)
        self.phases[name] = phase
        return phase

    # ---- the sink ----------------------------------------------------------------------------------------------------

    def metric(self, name: str, *, exact: bool = False) -> int:
        """See `Sink.metric`. Names of the step record's own columns are refused."""
        if name in _RESERVED or name.startswith("phase."):
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
            self._off_cpu_ns = self._cpu_at(now_ns)

    def busy_on(self, now_ns: int) -> None:
        """See `Sink.busy_on`."""
        self._off_depth -= 1
        if self._off_depth == 0:  # below 0: the matching busy_off was in an earlier step
            off_ns = now_ns - self._off_ns
            self._idle_ns += off_ns
            self._idle_cpu_ns += self._cpu_at(now_ns) - self._off_cpu_ns
            if self._off_waiting:
                self._wait_ns += off_ns

    def _cpu_at(self, now_ns: int) -> int:
        if now_ns - self._read_ns > SAME_EDGE_NS:
            self._read_ns = now_ns
            self._read_cpu_ns = self.cpu()
        return self._read_cpu_ns

    def collective(self) -> None:
        """See `Sink.collective`."""
        self.words[layout.COLLECTIVES] += 1

    def outside(self) -> None:
        """See `Sink.outside`."""
        self.words[layout.OUTSIDE] = self.now()

    def inside(self) -> None:
        """See `Sink.inside`."""
        self.words[layout.OUTSIDE] = 0

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        """See `Sink.note`."""
        self.recorder.note(kind, fields, self.step, self.k, self.now())

    def drop(self, reason: str, count: int = 1) -> None:
        """See `Sink.drop`."""
        self.recorder.drop(reason, count)

    def declare(self, fields: Mapping[str, Any]) -> None:
        """See `Sink.declare`."""
        self.recorder.declare(fields)
