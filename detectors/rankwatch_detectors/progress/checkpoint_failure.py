"""A rank's report that it could not save or load a checkpoint (event `checkpoint_failed`), as a plain dict.

Its keys are those of the evidence, and `time_s`, `attempt` and `ended`: the rank's process has ended since.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from rankwatch_detectors.base import Occurrence
from rankwatch_detectors.ends.teardown import CONNECTION_ERRORS

Failure = dict[str, Any]

SAVE, RESTORE = "save", "restore"
NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a file system or a quota that is full."""

TEXT_CHARS_MAX: Final = 500
LINE_CHARS_MAX: Final = 200
SHOWN: Final = ("rank", "host", "step", "tier", "path", "checkpoint", "type", "message", "where", "errno")
_PATH: Final = re.compile(r"\S*/\S*")


def failure_of(occurrence: Occurrence) -> Failure:
    """The failure that an event `checkpoint_failed` of a rank reports."""
    fields = occurrence.fields
    texts = {name: str(fields.get(name) or "")[:TEXT_CHARS_MAX] for name in ("checkpoint", "type", "message", "where")}
    number = fields.get("errno")
    return {
        "rank": occurrence.rank,
        "host": occurrence.host,
        "step": -1 if occurrence.step is None else occurrence.step,
        "path": str(fields.get("location") or "")[:TEXT_CHARS_MAX],
        **texts,
        "errno": number if isinstance(number, int) else 0,
        "time_s": occurrence.time_s,
        "attempt": occurrence.attempt,
        "tier": tier_of(occurrence),
        "ended": False,
    }


def tier_of(occurrence: Occurrence) -> str:
    """Where a checkpoint was to be saved, or was: memory (of the ranks' processes) or disk."""
    return "memory" if occurrence.fields.get("tier") == "memory" else "disk"


def follows_from_an_end(failure: Mapping[str, Any]) -> bool:
    """Whether its error is one that the end of another rank causes."""
    error = _PATH.sub("", f"{failure['type']}: {failure['message']}").lower()
    return not failure["errno"] and any(words in error for words in CONNECTION_ERRORS)


def first_of(failures: Iterable[Failure]) -> Failure:
    """The failure that came first; of those at about the same time, one that no other rank has caused."""
    return min(failures, key=lambda one: (follows_from_an_end(one), one["time_s"], one["rank"]))


def error_of(failure: Mapping[str, Any]) -> str:
    """Its exception, on one line."""
    return f"{failure['type']}: {failure['message']}".splitlines()[0].removesuffix(": ")[:LINE_CHARS_MAX]


def evidence_of(failure: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a failure that go into evidence."""
    return {name: failure[name] for name in SHOWN}
