"""Finds out what ends a loop or the process, as far as Python shows it without signal handlers.

An uncaught exception passes through `sys.excepthook`, and one that leaves a `with watch.step()` through its `__exit__`.
SystemExit in a `for step in watch.steps()` passes through neither: Python closes the generator while the exception
propagates, and the exception is searched for then.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final

from rankwatch import layout
from rankwatch.faults import Faults
from rankwatch.meter import StepMeter
from rankwatch.recorder import Recorder

INTERRUPTED: Final = "KeyboardInterrupt"
ENDS_PROCESS: Final = ("SystemExit", INTERRUPTED)
"""Exceptions that are raised to end a process; any other may be caught outside the loop and only leave it."""
_WHERE_CHARACTERS_MAX: Final = 160
_LIBRARIES: Final = ("<", os.path.dirname(os.__file__), os.path.dirname(layout.__file__))
"""Beginnings of the paths of code that is not the script's: what has no file, Python, and this package."""


def described(error: BaseException, trace: TracebackType | None) -> dict[str, Any]:
    """Type, message, place and, as far as it follows from these, exit code."""
    fields: dict[str, Any] = {"type": type(error).__name__, "message": _message(error), "where": position(trace)}
    if not isinstance(error, KeyboardInterrupt):
        fields["code"] = _code(error) if isinstance(error, SystemExit) else 1
    # An exception raised while an interruption is handled is a consequence of it: `except KeyboardInterrupt:
    # sys.exit(1)`, or a clean-up that finds the peers gone.
    if fields["type"] != INTERRUPTED and _was_interrupted(error):
        fields |= {"type": INTERRUPTED, "message": f"then {fields['type']}: {fields['message']}"}
    return fields


def _message(error: BaseException) -> str:
    """Its text; of an error in a worker of a data loader, which has the worker's traceback in it, the cause first."""
    text = str(error)
    caught, original, trace = text.partition("\nOriginal Traceback")
    if not original or not caught.startswith("Caught "):
        return text
    last = trace.strip().rpartition("\n")[2]
    return f"{last.partition(': ')[2] or last} ({caught.rstrip('.')})"


def position(trace: TracebackType | None) -> str:
    """The last place in the program's own code, and the place in a library that raised, if any; "" if unknown."""
    positions: list[tuple[str, int, str]] = []
    while trace is not None:
        code = trace.tb_frame.f_code
        positions.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    if not positions:
        return ""
    own = next((one for one in reversed(positions) if not _is_library(one[0])), positions[-1])
    text = _written(*own)
    return text if own == positions[-1] else f"{text}, in {_written(*positions[-1])}"[:_WHERE_CHARACTERS_MAX]


def breaking(frame: FrameType | None) -> dict[str, Any]:
    """What leaves a loop whose generator is being closed.

    Args:
        frame: the frame of the loop.

    Returns:
        `described` of the propagating exception; without one, the line of the loop alone, as `where`.
    """
    where = _written(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) if frame is not None else ""
    error = _on_its_way(frame)
    if error is None:
        return {"where": where}
    found = described(error, error.__traceback__)
    return found | {"where": found["where"] or where}


def _on_its_way(frame: FrameType | None) -> BaseException | None:
    """The exception that unwinds this frame.

    Python does not expose it to code that runs meanwhile, but it is the newest exception object of the process. Up to
    Python 3.11 an exception that C code raises (`sys.exit(3)`) may not be an object yet; then the result is None.
    """
    holders = set()
    while frame is not None:
        holders.add(frame)
        frame = frame.f_back
    objects = gc.get_objects(generation=0)
    for one in reversed(objects):
        if issubclass(type(one), BaseException) and not issubclass(type(one), GeneratorExit | StopIteration):
            trace = one.__traceback__
            if (trace is None and not _is_kept(one, objects)) or (trace is not None and trace.tb_frame in holders):
                return one  # type: ignore[no-any-return]
    return None


def _is_kept(error: BaseException, objects: list[Any]) -> bool:
    """Whether an object of the program holds this exception: it was caught, or never raised. Frames do not count."""
    return any(one is not objects and not isinstance(one, FrameType) for one in gc.get_referrers(error))


def _was_interrupted(error: BaseException) -> bool:
    seen = 0
    context = error.__cause__ or error.__context__
    while context is not None and seen < 16:
        if isinstance(context, KeyboardInterrupt):
            return True
        context, seen = context.__cause__ or context.__context__, seen + 1
    return False


def _code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def _is_library(path: str) -> bool:
    return path.startswith(_LIBRARIES) or "site-packages" in path


def _written(path: str, line: int, name: str) -> str:
    """`train.py:40 in step`, with the shortest path relative to `sys.path` or the working directory."""
    for folder in sys.path:
        if folder and path.startswith(folder + os.sep):
            path = min(path, path[len(folder) + 1 :], key=len)
    with contextlib.suppress(OSError):  # the working directory is gone
        path = min(path, os.path.relpath(path), key=len)
    return f"{path}:{line} in {name}"[-_WHERE_CHARACTERS_MAX:]


class LoopExit:
    """Knows whether the loop runs, and why it does not. Its methods catch all errors of the SDK."""

    def __init__(
        self,
        recorder: Recorder,
        meter: StepMeter,
        faults: Faults,
        report_lost: Callable[[], None],
        cut_short: Callable[[], None],
        left: Callable[[str], None],
    ) -> None:
        """The loop has not begun.

        Args:
            recorder: whose progress block shows whether the loop runs.
            meter: records events.
            faults: counts errors of the SDK.
            report_lost: records what was dropped, before the loop's last event.
            cut_short: records what was not finite in the running step, before an exception that ends the process.
            left: called with the reason when the loop is left, or a step by an exception; does not raise.
        """
        self._recorder = recorder
        self._meter = meter
        self._faults = faults
        self._report_lost = report_lost
        self._cut_short = cut_short
        self._left = left
        self._reason = ""
        self._broken_by: dict[str, Any] = {}
        self.runs = False
        """The loop has begun and is not left."""
        self.grace_s: float | None = None
        """The launcher's grace in seconds; recorded with the exception that ends the process."""

    def enter(self) -> None:
        """The loop begins."""
        self.record()
        self._reason = ""
        self._broken_by = {}
        self.runs = True
        self._recorder.words[layout.STATE] = layout.RUNNING

    def leave(self, reason: str) -> None:
        """End the loop; `reason` is end, break or stop. No further orders are accepted.

        A break may also be an exception that ends the process, which is known only in `process_ends` or `crashed`.
        """
        if not self._reason:
            self._reason = reason
            self.runs = False
            self._recorder.words[layout.STATE] = layout.LEFT
            self._left("the loop ended")
            if reason == "break":
                self._note_broken_off()
            else:
                self.record()

    def broken_off(self, holder: FrameType | None) -> None:
        """The loop in this frame is left before its end: remember why, in case that ends the process."""
        if self._reason:
            return
        with self._faults:
            self._broken_by = breaking(holder)
        self.leave("break")

    def cut_short(self, error: BaseException, trace: TracebackType | None) -> None:
        """An exception leaves a step, which is then not recorded: remember it, in case it ends the process."""
        with self._faults:
            self._broken_by = described(error, trace)
            if self._broken_by["type"] in ENDS_PROCESS:
                self._note_broken_off()
        self._left("an exception left a step")

    def process_ends(self, in_step: bool) -> None:
        """Python shuts down, perhaps within a step: note the exception that ended the loop, if no hook has noted it."""
        by, broken = self._broken_by, in_step and not self._reason
        broken |= self._reason == "break" and by.get("type") in ENDS_PROCESS
        if broken and by.get("type") and by.get("code") != 0:
            self._note_end(by)

    def crashed(self, error: BaseException, trace: TracebackType | None) -> None:
        """An exception ends the process. If it ended the loop as well, the loop does not count as left."""
        try:
            self._note_end(described(error, trace))
        except KeyboardInterrupt:
            # Ctrl-C arrives twice, from the terminal and from the launcher; the second must not lose the note.
            self._note_end(described(error, trace))
        except Exception as ours:  # noqa: BLE001 - the boundary
            self._faults.caught(ours)

    def record(self) -> None:
        """Record once that the loop was left."""
        if self._reason and self._reason != "told":
            with self._faults:
                self._report_lost()
                by = self._broken_by if self._reason == "break" else {}
                self._meter.note("rank_left", {"reason": self._reason, **by})
            self._reason = "told"

    def _note_broken_off(self) -> None:
        # At once: what the script holds is freed before Python reports its end, and a peer that loses it meanwhile may
        # make the launcher end this process.
        with self._faults:
            self._meter.note("loop_broken_off", self._broken_by)

    def _note_end(self, by: dict[str, Any]) -> None:
        with self._faults:
            self._cut_short()
        if self._reason == "break":
            self._recorder.words[layout.STATE] = layout.RUNNING
        self._reason = "told"
        left = self._recorder.words[layout.STATE] == layout.LEFT
        grace = {} if self.grace_s is None else {"grace_s": self.grace_s}
        self._meter.note("exception", {**by, "left": left, **grace})
