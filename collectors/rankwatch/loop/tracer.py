"""A trace that was ordered: whole steps of this rank are recorded in detail, and summed up in a file.

The order is part of the directive cell, which the loop looks at anyway; a rank without an order to trace pays for two
reads of an attribute in each step. The training thread starts the profiler when a step begins and stops it when the
step ends, in the phase `trace`, so that these steps are not compared with others; nothing is recorded between steps. A
thread makes the summary meanwhile. Whatever fails is the answer, and training goes on.

After each recorded step one is left out: torch crashes if a mark (`record_function`) that one recording has seen begin
ends in the next, and a boundary may lie within a mark, such as the one around an optimizer's step.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, Protocol

from rankwatch import layout
from rankwatch.meter import StepMeter
from rankwatch.recorder import Recorder

STEPS_MAX: Final = 10
"""Most steps of a trace: a step of a large model is some 100,000 events, of about 1 KB each in this process."""
TRIES_PER_STEP_MAX: Final = 2
"""Steps that are begun for each one to record: those with an evaluation or a save in them are not kept."""
RECORDED_S_MAX: Final = 300.0
"""Most seconds that the steps of a trace take together: 3 steps of 100 s."""
PHASE: Final = "trace"
REQUESTS_REMEMBERED: Final = 64
"""Traces that this rank has answered, so that none is made twice; a job has one at a time."""


class Profiler(Protocol):
    """Records steps of this process; `rankwatch.torch_probe.tracing.StepProfiler` is one."""

    ended_by: str
    """Why the running recording has ended by itself; "" if it has not."""

    def start(self) -> None:
        """Record the step that begins; waits for the device.

        Raises:
            ValueError: it cannot be recorded now.
        """

    def stop(self) -> None:
        """The step ends: keep what was recorded of it; waits for the device."""

    def discard(self) -> None:
        """End the recording, if one runs, and forget what it recorded."""

    def summary(self) -> dict[str, Any]:
        """Summarise the recorded steps. Any thread may call it, once."""


class Tracer:
    """Carries out the orders to trace of one rank. For the training thread; no method raises."""

    def __init__(
        self,
        recorder: Recorder,
        meter: StepMeter,
        now: Callable[[], int],
        new_profiler: Callable[[], Profiler] | None = None,
    ) -> None:
        """Nothing is to be traced.

        Args:
            recorder: beside whose file the answers go.
            meter: of the steps.
            now: monotonic nanoseconds.
            new_profiler: makes one, or raises with the reason why there is none; None: torch's.
        """
        self.active = False
        """Whether `step_begins` and `step_ends` have to be called."""
        self._recorder = recorder
        self._meter = meter
        self._now = now
        self._new_profiler = new_profiler or _torch_profiler
        self._answered: deque[str] = deque(maxlen=REQUESTS_REMEMBERED)
        self._request = ""
        self._steps = 0
        self._profiler: Profiler | None = None
        self._writer: threading.Thread | None = None
        self._recording = False
        self._rests = False
        """A recording has ended: the next step that begins is left out."""
        self._thread = 0
        """Which has started the recording."""
        self._tries = 0
        self._kept = 0
        self._kept_s = 0.0
        self._step = self._first_step = -1
        self._begun_ns = 0
        meter.interrupted = self.interrupted

    def order(self, request: str, steps: int) -> None:
        """Trace the next whole steps; "" withdraws the order. The same request again changes nothing."""
        if request == self._request or request in self._answered:
            return
        self._forget()
        if request:
            self._request, self._steps = request, max(1, min(steps, STEPS_MAX))
            self.active = True

    def step_begins(self, step: int) -> None:
        """A step has begun: record it, unless it follows one that was recorded."""
        if self._recording:
            self.interrupted(f"step {step} began")
        if self._rests or not self.active:
            self._rests = False
            return
        self._step = step
        try:
            with self._paused():
                self._profiler = self._profiler or self._new_profiler()
                self._profiler.start()
        except Exception as error:  # noqa: BLE001 - training goes on without the trace
            self._end(_text(error))
            return
        self._tries += 1
        self._recording = True
        self._thread = threading.get_ident()
        self._begun_ns = self._now()

    def step_ends(self) -> None:
        """A step ends, of which nothing is left but the end of its record; after the last one, answer."""
        if not self._recording or self._profiler is None:
            return
        if self._profiler.ended_by:
            self._end(self._profiler.ended_by)
            return
        self._kept_s += (self._now() - self._begun_ns) * 1e-9
        if self._kept_s > RECORDED_S_MAX:
            self._end(f"its steps took more than {RECORDED_S_MAX:.0f} s")
            return
        try:
            with self._paused():
                self._profiler.stop()
        except Exception as error:  # noqa: BLE001 - training goes on without the trace
            self._end(_text(error))
            return
        self._recording, self._rests = False, True
        self._first_step = self._first_step if self._kept else self._step
        self._kept += 1
        if self._kept == self._steps:
            self._end()

    def interrupted(self, why: str) -> None:
        """The step that runs is not a whole one: what was recorded of it is not kept, and another one is recorded."""
        if not self._recording or threading.get_ident() != self._thread:
            return  # only the thread that has started a recording can end it
        if self._tries < self._steps * TRIES_PER_STEP_MAX:
            self._discard()
        else:
            self._end(f"{why} within step {self._step}")

    def leave(self, why: str) -> None:
        """The loop is left, or a step by an exception: a trace that has begun ends with the steps that it has."""
        if self._profiler is not None:
            self._end(why)

    def fail(self, why: str) -> None:
        """End a trace that was ordered, without its steps."""
        if self.active:
            self._kept = 0
            self._end(why)

    def _end(self, why: str = "") -> None:
        """Answer with the steps that were kept, and why there are no more."""
        self._discard()
        answer: dict[str, Any] = {"request": self._request}
        if why and self._kept:
            why = f"{why}; {self._kept} of {self._steps} steps were recorded"
        if why:
            answer["error"] = why[: layout.DETAIL_CHARACTERS_MAX]
        summary = None
        if self._kept and self._profiler is not None:
            answer["step"], summary = self._first_step, self._profiler.summary
        self._answered.append(self._request)
        self._write(answer, summary)
        self._forget()

    def _forget(self) -> None:
        """The order is answered or withdrawn."""
        self._discard()
        self._request, self.active, self._profiler = "", False, None
        self._tries = self._kept = 0
        self._kept_s = 0.0

    def _discard(self) -> None:
        """End the recording that runs, if any."""
        if not self._recording or self._profiler is None:
            return
        self._recording, self._rests = False, True
        try:
            with self._paused():
                self._profiler.discard()
        except Exception:  # noqa: BLE001 - training goes on without the trace
            self._recorder.drop("errors")

    def _write(self, answer: dict[str, Any], summary: Callable[[], dict[str, Any]] | None) -> None:
        """Write the answer, in a thread of its own: the summary of a large trace takes seconds."""
        if self._recorder.path is None:
            return
        path = layout.trace_path(self._recorder.path)
        try:
            args = (path, answer, summary, self._writer)
            writer = threading.Thread(target=_write, args=args, name="rankwatch trace", daemon=True)
            writer.start()
            self._writer = writer
        except RuntimeError:  # no thread can be started
            self._recorder.drop("errors")

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Outside of the step's work, in a phase that keeps the step from being compared with others."""
        was_outside = self._meter.is_outside
        with self._meter.pause(PHASE):
            self._meter.outside()
            try:
                yield
            finally:
                if not was_outside:
                    self._meter.inside()


def _torch_profiler() -> Profiler:
    if "torch" not in sys.modules:
        raise ValueError("this process has not loaded torch")
    from rankwatch.torch_probe.tracing import StepProfiler  # noqa: PLC0415 - only when a trace was ordered

    return StepProfiler()


def _write(
    path: str, answer: dict[str, Any], summary: Callable[[], dict[str, Any]] | None, before: threading.Thread | None
) -> None:
    """Write the answer, after that of the request before, so that a reader finds a whole one or none."""
    if before is not None:
        before.join()
    try:
        if summary is not None:
            answer |= summary()
    except Exception as error:  # noqa: BLE001 - the answer carries it
        answer["error"] = _text(error)
    text = json.dumps(answer)
    if len(text) > layout.TRACE_BYTES_MAX:
        text = json.dumps({"request": answer["request"], "error": f"the summary has {len(text)} bytes"})
    unfinished = path + layout.UNFINISHED_SUFFIX
    try:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w") as file:
            file.write(text)
        os.replace(unfinished, path)
    except OSError:  # a full disk: the service says that there was no answer
        with suppress(OSError):
            os.unlink(unfinished)


def _text(error: Exception) -> str:
    """The error in at most as many characters as an answer may have."""
    text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return text[: layout.DETAIL_CHARACTERS_MAX]
