"""Finds another launch that trains under the same job name on this host: the service could not tell the two apart."""

from __future__ import annotations

import os
from collections.abc import Iterable

from rankwatch import layout
from rankwatch.folders import others_reach
from rankwatch.reader import RingReader


def launches_at_once(directories: Iterable[str], job: str, launch: str) -> list[str]:
    """Other launches of this job with a living process that trains here.

    Never raises: an unreadable file must not prevent a start.
    """
    found: set[str] = set()
    # Closing a file that this process records into would drop its lock (see rankwatch.reader), so these are skipped.
    ours = f"-p{os.getpid()}-"
    for directory in directories:
        try:
            if others_reach(directory, os.getuid()):
                continue
            names = [name for name in os.listdir(directory) if name.endswith(layout.RING_SUFFIX) and ours not in name]
        except OSError:
            continue
        found.update(filter(None, (_launch(os.path.join(directory, name), job) for name in names)))
    return sorted(found - {launch})


def _launch(path: str, job: str) -> str:
    """The launch of a living rank of this job that has not left its loop; "" for any other file."""
    try:
        reader = RingReader(path)
    except (OSError, ValueError):
        return ""
    try:
        identity = reader.header.identity
        trains = identity.get("job") == job and reader.owner_alive() and reader.progress().state != "left"
        return str(identity.get("launch", "")) if trains else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    finally:
        reader.close()
