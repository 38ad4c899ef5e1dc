"""What the integrations of frameworks have in common: how they start the watch and come between a framework's calls.

A framework's checkpoints in the ledger.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from rankwatch.identity import TEXT_CHARACTERS_MAX, job_name
from rankwatch.loop import Checkpoint
from rankwatch.notices import say
from rankwatch.startup import start
from rankwatch.watch import Watch

_RESTART_COUNTS: Final = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def started(name: str, folder: str, job: str | None = None, **options: Any) -> Watch:
    """Start the watch of a framework's job.

    Args:
        name: what the framework calls the run, or the folder that it writes to, or "": the job's name where neither
            `job` nor the environment says one. Without any of them the job is named after the script.
        folder: where its checkpoints go, a checkpoint root unless others are declared; "" if that is not known.
        job: the job's name.
        options: further arguments of `rankwatch.start`.

    Raises:
        ValueError: as `rankwatch.start`.
    """
    env = options.get("env") or os.environ
    if job is None and not job_name(env):
        name = os.path.basename(os.path.normpath(name)) if name else _script()
        job = "".join(sign for sign in name if sign.isprintable())[:TEXT_CHARACTERS_MAX] or None
    if folder and not env.get("RANKWATCH_CHECKPOINT_ROOTS"):
        options.setdefault("checkpoint_roots", [folder if "://" in folder else os.path.abspath(folder)])
    return start(job, **options)


def _script() -> str:
    """The name of the script that runs, without its ending; "" if none does."""
    name, ending = os.path.splitext(os.path.basename(sys.argv[0]))
    return name if ending == ".py" else ""


def is_relaunch(options: Mapping[str, Any]) -> bool:
    """Whether the launcher has started this job again, or `relaunches=True` says that some launcher does."""
    env = options.get("env") or os.environ
    return bool(options.get("relaunches")) or any(env.get(name, "0") not in ("", "0") for name in _RESTART_COUNTS)


def advised(watch: Watch) -> Checkpoint | None:
    """The checkpoint to go on from after a relaunch; None without advice, or if it does not exist on this host."""
    checkpoint = watch.resume
    if checkpoint is not None and "://" not in checkpoint.location and not os.path.exists(checkpoint.location):
        watch._loop.gone(checkpoint.id, "it was advised for a relaunch and does not exist")
        checkpoint = None
    if watch.identity.rank == 0:
        say(f"goes on from {checkpoint.location}" if checkpoint else "no good checkpoint to go on from is known")
    return checkpoint


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a method of one object, if it has it; `around` gets the method, then the arguments of each call."""
    original = getattr(owner, name, None)
    if callable(original):
        setattr(owner, name, functools.wraps(original)(functools.partial(around, original)))


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
        """Call the function that saves a checkpoint and record an exception as a failed save. The framework reports
        details later.
        """
        with self._watch._loop.failures.of("save"):
            return save(*args, **kwargs)

    def loads(self, load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function that loads a checkpoint from the path in its first argument; an exception is a failed
        restore.
        """
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
