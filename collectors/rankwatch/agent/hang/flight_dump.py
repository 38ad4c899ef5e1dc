"""Reduces a dump of torch's flight recorder to what tells whom a hang waits for: from a megabyte to kilobytes. Pure.

The form stays torch's. Of each group remain the first collectives that are not done and the newest one, by whose number
it is known which ones were launched; equal messages are counted together.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final

OPEN_MAX: Final = 8
"""Collectives of a group that are not done: the first is the one in which it hangs."""
DUMP_CHARS_MAX: Final = 16_384
"""Longest reduced dump: 60 collectives. What is longer is not sent."""
SIZES_CHARS_MAX: Final = 128
"""Longer sizes of tensors are replaced by a hash, which is equal for equal sizes."""

_DEFAULT: Final = "0"


def reduced(raw: bytes) -> str:
    """The dump as JSON text.

    Raises:
        ValueError: it is no dump of a flight recorder, or too long.
    """
    dump = json.loads(raw)
    try:
        collectives, messages = _entries(dump["entries"])
        named = {str(entry["process_group"][0]) for entry in (*collectives, *messages)}
        groups = {
            key: {"name": group["name"], "desc": group.get("desc", ""), "ranks": _ranges(json.loads(group["ranks"]))}
            for key, group in dump["pg_config"].items()
            if (group["name"] or _DEFAULT) in named
        }
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"not as torch writes it: {type(error).__name__}: {error}") from error
    text = json.dumps({"pg_config": groups, "entries": [*collectives, *messages]}, separators=(",", ":"))
    if len(text) > DUMP_CHARS_MAX:
        raise ValueError(f"{len(text)} characters; at most {DUMP_CHARS_MAX} are sent")
    return text


def _entries(entries: Iterable[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The collectives that remain, and the messages."""
    launched: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    messages: Counter[tuple[str, str, str, bool]] = Counter()
    for entry in entries:
        name, text = (str(part) for part in entry["process_group"])
        if entry.get("is_p2p"):
            messages[name, text, str(entry["profiling_name"]), _is_done(entry)] += 1
        else:
            launched[name].append(entry)
    kept = [_collective(one) for name in sorted(launched) for one in _remaining(launched[name])]
    return kept, [
        {
            "process_group": [name, text],
            "is_p2p": True,
            "p2p_seq_id": 0,
            "profiling_name": operation,
            "state": "completed" if done else "scheduled",
            "time_created_ns": 0,
            "count": count,
        }
        for (name, text, operation, done), count in sorted(messages.items())
    ]


def _remaining(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of the collectives of one group."""
    ordered = sorted(entries, key=lambda entry: int(entry["collective_seq_id"]))
    first = [entry for entry in ordered if not _is_done(entry)][:OPEN_MAX]
    return first if first and first[-1] is ordered[-1] else [*first, ordered[-1]]


def _collective(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "process_group": entry["process_group"],
        "collective_seq_id": entry["collective_seq_id"],
        "profiling_name": entry["profiling_name"],
        "input_sizes": _sizes(entry.get("input_sizes")),
        "input_dtypes": _sizes(entry.get("input_dtypes")),
        "state": "completed" if _is_done(entry) else "scheduled",
        "time_created_ns": entry["time_created_ns"],
    }


def _is_done(entry: Mapping[str, Any]) -> bool:
    return entry.get("state") == "completed" or bool(entry.get("retired"))


def _sizes(sizes: Any) -> Any:
    text = json.dumps(sizes)
    return sizes if len(text) <= SIZES_CHARS_MAX else sha256(text.encode()).hexdigest()[:16]


def _ranges(ranks: Sequence[int]) -> str:
    """Ranks as ranges in their order, such as 0-2,4: the ranks of a message count within the group."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in ranges)
