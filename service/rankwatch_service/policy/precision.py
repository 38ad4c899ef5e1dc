"""What people say of incidents, and how precise a kind of incident is by that. Pure."""

from __future__ import annotations

from enum import StrEnum


class Feedback(StrEnum):
    """What a person says of an incident."""

    USEFUL = "useful"
    """It was right to report it."""
    NOISE = "noise"
    """Nothing was wrong, or nothing that anybody needs to know."""
    DUPLICATE = "duplicate"
    """Another incident reports the same trouble."""
