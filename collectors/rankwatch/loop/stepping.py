"""The forms of a training loop: `for step in watch.steps(...)`, `for step, batch in watch.over(...)`, and single steps.

Each iteration is one step between two boundaries of the `Loop`. The forms differ in how they see the loop's end: a
generator does not see the exception that closes it, a `with` does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator
from types import TracebackType
from typing import Any, Final

from rankwatch.faults import Faults
from rankwatch.loop.directive import STOP
from rankwatch.loop.loop import Loop
from rankwatch.meter import StepMeter

STEPS_MAX: Final = 1 << 47
"""More steps than a progress block can number; a loop over batches ends with them."""


def steps(loop: Loop, max_steps: int, start: int) -> Iterator[int]:
    """Yield the steps from `start` to `max_steps` - 1; a rollback at a boundary moves back, a stop ends them."""
    loop.allow("stop")
    loop.enter()
    step = loop.number(start)
    end = max_steps + loop.earlier
    adjoining = False
    reason = "end"
    try:
        while step < end:
            step = loop.begin(step, adjoining=adjoining)
            if step == STOP:
                reason = "stop"
                break
            yield step - loop.earlier
            loop.end()
            adjoining = True
            step += 1
    except GeneratorExit:
        loop.exit.broken_off(sys._getframe().f_back)
        raise
    except BaseException as error:  # Ctrl-C, for instance, while this generator runs between two steps
        reason = "break"
        loop.exit.cut_short(error, error.__traceback__)
        raise
    finally:
        loop.exit.leave(reason)


def over(
    loop: Loop, batches: Iterator[Any], data_wait: Callable[[], AbstractContextManager[None]], start: int
) -> Iterator[tuple[int, Any]]:
    """Yield step and batch until there is no further batch.

    Args:
        loop: the rank's loop.
        batches: all batches in order; a rollback moves them back.
        data_wait: returns the context manager of the phase.
        start: number of the first step.
    """
    numbers = steps(loop, STEPS_MAX, start)  # kept here, so that it is closed only after this generator
    try:
        for step in numbers:
            try:
                with data_wait():
                    batch = next(batches)
            except StopIteration:
                loop.abandon()
                loop.exit.leave("end")
                return
            yield step, batch
    except GeneratorExit:
        loop.exit.broken_off(sys._getframe().f_back)
        raise


class SingleStep:
    """One step of a loop that cannot use `steps`."""

    def __init__(self, loop: Loop, step: int | None) -> None:
        self._loop = loop
        self._step = step
        if step is not None and loop.next_step:
            loop.without_memory("the script numbers its steps itself")

    def __enter__(self) -> int:
        loop = self._loop
        if not (loop.exit.runs or loop.stopped):
            loop.enter()
        due = loop.next_step if self._step is None else loop.number(self._step)
        step = loop.begin(due)
        return (due if step == STOP else step) - loop.earlier

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._loop.exit.cut_short(error, trace)
        elif self._loop.in_step:
            self._loop.end()


class TrainingPause(ContextDecorator):
    """A part that is no training: a phase outside of the step's work. May be entered again, also within itself."""

    def __init__(self, loop: Loop, meter: StepMeter, faults: Faults, name: str) -> None:
        self._loop = loop
        self._meter = meter
        self._faults = faults
        self._name = name
        self._open: list[tuple[AbstractContextManager[None], bool]] = []
        """Phases entered, and whether each began outside of the step's work."""

    def __enter__(self) -> None:
        with self._faults:
            self._meter.interrupted(f"{self._name} began")
            phase = self._meter.pause(self._name)
            phase.__enter__()
            leaves_work = self._loop.in_step and not self._meter.is_outside
            self._open.append((phase, leaves_work))
            if leaves_work:
                self._meter.outside()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._faults:
            if self._open:
                phase, left_work = self._open.pop()
                phase.__exit__(kind, error, trace)
                if left_work and self._loop.in_step:
                    self._meter.inside()
