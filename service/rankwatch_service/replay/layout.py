"""The known columns of replay files, and the error that names the wrong place in a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

OWN_WORK: Final = ("phase.forward", "phase.backward", "phase.optimizer")
"""A file without `busy_s` gets the sum of these: a rank's work without waiting for others."""

PLACES: Final = ("dp", "tp", "pp", "cp", "ep")

HARDWARE: Final = ("host", "device_type", "device_uuid", "switch")
"""Texts that say where a rank runs."""


class ReplayError(Exception):
    """A file that cannot be replayed, with the place of the error. Rows count from 1, without the header."""

    def __init__(self, path: str, what: str, row: int | None = None, column: str | None = None) -> None:
        where = [path]
        if row is not None:
            where.append(f"row {row}")
        if column is not None:
            where.append(f"column {column}")
        super().__init__(f"{', '.join(where)}: {what}")
        self.what = what
        self.row = row
        self.column = column


def renamed(path: str, names: Sequence[str], mapping: Mapping[str, str]) -> dict[str, str]:
    """The known name of each column of a file.

    Args:
        path: of the file, for errors.
        names: its columns.
        mapping: from its names to ours; a pair the other way round is understood where only that makes sense.

    Raises:
        ReplayError: a mapped column is missing, two columns have one name, or there is no `step`.
    """
    # Several columns may have no name: none of them is read.
    twice = next((name for index, name in enumerate(names) if name and name in names[:index]), None)
    if twice is not None:
        raise ReplayError(path, "stands twice in the header", column=twice)
    ours = {name: name for name in names}
    for theirs, known in mapping.items():
        source, target = (theirs, known) if theirs in ours else (known, theirs)
        if source not in ours:
            raise ReplayError(path, f"there is none to be read as {known!r}; {_listed(names)}", column=theirs)
        ours[source] = target
    for name, ours_name in ours.items():
        if name != ours_name and ours_name in names and ours[ours_name] == ours_name:
            # The file's own column of that name is not meant.
            ours[ours_name] = ""
    both: dict[str, str] = {}
    for name, ours_name in ours.items():
        if ours_name and (other := both.setdefault(ours_name, name)) != name:
            raise ReplayError(path, f"is to be read as {ours_name!r}, and so is {other!r}", column=name)
    if "step" not in ours.values():
        raise ReplayError(path, f"missing; {_listed(names)}. Say which one it is: --map NAME=step", column="step")
    return {name: ours_name for name, ours_name in ours.items() if ours_name}


def parse_mapping(text: str) -> dict[str, str]:
    """Read "a=b,c=d".

    Raises:
        ValueError: a pair has not two names.
    """
    pairs = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        theirs, equals, known = (part.strip() for part in pair.partition("="))
        if not (theirs and equals and known):
            raise ValueError(f"{pair!r} is not NAME=KNOWN, as in global_step=step")
        pairs[theirs] = known
    return pairs


def _listed(names: Sequence[str]) -> str:
    return f"the file has {', '.join(names[:40])}" if names else "the file has no columns"
