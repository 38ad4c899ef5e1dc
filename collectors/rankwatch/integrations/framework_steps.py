"""Steps and pauses of a framework's loop, which marks their begin and end by calls of its own."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any

from rankwatch.loop import Checkpoint
from rankwatch.notices import say
from rankwatch.watch import Watch


class FrameworkSteps:
    """The steps of a framework's loop, numbered on where the framework begins at 0 again."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.next = 0
        """The number of the running or the next step."""
        self.runs = False
        self.measured = False
        """`watch.torch` measures the model that is trained."""
        self._sums: dict[str, Any] = {}

    def train(self, model: Any, optimizer: Any, scaler: Any, step: int, resumed: Checkpoint | None) -> None:
        """A loop begins.

        Args:
            model: what it trains, wrapped as it is called.
            optimizer: its optimizer, or several.
            scaler: its loss scaler; None without one.
            step: the framework's number of the first step.
            resumed: the checkpoint that was loaded as advised.
        """
        self.abandon()
        if self.next > step:
            self._watch.declare("training began again", f"at the framework's step {step}")
        self._measure(model, optimizer, scaler)
        self.next = resumed.step if resumed is not None else max(self.next, step)
        if resumed is not None:
            self._watch.checkpoint_loaded(resumed)

    def begin(self) -> None:
        """Begin the next step, unless one runs."""
        if not self.runs:
            self.next = self._watch.begin(self.next)  # another number after a rollback
            self.runs = True

    def add(self, name: str, value: Any) -> None:
        """Add to a value of the running step, of which each of its batches brings a part."""
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def end(self, **values: Any) -> None:
        """End the step that runs, if one does, with these values and what was added."""
        values, self._sums = {**self._sums, **values}, {}
        if self.runs:
            self._watch.log(**values)
            self._watch.end()
            self.next += 1
            self.runs = False

    def abandon(self) -> None:
        """Discard the running step, if any: there was no batch for it."""
        self._sums = {}
        if self.runs:
            self._watch._loop.abandon()
            self.runs = False

    def _measure(self, model: Any, optimizer: Any, scaler: Any) -> None:
        """Measure this model instead of that of an earlier loop; rank 0 prints a line if this is not possible."""
        loop = self._watch._loop
        if self.measured and loop.probe is not None:
            loop.probe.close()
            loop.probe = None
        try:
            self._watch.torch(model, optimizer, scaler=scaler)
        except (TypeError, ValueError) as error:
            self.measured = False
            if self._watch.identity.rank == 0:
                say(f"gradients and parameters are not watched: {error}")
        else:
            self.measured = True


class OpenPause:
    """At most one pause, for frameworks that call back at its begin and at its end."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._pause: AbstractContextManager[None] | None = None
        self._since_s = 0.0

    def open(self, name: str) -> None:
        """A part that is no training begins; one that is still open ends."""
        self.close()
        self._pause = self._watch.pause(name)
        self._since_s = time.monotonic()
        self._pause.__enter__()

    def close(self) -> float:
        """The part ends; returns how long it took in seconds, 0 if none was open."""
        pause, self._pause = self._pause, None
        if pause is None:
            return 0.0
        pause.__exit__(None, None, None)
        return time.monotonic() - self._since_s
