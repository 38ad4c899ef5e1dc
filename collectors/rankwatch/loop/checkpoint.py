"""A checkpoint that a job can go back to, and the one that a relaunch is advised to begin from."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from rankwatch import layout
from rankwatch.faults import Faults
from rankwatch.loop.loop_exit import INTERRUPTED, described
from rankwatch.meter import StepMeter


class Checkpoint(NamedTuple):
    """A registered checkpoint."""

    id: str
    """TIER:ATTEMPT:STEP"""
    location: str
    """The location that the job's save returned."""
    step: int
    """The step to go on from, as registered with the save."""
    mode: str = "full"
    """What is restored: full (weights, optimizer, schedulers, random states, data, step), or relaunch (new processes
    load it)."""


def advised_checkpoint(directory: str, job: str) -> Checkpoint | None:
    """The newest good checkpoint for a relaunch, as the agent wrote it down; None without advice.

    Raises:
        ValueError, KeyError, OSError: the file holds no advice.
    """
    try:
        with open(layout.resume_path(directory, job)) as file:
            advice = json.load(file)
    except FileNotFoundError:
        return None
    if advice["job"] != job or not advice["checkpoint"]:
        return None
    return Checkpoint(str(advice["checkpoint"]), str(advice["location"]), int(advice["step"]), "relaunch")


class CheckpointFailures:
    """The failed saves and restores of one rank: event `checkpoint_failed`, once for each failure in a step.

    The first part without an exception after a failure is an event `checkpoint_succeeded`: a script may register no
    save. So is the first save of a process, which cannot know whether an earlier launch has failed.
    """

    def __init__(self, meter: StepMeter, faults: Faults) -> None:
        self._meter = meter
        self._faults = faults
        self._reported: tuple[Any, ...] = ()
        self._known: dict[str, Any] = {}
        """Fields of the event that are known of what is being saved or loaded."""
        self._failed_ns = {("save", ""): 0}
        """By what and tier, when the newest failure was recorded, until it succeeds."""
        meter.failed = self.record
        meter.succeeded = self.succeed

    @contextmanager
    def of(self, what: str, **fields: Any) -> Iterator[None]:
        """A part in which an exception means that a save or a restore has failed.

        Args:
            what: save or restore.
            fields: further ones of the event.
        """
        before, self._known = self._known, {**self._known, **fields}
        since_ns = self._meter.now()
        try:
            yield
        except Exception as error:
            self.record(what, error)
            raise
        else:
            self.succeed(what, since_ns)
        finally:
            self._known = before

    def record(self, what: str, error: BaseException) -> None:
        """Record a failure. An exception that ends the process on request is none."""
        if not isinstance(error, Exception):
            return
        with self._faults:
            reported = described(error, error.__traceback__)
            failure = (what, self._meter.k, self._meter.step, reported["type"], reported["message"])
            if reported["type"] == INTERRUPTED:
                return
            self._failed_ns[what, self._known.get("tier", "")] = self._meter.now()
            if failure == self._reported:
                return
            self._reported = failure
            said = {name: reported[name] for name in ("type", "message", "where")}
            fields = {"what": what, "location": _path(error), **self._known, **said, "errno": _errno(error)}
            self._meter.note("checkpoint_failed", fields)

    def succeed(self, what: str, since_ns: int) -> None:
        """Record a success after a failure.

        Args:
            what: save or restore.
            since_ns: when it began: a failure since then was in a part of it, which the script has caught.
        """
        tier = self._known.get("tier", "")
        if since_ns <= self._failed_ns.get((what, tier), since_ns):
            return
        with self._faults:
            del self._failed_ns[what, tier]
            self._reported = ()
            self._meter.note("checkpoint_succeeded", {"what": what, "tier": tier})


def _path(error: Exception) -> str:
    """The file that the exception names; "" if it names none."""
    named = error.filename if isinstance(error, OSError) and isinstance(error.filename, str) else ""
    return os.path.abspath(named) if named else ""


def _errno(error: Exception) -> int:
    """The number of the file system's error that this is, or that it follows from; 0 without one."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, OSError) and not isinstance(cause, ConnectionError | TimeoutError):
            return cause.errno or 0
        cause = cause.__cause__ or cause.__context__
    return 0
