"""What one rank's flight recorder has recorded, from the JSON that torch writes. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

DEFAULT: Final = "0"
"""Name of the group of all ranks; gloo leaves it out where it lists the groups."""


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


def parsed(origin: object, rank: int, dump: Mapping[str, Any]) -> RankDump:
    """The dump of one rank, as torch writes it.

    Args:
        origin: what errors call it.
        rank: whose it is.
        dump: the JSON.

    Raises:
        DumpError: it is not; the message names its origin.
    """
    try:
        groups = dump.get("pg_config") or {}
        members = {str(group["name"]) or DEFAULT: tuple(json.loads(group["ranks"])) for group in groups.values()}
        entries = [_entry(one) for one in dump.get("entries") or ()]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DumpError(f"{origin}: rank {rank}: not as torch writes it: {type(error).__name__}: {error}") from error
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
