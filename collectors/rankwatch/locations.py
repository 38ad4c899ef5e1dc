"""Where checkpoints are, as texts: which folder a location is in, and whether that is below a checkpoint root. Pure.

A location is an absolute path, a path relative to the ranks' working directory, or a URL such as s3://bucket/run/step-5.
Folders are compared name by name, so /ckpt-other is not below /ckpt.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final
from urllib.parse import unquote

LOCATION_CHARACTERS_MAX: Final = 1_024
"""Longest location; a note of the recorder holds 1,568 bytes."""

ROOTS_MAX: Final = 16
"""Checkpoint roots of one rank: local and remote, as absolute and as relative path, with room for folders by year."""

_HOLD_ALL: Final = ("/", "file://", "file://localhost")


def folders(location: str) -> list[str]:
    """The location itself and every folder that it is in, innermost first, each in its plain form.

    Raises:
        ValueError: it has a `..`, is too long, or has characters that cannot be printed.

    >>> folders("/ckpt//step-5/./model.pt")
    ['/ckpt/step-5/model.pt', '/ckpt/step-5', '/ckpt', '/']
    >>> folders("S3://bucket/run")
    ['s3://bucket/run', 's3://bucket']
    >>> folders("step-5.pt")
    ['step-5.pt', '.']
    """
    if len(location) > LOCATION_CHARACTERS_MAX:
        raise ValueError(f"it is longer than {LOCATION_CHARACTERS_MAX} characters")
    if not location.isprintable():
        raise ValueError("it has characters that cannot be printed")
    top, between, names = _split(location)
    if any(".." in unquote(name).split("/") for name in names):
        raise ValueError("it has a .. in it")
    return [top + between + "/".join(names[:count]) for count in range(len(names), 0, -1)] + [top or "."]


def is_below(location: str, roots: Collection[str]) -> bool:
    """Whether a location is one of these roots or below one of them. No root is needed where there is no location.

    Raises:
        ValueError: the location is not valid (see `folders`).
    """
    return not location or any(folder in roots for folder in folders(location))


def checkpoint_root(text: str) -> str:
    """The plain form of a declared checkpoint root.

    Raises:
        ValueError: it is not valid (see `folders`), empty, or the root of the file system, which holds every file.
    """
    root = folders(text)[0] if text else ""
    if not root or root in _HOLD_ALL:
        raise ValueError("it holds every file" if root else "it is empty")
    return root


def folder_of(location: str) -> str:
    """The folder that a location is in; of what lies directly in the root of the file system, the location itself.

    Raises:
        ValueError: the location is not valid (see `folders`).
    """
    own, *above = folders(location)
    return above[0] if above and above[0] not in _HOLD_ALL else own


def roots_with(roots: Sequence[str], location: str) -> tuple[str, ...]:
    """These roots, and the folder of a location that is below none of them: the newest `ROOTS_MAX`.

    Two folders side by side, as those of step-100/model.pt and step-200/model.pt, become the one that they are in.

    Raises:
        ValueError: the location is not valid (see `folders`).
    """
    if is_below(location, roots):
        return tuple(roots)
    kept, folder = list(roots), folder_of(location)
    while beside := [root for root in kept if folder_of(root) == folder_of(folder)]:
        kept = [root for root in kept if root not in beside]
        folder = folder_of(folder)
    return (*kept, folder)[-ROOTS_MAX:]


def _split(location: str) -> tuple[str, str, list[str]]:
    """What a location begins with (/, the scheme and authority of a URL, nothing), what follows that, and the names."""
    scheme, found, rest = location.partition("://")
    if found and "/" not in scheme:
        authority, _, path = rest.partition("/")
        top, between = f"{scheme.lower()}://{authority}", "/"
    else:
        path = location
        top, between = ("/", "") if location.startswith("/") else ("", "")
    return top, between, [name for name in path.split("/") if name not in ("", ".")]
