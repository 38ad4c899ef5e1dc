"""What the message of a group says of one incident."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_BRIEF: Final = (
    "id",
    "short_id",
    "job",
    "project",
    "owner",
    "attempt",
    "kind",
    "severity",
    "scope",
    "summary",
    "text",
    "rank_count",
    "onset_step",
    "onset_time",
    "resolved_time",
    "links",
)


def brief(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an incident that a group keeps, from the field `data` of its own message."""
    return {name: data[name] for name in _BRIEF}
