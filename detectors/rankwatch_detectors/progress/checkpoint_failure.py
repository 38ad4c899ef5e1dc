"""A rank's report that it could not save or load a checkpoint (event `checkpoint_failed`), as a plain dict.

Its keys are those of the evidence, and `time_s`, `attempt`, `ended`: the rank's process has ended since, `ordered`: all
ranks are held until each has restored, `follows`: its error is one that the end of another rank causes, and `missing`:
the rank has told nothing, but its part never came.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable
from typing import Any, Final

from rankwatch_detectors.base import Occurrence
from rankwatch_detectors.ends.teardown import CONNECTION_ERRORS

Failure = dict[str, Any]

SAVE, RESTORE = "save", "restore"
MEMORY, DISK = "memory", "disk"
NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a file system or a quota that is full."""

TEXT_CHARS_MAX: Final = 500
LINE_CHARS_MAX: Final = 200
TEXTS: Final = ("checkpoint", "type", "message", "where")
SHOWN: Final = ("rank", "host", "step", "tier", "path", *TEXTS, "errno")
_PATH: Final = re.compile(r"\S*/\S*")


def failure_of(occurrence: Occurrence) -> Failure:
    """The failure that an event `checkpoint_failed` of a rank reports."""
    fields = occurrence.fields
    texts = {name: str(fields.get(name) or "")[:TEXT_CHARS_MAX] for name in TEXTS}
    number = fields.get("errno")
    number = number if isinstance(number, int) else 0
    error = _PATH.sub("", f"{texts['type']}: {texts['message']}").lower()
    return {
        "rank": occurrence.rank,
        "host": occurrence.host,
        "step": -1 if occurrence.step is None else occurrence.step,
        "path": str(fields.get("location") or "")[:TEXT_CHARS_MAX],
        **texts,
        "errno": number,
        "time_s": occurrence.time_s,
        "attempt": occurrence.attempt,
        "tier": tier_of(occurrence),
        "ended": False,
        "ordered": fields.get("ordered") is True,
        "follows": not number and any(words in error for words in CONNECTION_ERRORS),
        "missing": False,
    }


def tier_of(occurrence: Occurrence) -> str:
    """Where a checkpoint was to be saved, or was: memory (of the ranks' processes) or disk."""
    return MEMORY if occurrence.fields.get("tier") == MEMORY else DISK


def launch_of(attempt: str) -> str:
    """The launch of an attempt."""
    return attempt.rpartition(".")[0]


def first_of(failures: Iterable[Failure]) -> Failure:
    """The failure that came first; of those at about the same time, one that no other rank has caused."""
    return min(failures, key=lambda one: (one["follows"], one["time_s"], one["rank"]))


def error_of(failure: Failure) -> str:
    """Its exception, on one line, after a colon; "" if it has none."""
    said = ": ".join(text for text in (failure["type"], failure["message"].strip()) if text)
    return f": {said.splitlines()[0][:LINE_CHARS_MAX]}" if said else ""


def also(others: int) -> str:
    """How many other ranks failed too, to go on with a sentence."""
    return f", and so did {others} other{'s' * (others > 1)}" if others else ""


def evidence_of(failure: Failure) -> dict[str, Any]:
    """The fields of a failure that go into evidence."""
    return {name: failure[name] for name in SHOWN}
