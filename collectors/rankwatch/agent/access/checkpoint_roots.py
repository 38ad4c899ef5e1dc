"""The checkpoint roots of a job's ranks on this host, and whether a location that the service names is below one.

The roots are those that the ranks declare; if they declare none, the folders of what they saved, as their recorders
say. They lie in a file beside the recorders, since the advice for a relaunch arrives before the next launch has saved
anything. Local paths are compared with all links resolved, in threads, since a file system may not answer.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from rankwatch import layout
from rankwatch.agent.ranks import LocalRank
from rankwatch.locations import ROOTS_MAX, is_below, roots_with
from rankwatch.reader import Note

ANSWER_WITHIN_S: Final = 2.0
"""Longest wait for a file system. The order's agents wait as well, and a rank holds for 5 s."""
HOLDS_S: Final = 10.0
"""A result is used again for this long: orders come every 50 ms while they are carried out."""
CHECKS_MAX: Final = 16
"""Locations whose file systems have not answered yet, a thread for each; beyond, a location is refused at once."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Check:
    """One location on its way through the file system."""

    begun_s: float
    why_not: str | None = None


class CheckpointRoots:
    """Where one job's checkpoints may lie, as its ranks on this host have said. Used by one thread."""

    def __init__(self, file: Path, now_s: Callable[[], float]) -> None:
        self.roots: tuple[str, ...] = ()
        self.trouble = ""
        """For people: what a rank saved outside of the roots that it declared."""
        self._file = file
        self._now_s = now_s
        self._declared = False
        self._launch = ""
        self._working_directory = ""
        self._checks: dict[str, _Check] = {}
        self._read()

    def meet(self, rank: LocalRank) -> None:
        """Take the roots that a living rank declares. Those of a new launch replace what was known before."""
        told = tuple(map(str, rank.identity.get("checkpoint_roots", ())))
        if rank.launch != self._launch:
            self._launch, self._declared, self.trouble = rank.launch, bool(told), ""
            self._change(told or self.roots, rank)
        elif told:
            before = self.roots if self._declared else ()
            self._declared = True
            fresh = [root for root in told if root not in before]
            if fresh:
                self._change((*before, *fresh)[-ROOTS_MAX:], rank)

    def learn(self, rank: LocalRank, note: Note) -> None:
        """Take what a rank notes of a save: where it is, and how many ranks save a part of it."""
        if note.kind != "checkpoint_saved":
            return
        shards, location = note.fields.get("shards"), str(note.fields.get("location", ""))
        if isinstance(shards, int) and shards > 0:
            rank.shards = shards
        try:
            if is_below(location, self.roots):
                return
            if not self._declared:
                self._change(roots_with(self.roots, location), rank)
                return
            why = f"it is not below a checkpoint root that the job declares ({', '.join(self.roots)})"
        except ValueError as error:
            why = str(error)
        self.trouble = f"the checkpoint at {location!r} will not be loaded: {why}"

    def why_not(self, location: str) -> str | None:
        """Why nothing may be loaded from a location; "" if it may, None while a file system has not answered."""
        try:
            if not is_below(location, self.roots):
                return f"it is not below a checkpoint root of this host ({', '.join(self.roots) or 'none is known'})"
        except ValueError as error:
            return str(error)
        return self._leads_out(location) if location else ""

    def path_of(self, location: str) -> str | None:
        """The absolute local path of a location; None if it has none, or the ranks' working directory is not known."""
        path = _path(location, self._working_directory) if location else None
        return path if path is not None and os.path.isabs(path) else None

    def _leads_out(self, location: str) -> str | None:
        path = _path(location, self._working_directory)
        if path is None:
            return ""
        if not os.path.isabs(path):
            return "it is a relative path, and the working directory of its ranks is not known"
        check, now_s = self._checks.get(location), self._now_s()
        if check is None or (check.why_not is not None and now_s - check.begun_s > HOLDS_S):
            self._checks = {where: one for where, one in self._checks.items() if one.why_not is None}
            if len(self._checks) >= CHECKS_MAX:
                return "file systems of this host do not answer"
            check = self._checks[location] = _Check(now_s)
            roots = [each for root in self.roots if (each := _path(root, self._working_directory)) is not None]
            threading.Thread(target=_resolve, args=(check, path, roots), daemon=True).start()
        if check.why_not is None and now_s - check.begun_s > ANSWER_WITHIN_S:
            return f"its file system has not answered for {ANSWER_WITHIN_S:g} s"
        return check.why_not

    def _change(self, roots: tuple[str, ...], rank: LocalRank) -> None:
        self.roots = roots
        self._checks.clear()
        try:
            self._working_directory = os.readlink(f"/proc/{rank.header.pid}/cwd")
        except OSError:
            _log.debug("the working directory of rank %d cannot be read", rank.rank)
        fresh = self._file.with_suffix(".new")
        kept = {"roots": roots, "declared": self._declared, "working_directory": self._working_directory}
        try:
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
                json.dump({**kept, "launch": self._launch}, file)
            os.replace(fresh, self._file)
        except OSError as error:
            _log.warning("the checkpoint roots were not kept: %s", error)

    def _read(self) -> None:
        try:
            kept = json.loads(self._file.read_text())
            self.roots = tuple(map(str, kept["roots"]))
            self._declared, self._launch = bool(kept["declared"]), str(kept["launch"])
            self._working_directory = str(kept["working_directory"])
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("the checkpoint roots of earlier launches cannot be read: %r", error)


def roots_file(directory: Path, job: str) -> Path:
    """The file in which a job's checkpoint roots on this host lie."""
    return directory / f"{layout.file_stem(job)}.roots"


def _path(location: str, working_directory: str) -> str | None:
    """The local path of a location or root; None if it is a URL of something else."""
    scheme, found, rest = location.partition("://")
    if not found or "/" in scheme:
        return os.path.join(working_directory, location)
    if scheme.lower() != "file":
        return None
    return "/" + unquote(rest.partition("/")[2])


def _resolve(check: _Check, path: str, roots: list[str]) -> None:
    real = os.path.realpath(path)
    for root in map(os.path.realpath, filter(os.path.isabs, roots)):
        if root != "/" and os.path.commonpath((real, root)) == root:
            check.why_not = ""
            return
    check.why_not = f"it is at {real}, outside of the checkpoint roots of this host"
