"""The interface between the SDK and a probe: where a probe writes, and what the SDK calls."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol


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

    def declare(self, fields: Mapping[str, Any]) -> bool:
        """Add to the identity block: `parameters` (names), `replicated`, `slices`, the axes of the topology,
        `optimizers`, `watched`, `device_type`, `device_uuid`. Returns whether one of them is new or has changed.
        """


class Probe(Protocol):
    """A probe as the watch calls it; `rankwatch.torch_probe.TorchProbe` is one."""

    def step_begin(self, step: int, k: int) -> None:
        """A step begins, after its boundary."""

    def step_end(self, step: int, k: int) -> None:
        """The loop's body of this step has ended; values may still be put."""

    def cut_short(self, step: int, k: int) -> None:
        """An exception ends the process within this step: put what was measured and is not finite."""

    def log(self, name: str, value: Any) -> None:
        """Record a tensor, on any device. Must not wait for the device."""

    def after_restore(self) -> int:
        """State was loaded in place: discard the old steps' values and return the parameters' fingerprint.

        Ranks that must be equal return equal numbers. Of a sharded model it is the fingerprint of all slices that any
        other rank holds too; 0 if there are none.
        """

    def close(self) -> None:
        """Remove all hooks."""
