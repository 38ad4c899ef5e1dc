"""Notices when checkpoints that the ranks of this host have saved disappear from its file systems.

Only what this agent has seen itself can disappear: a path that this host never had, as on another host's own disk, says
nothing. A file system that is unmounted or does not answer says nothing either, and URLs are never looked up.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from rankwatch import wire
from rankwatch.reader import Note

LOOK_EVERY_S: Final = 5.0
"""How often the paths are looked up, by a thread: one `stat` for each."""
WATCHED_MAX: Final = 64
"""Newest saves that are watched, beside the one that is advised for a relaunch."""
MISSED_MIN: Final = 2
"""Looks in a row that must miss a checkpoint: a script may replace one by deleting it first."""


class MissingCheckpoint(NamedTuple):
    """A checkpoint that was on this host's file systems and is there no more."""

    checkpoint: str
    reason: str


@dataclass(slots=True)
class _Watched:
    """A checkpoint, as the looking thread found it."""

    path: str
    device: int | None = None
    """Of the folder that it is in, once it was seen."""
    missed: int = 0


class SavedCheckpoints:
    """The newest saves of one job's ranks on this host. Used by one thread, which it never lets wait."""

    def __init__(
        self,
        path_of: Callable[[str], str | None],
        now_s: Callable[[], float],
        begin: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """Args:
        path_of: the local path of a location; None if it has none.
        now_s: the monotonic clock.
        begin: runs a look beside the caller; default: in a thread of its own.
        """
        self._path_of = path_of
        self._now_s = now_s
        self._begin = begin or _in_thread
        self._saved: OrderedDict[str, _Watched] = OrderedDict()
        self._advised: dict[str, _Watched] = {}
        self._looking = threading.Event()
        self._next_s = 0.0

    def learn(self, note: Note) -> None:
        """Watch what a rank notes that it has saved."""
        checkpoint = str(note.fields.get("checkpoint", ""))
        if note.kind != "checkpoint_saved" or not checkpoint or checkpoint in self._saved:
            return
        if path := self._path_of(str(note.fields.get("location", ""))):
            self._saved[checkpoint] = _Watched(path)
            if len(self._saved) > WATCHED_MAX:
                self._saved.popitem(last=False)

    def advise(self, advice: wire.ResumeAdvice | None) -> None:
        """Watch what is advised for a relaunch, which an earlier launch may have saved."""
        if advice is None or advice.checkpoint in self._advised or advice.checkpoint in self._saved:
            return
        path = self._path_of(advice.location)
        self._advised = {advice.checkpoint: _Watched(path)} if path else {}

    def missing(self) -> list[MissingCheckpoint]:
        """The checkpoints found missing since the last call, each once. Begins the next look when it is due."""
        if self._looking.is_set():
            return []
        found = [*_taken_from(self._saved), *_taken_from(self._advised)]
        watching = [*self._saved.values(), *self._advised.values()]
        if watching and self._now_s() >= self._next_s:
            self._next_s = self._now_s() + LOOK_EVERY_S
            self._looking.set()
            self._begin(lambda: self._look(watching))
        return found

    def _look(self, watching: list[_Watched]) -> None:
        try:
            for one in watching:
                _look_at(one)
        finally:
            self._looking.clear()


def _taken_from(watched: dict[str, _Watched]) -> list[MissingCheckpoint]:
    names = [name for name, one in watched.items() if one.missed >= MISSED_MIN]
    return [MissingCheckpoint(name, f"it is not at {watched.pop(name).path} any more") for name in names]


def _look_at(one: _Watched) -> None:
    try:
        os.stat(one.path)
        one.device, one.missed = os.stat(os.path.dirname(one.path)).st_dev, 0
    except (FileNotFoundError, NotADirectoryError):
        # Where its file system is not mounted, the nearest folder is on another one.
        if one.device is not None and _device_above(one.path) == one.device:
            one.missed += 1
    except OSError:
        return


def _device_above(path: str) -> int | None:
    """The device of the nearest folder above that exists; None if it cannot be read."""
    while (above := os.path.dirname(path)) != path:
        path = above
        try:
            return os.stat(path).st_dev
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return None
    return None


def _in_thread(look: Callable[[], None]) -> None:
    threading.Thread(target=look, daemon=True).start()
