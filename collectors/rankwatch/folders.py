"""The folders in which recorder files may lie, and which of them are safe to use. Standard library only."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class UnsafeFolderError(OSError):
    """Another user could rename or replace what is recorded in this directory."""


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


def others_write(path: Path) -> str:
    """Why others than this user and root may write a file, or replace what is in a folder; "" if they may not.

    Raises:
        OSError: it does not exist or cannot be looked at.
    """
    found, uid = path.stat(), os.getuid()
    if found.st_uid not in (uid, 0):
        return f"{path} belongs to user {found.st_uid}"
    # In a folder such as /tmp nobody replaces what is another's. Many systems give each user a group of its own.
    sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
    others = stat.S_IWOTH | stat.S_IWGRP * (not _is_group_of(uid, found.st_gid))
    return f"others can write {path}" if found.st_mode & others and not sticky else ""


def _is_group_of(uid: int, gid: int) -> bool:
    try:
        return gid == 0 or grp.getgrgid(gid).gr_name == pwd.getpwuid(uid).pw_name
    except KeyError:
        return False
