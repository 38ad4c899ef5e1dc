"""Reads dumps of torch's flight recorder as JSON: one file for each rank, or one with all. Pickles are refused.

torch writes JSON by `torch._C._distributed_c10d._dump_nccl_trace_json()`, `_dump_fr_trace_json()` and the handler
`fr_trace_json` of its worker server. It records collectives of NCCL, and of gloo.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

BYTES_MAX: Final = 256 * 1024 * 1024
"""Largest dump that is read, unpacked: 2,000 entries of a rank have a two-hundredth of that, without stacks."""
GZIP: Final = b"\x1f\x8b"

DEFAULT: Final = "0"
"""Name of the group of all ranks; gloo leaves it out where it lists the groups."""

_PICKLE: Final = b"\x80"
_RANK: Final = re.compile(r"(\d+)\D*$")


class DumpError(ValueError):
    """A dump cannot be read; the message says which and why."""


@dataclass(frozen=True, slots=True)
class FlightEntry:
    """A collective, or a message between two ranks, as one rank has recorded it."""

    group: str
    """Name of the process group, the same on all its ranks."""
    group_text: str
    """What it is called in reports."""
    sequence: int
    """Number within the group; of collectives and of messages apart."""
    operation: str
    """Such as `nccl:all_reduce`, or `nccl:send 0->1` with ranks within the group."""
    is_message: bool
    form: tuple[Any, ...]
    """Operation, sizes and types: equal on all ranks of a symmetric collective."""
    is_done: bool
    created_ns: int


@dataclass(frozen=True, slots=True)
class RankDump:
    """What one rank has recorded."""

    rank: int
    members: Mapping[str, tuple[int, ...]]
    """Ranks of the process groups that this rank knows, by name."""
    entries: tuple[FlightEntry, ...]


def read_dumps(paths: Sequence[Path]) -> list[RankDump]:
    """The dumps in some files (also compressed by gzip), by rank.

    Raises:
        DumpError: a file is missing, is a pickle, is no dump, or two have the same rank.
    """
    found: dict[int, RankDump] = {}
    for path in paths:
        for rank, dump in _ranks_of(path, _loaded(path)):
            if rank in found:
                raise DumpError(f"{path}: there is another dump of rank {rank}")
            found[rank] = _parsed(path, rank, dump)
    return [found[rank] for rank in sorted(found)]


def _loaded(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            packed = file.read(2) == GZIP
        with gzip.open(path) if packed else path.open("rb") as content:
            raw = content.read(BYTES_MAX + 1)
    except OSError as error:
        raise DumpError(f"{path}: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise DumpError(f"{path}: cut off, or damaged: {error}") from error
    if len(raw) > BYTES_MAX:
        raise DumpError(f"{path}: larger than {BYTES_MAX // 2**20} MiB")
    if raw[:1] == _PICKLE:
        raise DumpError(f"{path}: a pickle, which may run code when it is read; write the dump as JSON")
    try:
        loaded = json.loads(raw)
    except ValueError as error:
        raise DumpError(f"{path}: not JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise DumpError(f"{path}: no object, so no dump of a flight recorder")
    return loaded


def _ranks_of(path: Path, loaded: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    if "entries" in loaded or "pg_config" in loaded:
        match = _RANK.search(path.name.split(".")[0]) or _RANK.search(path.name)
        if match is None:
            raise DumpError(f"{path}: the name of the file does not end in the rank")
        return [(int(match[1]), loaded)]
    if loaded and all(name.isdecimal() and isinstance(dump, dict) for name, dump in loaded.items()):
        return [(int(name), dump) for name, dump in loaded.items()]
    raise DumpError(f"{path}: neither a dump of a rank nor an object of ranks")


def _parsed(path: Path, rank: int, dump: dict[str, Any]) -> RankDump:
    try:
        groups = dump.get("pg_config") or {}
        members = {str(group["name"]) or DEFAULT: tuple(json.loads(group["ranks"])) for group in groups.values()}
        entries = [_entry(one) for one in dump.get("entries") or ()]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DumpError(f"{path}: rank {rank}: not as torch writes it: {type(error).__name__}: {error}") from error
    return RankDump(rank, members, tuple(entries))


def _entry(one: Mapping[str, Any]) -> FlightEntry:
    name, text = (str(part) for part in one["process_group"])
    is_message = bool(one.get("is_p2p", False))
    operation = str(one["profiling_name"])
    sizes, types = (one.get(f"input_{what}") for what in ("sizes", "dtypes"))
    return FlightEntry(
        name,
        f"{text} ({name})" if text else name,
        int(one["p2p_seq_id" if is_message else "collective_seq_id"]),
        operation,
        is_message,
        (operation, json.dumps(sizes), json.dumps(types)),
        one.get("state") == "completed" or bool(one.get("retired")),
        int(one["time_created_ns"]),
    )
