"""A trace that was ordered: the next whole steps of this rank are recorded in detail, and summed up in a file.

The order is part of the directive cell, which the loop looks at anyway; a rank without an order to trace pays for two
reads of an attribute in each step. The training thread starts and stops the profiler at the steps' edges, in the phase
`trace`, so that these steps are not compared with others. A thread makes the summary meanwhile. Whatever fails is the
answer, and training goes on.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

from rankwatch import layout
from rankwatch.meter import StepMeter
from rankwatch.recorder import Recorder

STEPS_MAX: Final = 10
"""Most steps of a trace: a step of a large model is some 100,000 events, of about 1 KB each in this process."""
PHASE: Final = "trace"
REQUESTS_REMEMBERED: Final = 64
"""Traces that this rank has answered, so that none is made twice; a job has one at a time."""


class RunningProfiler(Protocol):
    """A profiler that records this process; `rankwatch.torch_probe.trace.profiler.StepProfiler` is one."""

    ended_by: str
    """Why it has ended already; "" while it records."""

    def stop(self) -> Callable[[], dict[str, Any]]:
        """End the recording; waits for the device. Returns what makes the summary, which any thread may call."""

    def close(self) -> None:
        """End the recording, if it still runs, and forget it."""


class Tracer:
    """Carries out the orders to trace of one rank. For the training thread; no method raises."""

    def __init__(
        self,
        recorder: Recorder,
        meter: StepMeter,
        now: Callable[[], int],
        start_profiler: Callable[[], RunningProfiler] | None = None,
    ) -> None:
        """Nothing is to be traced.

        Args:
            recorder: beside whose file the answers go.
            meter: of the steps.
            now: monotonic nanoseconds.
            start_profiler: starts it, or raises with the reason why it cannot be; None: torch's.
        """
        self.active = False
        """Whether `step_begins` and `step_ends` have to be called."""
        self._recorder = recorder
        self._meter = meter
        self._now = now
        self._start_profiler = start_profiler or _start_torch_profiler
        self._answered: deque[str] = deque(maxlen=REQUESTS_REMEMBERED)
        self._request = ""
        self._steps = 0
        self._profiler: RunningProfiler | None = None
        self._first_step = -1
        self._begun_ns = 0
        self._times_s: list[float] = []

    def order(self, request: str, steps: int) -> None:
        """Trace the next whole steps; "" withdraws the order. The same request again changes nothing."""
        if request == self._request or request in self._answered:
            return
        self._end()
        if request:
            self._request, self._steps = request, max(1, min(steps, STEPS_MAX))
            self.active = True

    def step_begins(self, step: int) -> None:
        """A step has begun: start the profiler, unless it runs."""
        try:
            with self._paused():
                if self._profiler is None:
                    self._profiler = self._start_profiler()
                    self._first_step = step
                    self._times_s = []
        except Exception as error:  # noqa: BLE001 - training goes on without the trace
            self._fail(_text(error))
        self._begun_ns = self._now()

    def step_ends(self) -> None:
        """A step ends, of which nothing is left but the end of its record: after the last one, stop the profiler."""
        if self._profiler is None:
            return  # ordered within the step
        if self._profiler.ended_by:
            self._fail(self._profiler.ended_by)
            return
        try:
            last = len(self._times_s) + 1 == self._steps
            with self._paused():
                summary = self._profiler.stop() if last else None
            self._times_s.append((self._now() - self._begun_ns) * 1e-9)
            if summary is not None:
                told = {"step": self._first_step, "step_times_s": self._times_s}
                self._sum_up(self._request, told, summary)
                self._end()
        except Exception as error:  # noqa: BLE001 - training goes on without the trace
            self._fail(_text(error))

    def leave(self) -> None:
        """The loop is left: a trace that has begun ends."""
        if self._profiler is not None:
            self._fail(f"the loop ended after {len(self._times_s)} of {self._steps} steps")

    def _fail(self, why: str) -> None:
        self._sum_up(self._request, {"error": why})
        self._end()

    def _end(self) -> None:
        """Forget the order, which is answered or withdrawn."""
        if self._request:
            self._answered.append(self._request)
        profiler, self._profiler = self._profiler, None
        self._request, self.active = "", False
        if profiler is not None:
            try:
                profiler.close()
            except Exception:  # noqa: BLE001 - the answer is on its way
                self._recorder.drop("errors")

    def _sum_up(self, request: str, told: dict[str, Any], summary: Callable[[], dict[str, Any]] | None = None) -> None:
        """Write the answer, in a thread of its own: the summary of a large trace takes seconds."""
        if self._recorder.path is None:
            return
        path = layout.trace_path(self._recorder.path)
        answer = {"request": request, **told}
        try:
            threading.Thread(target=_write, args=(path, answer, summary), name="rankwatch trace", daemon=True).start()
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


def _start_torch_profiler() -> RunningProfiler:
    if "torch" not in sys.modules:
        raise ValueError("this process has not loaded torch")
    from rankwatch.torch_probe.trace.profiler import StepProfiler  # noqa: PLC0415 - only when a trace was ordered

    return StepProfiler()


def _write(path: str, answer: dict[str, Any], summary: Callable[[], dict[str, Any]] | None) -> None:
    """Write the answer so that a reader finds a whole one or none."""
    try:
        if summary is not None:
            answer |= summary()
    except Exception as error:  # noqa: BLE001 - the answer carries it
        answer["error"] = _text(error)
    text = json.dumps(answer)
    if len(text) > layout.TRACE_BYTES_MAX:
        text = json.dumps({"request": answer["request"], "error": f"the summary has {len(text)} bytes"})
    try:
        descriptor = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w") as file:
            file.write(text)
        os.replace(f"{path}.new", path)
    except OSError:
        return  # a full disk: the service says that there was no answer


def _text(error: Exception) -> str:
    """The error in at most as many characters as an answer may have."""
    text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return text[: layout.DETAIL_CHARACTERS_MAX]
