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
from types import FrameType, TracebackType
from typing import Any, Final

INTERRUPTED: Final = "KeyboardInterrupt"
ENDS_PROCESS: Final = ("SystemExit", INTERRUPTED)
"""Exceptions that are raised to end a process; any other may be caught outside the loop and only leave it."""
_WHERE_CHARACTERS_MAX: Final = 160
_STANDARD_LIBRARY: Final = os.path.dirname(os.__file__)


def described(error: BaseException, trace: TracebackType | None) -> dict[str, Any]:
    """Type, message, place and, as far as it follows from these, exit code."""
    fields: dict[str, Any] = {"type": type(error).__name__, "message": str(error), "where": place(trace)}
    if not isinstance(error, KeyboardInterrupt):
        fields["code"] = _code(error) if isinstance(error, SystemExit) else 1
    # An exception raised while an interruption is handled is a consequence of it: `except KeyboardInterrupt:
    # sys.exit(1)`, or a clean-up that finds the peers gone.
    if fields["type"] != INTERRUPTED and _was_interrupted(error):
        fields |= {"type": INTERRUPTED, "message": f"then {fields['type']}: {fields['message']}"}
    return fields


def place(trace: TracebackType | None) -> str:
    """The last place in the program's own code, and the place in a library that raised, if any; "" if unknown."""
    places: list[tuple[str, int, str]] = []
    while trace is not None:
        code = trace.tb_frame.f_code
        places.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    if not places:
        return ""
    own = next((one for one in reversed(places) if not _is_library(one[0])), places[-1])
    text = _written(*own)
    return text if own == places[-1] else f"{text}, in {_written(*places[-1])}"[:_WHERE_CHARACTERS_MAX]


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
    for one in reversed(gc.get_objects(generation=0)):
        if issubclass(type(one), BaseException) and not issubclass(type(one), GeneratorExit | StopIteration):
            trace = one.__traceback__
            if trace is None or trace.tb_frame in holders:
                return one  # type: ignore[no-any-return]
    return None


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
    return path.startswith(("<", _STANDARD_LIBRARY)) or "site-packages" in path


def _written(path: str, line: int, name: str) -> str:
    """`train.py:40 in step`, with the shortest path relative to `sys.path` or the working directory."""
    for folder in sys.path:
        if folder and path.startswith(folder + os.sep):
            path = min(path, path[len(folder) + 1 :], key=len)
    with contextlib.suppress(OSError):  # the working directory is gone
        path = min(path, os.path.relpath(path), key=len)
    return f"{path}:{line} in {name}"[-_WHERE_CHARACTERS_MAX:]
