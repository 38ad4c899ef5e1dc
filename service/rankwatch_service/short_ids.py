"""Short ids, which people read and type: the first digits of an id's hash, unique over all jobs."""

from __future__ import annotations

from typing import Final

SHORT_DIGITS: Final = 10
"""With 10,000 ids, two have equal short ids in one of 20,000 services; the service then asks for more digits."""

TYPED_MIN: Final = 6
"""Fewer digits are considered a typing error."""


def short(full_id: str) -> str:
    """The short form of an id.

    >>> short("inc_3f9a2c1bd17744aa20c1d2e3")
    '3f9a2c1bd1'
    """
    return full_id.partition("_")[2][:SHORT_DIGITS] or full_id


def typed(given: str, prefix: str) -> str:
    """The beginning of an id that a person typed, with or without its prefix or a number sign.

    >>> typed("#3f9a2c", "inc_"), typed("inc_3f9a2c", "inc_")
    ('inc_3f9a2c', 'inc_3f9a2c')
    """
    return prefix + given.strip().lstrip("#").removeprefix(prefix)
