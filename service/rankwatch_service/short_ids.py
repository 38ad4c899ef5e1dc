"""Ids as people read and type them: the beginning of the hash in an id, the same for all jobs."""

from __future__ import annotations

from typing import Final

SHORT_DIGITS: Final = 10
"""Among 10,000 ids two begin alike once in 20,000 services; whoever types one of them is asked for more digits."""

TYPED_MIN: Final = 6
"""Fewer digits are taken for a slip."""


def short(full_id: str) -> str:
    """The short form of an id.

    >>> short("inc_3f9a2c1bd17744aa20c1d2e3")
    '3f9a2c1bd1'
    """
    return full_id.partition("_")[2][:SHORT_DIGITS] or full_id


def typed(given: str, prefix: str) -> str:
    """What an id may begin with that a person gave: with or without its prefix, with or without a number sign.

    >>> typed("#3f9a2c", "inc_"), typed("inc_3f9a2c", "inc_")
    ('inc_3f9a2c', 'inc_3f9a2c')
    """
    return prefix + given.strip().lstrip("#").removeprefix(prefix)
