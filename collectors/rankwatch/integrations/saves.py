"""A framework's checkpoints in the ledger."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from rankwatch.watch import Watch

SAVES_MAX: Final = 64
"""Newest saves of which a later deletion is noticed: one `stat` for each of them after each save."""


class Saves:
    """Enters a framework's checkpoints into the ledger, and reports those that it has deleted since."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._kept: dict[str, str] = {}
        """Locations by the ids of their checkpoints."""
        self._due = False

    @contextmanager
    def save(self, step: int, location: str, *, counts: bool = True) -> Iterator[None]:
        """A part in which this rank saves a checkpoint, and waits until it is whole.

        Args:
            step: the step to go on from when it is loaded.
            location: its file or folder.
            counts: training can be resumed from it.
        """
        begun_s = time.monotonic()
        with self._watch._loop.failures.of("save", location=location), self._watch.pause("checkpoint_save"):
            yield
        if counts:
            self.saved(step, location, time.monotonic() - begun_s)

    def saves(self, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call what saves a checkpoint, of which the framework tells more later; an exception is a failed save."""
        with self._watch._loop.failures.of("save"):
            return save(*args, **kwargs)

    def loads(self, load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call what loads a checkpoint, from where its first argument says; an exception is a failed restore."""
        with self._watch._loop.failures.of("restore", location=str(args[0]) if args else ""):
            return load(*args, **kwargs)

    def saved(self, step: int, location: str, seconds: float) -> None:
        """A save is complete on this rank. Arguments as in `Watch.checkpoint_saved`."""
        is_local = "://" not in location
        if is_local:
            location = os.path.abspath(location)
        tier = "local" if is_local else "remote"
        size = size_bytes(location) if is_local and self._watch.identity.rank == 0 else 0
        self._watch.checkpoint_saved(step, location, tier=tier, seconds=seconds, size_bytes=size)
        if is_local and self._watch.identity.rank == 0:
            self._keep(f"{tier}:{self._watch.attempt}:{step}", location)

    def look(self) -> None:
        """Report saves that were deleted, once after each further save: frameworks delete after they have saved."""
        if self._due:
            self._due = False
            for checkpoint in [known for known, path in self._kept.items() if not os.path.exists(path)]:
                self._forget(checkpoint)

    def _keep(self, checkpoint: str, location: str) -> None:
        if checkpoint in self._kept:
            return  # one state in two files: the ledger has the first
        for replaced in [known for known, path in self._kept.items() if path == location]:
            self._forget(replaced)
        self._kept[checkpoint] = location
        self._due = True
        if len(self._kept) > SAVES_MAX:
            del self._kept[next(iter(self._kept))]

    def _forget(self, checkpoint: str) -> None:
        del self._kept[checkpoint]
        self._watch._loop.gone(checkpoint, "the training script deleted it or saved over it")


def size_bytes(location: str) -> int:
    """Bytes of a file, or of the files in a folder and its folders; 0 where there is nothing."""
    try:
        if not os.path.isdir(location):
            return os.path.getsize(location)
        return sum(
            os.path.getsize(os.path.join(folder, name)) for folder, _, names in os.walk(location) for name in names
        )
    except OSError:  # a file was deleted meanwhile
        return 0
