"""The two forms of a training loop: `for step in watch.steps(...)` and `with watch.step() as step`.

Each iteration is one step between two boundaries of the `Loop`. The forms differ in how they see the loop's end: a
generator does not see the exception that closes it, a `with` does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import TracebackType

from rankwatch.directive import STOP
from rankwatch.loop import Loop


def steps(loop: Loop, max_steps: int, start: int) -> Iterator[int]:
    """Yield the steps from `start` to `max_steps` - 1; a rollback at a boundary moves back, a stop ends them."""
    loop.allow("stop")
    loop.enter()
    step = start
    adjoining = False
    reason = "end"
    try:
        while step < max_steps:
            step = loop.begin(step, adjoining=adjoining)
            if step == STOP:
                reason = "stop"
                break
            yield step
            loop.end()
            adjoining = True
            step += 1
    except GeneratorExit:
        reason = "break"
        loop.broken_off(sys._getframe().f_back)
        raise
    except BaseException as error:  # Ctrl-C, for instance, while this generator runs between two steps
        reason = "break"
        loop.cut_short(error, error.__traceback__)
        raise
    finally:
        loop.leave(reason)


class SingleStep:
    """One step of a loop that cannot use `steps`."""

    def __init__(self, loop: Loop, step: int | None) -> None:
        self._loop = loop
        self._step = loop.next_step if step is None else step
        if step is not None and loop.next_step:
            loop.halve("the script numbers its steps itself")

    def __enter__(self) -> int:
        return self._loop.begin(self._step)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._loop.end()
        else:
            self._loop.cut_short(error, trace)
