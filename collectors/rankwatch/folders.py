"""The folders in which recorder files may lie, and which of them are safe to use. Standard library only."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping


class UnsafeFolderError(OSError):
    """Another user can write to this directory, and so rename or replace recorder files."""


def directories(env: Mapping[str, str], uid: int) -> list[str]:
    """Where a recorder file may lie, best place first; the first that takes it is used."""
    places = [env["RANKWATCH_DIR"]] if env.get("RANKWATCH_DIR") else []
    return [*places, f"/dev/shm/rankwatch-{uid}", os.path.join(env.get("TMPDIR") or "/tmp", f"rankwatch-{uid}")]  # noqa: S108


def others_reach(place: str, uid: int) -> str:
    """Why a directory is not this user's alone; "" if it is. Anyone can make names in shared memory and in /tmp.

    Raises:
        OSError: it does not exist or cannot be looked at.
    """
    found = os.lstat(place)
    if not stat.S_ISDIR(found.st_mode):
        return "it is a link or a file"
    if found.st_uid != uid:
        return f"it belongs to user {found.st_uid}"
    return f"others can write there (mode {stat.S_IMODE(found.st_mode):04o})" if found.st_mode & 0o022 else ""
