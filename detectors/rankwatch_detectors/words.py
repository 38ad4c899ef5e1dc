"""Words for people: lists, comparisons and durations, as in summaries. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

TWICE: Final = 2.0
"""From this ratio on a multiple is clearer than a per cent."""


def listed(items: Sequence[object], most: int) -> str:
    """The first items, and how many more there are.

    >>> listed([1, 2, 3], 4), listed([1, 2, 3], 2)
    ('1, 2, 3', '1, 2 and 1 more')
    """
    more = len(items) - most
    return ", ".join(map(str, items[:most])) + (f" and {more} more" if more > 0 else "")


def compared(ratio: float) -> str:
    """How a value compares with what is usual or with its peers: what follows it is that, in the genitive or plain.

    >>> compared(1.27), compared(2.881), compared(0.8), compared(1.001)
    ('27 % above', '2.9 times', '20 % below', 'about')
    """
    if not math.isfinite(ratio) or ratio < 0:
        return "far from"
    percent = 100 * (ratio - 1)
    if ratio >= TWICE:
        return f"{ratio:,.2g} times" if ratio < 10 else f"{ratio:,.0f} times"
    if abs(percent) < 0.5:
        return "about"
    return f"{abs(percent):.0f} % {'above' if percent > 0 else 'below'}"


def lasting(seconds: float) -> str:
    """A duration, in two units at most.

    >>> lasting(0.42), lasting(12.3), lasting(200), lasting(3_725), lasting(-1)
    ('0.4 s', '12 s', '3 min 20 s', '1 h 2 min', '0 s')
    """
    if not math.isfinite(seconds) or seconds <= 0:
        return "0 s"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    if hours:
        return f"{hours} h" + (f" {minutes_left} min" if minutes_left else "")
    return f"{minutes} min" + (f" {rest} s" if rest else "") if minutes else f"{rest} s"


def percent(ratio: float) -> str:
    """An increase in per cent.

    >>> percent(1.27), percent(1.031), percent(1.05)
    ('27', '3.1', '5')
    """
    more = 100 * (ratio - 1)
    return f"{more:.2g}" if more < 9.95 else f"{more:.0f}"


def slower_than(ratio: float, others: str) -> str:
    """A slowdown against others or the past, in words; `ratio` is above 1.

    >>> slower_than(1.27, "its peers"), slower_than(3.42, "its peers")
    ('27 % slower than its peers', '3.4 times as slow as its peers')
    """
    return f"{percent(ratio)} % slower than {others}" if ratio < 1.95 else f"{ratio:.1f} times as slow as {others}"


def more_than(ratio: float, what: str, others: str) -> str:
    """How much more of something is needed than by others, or than before; `ratio` is above 1.

    >>> more_than(1.27, "CPU time", "before"), more_than(3.42, "CPU time", "before")
    ('27 % more CPU time than before', '3.4 times as much CPU time as before')
    """
    return (
        f"{percent(ratio)} % more {what} than {others}"
        if ratio < 2
        else f"{ratio:.1f} times as much {what} as {others}"
    )


def duration(value: float) -> str:
    """A duration, with three digits.

    >>> duration(0.0845), duration(0.7), duration(12.345), duration(432.1)
    ('84.5 ms', '0.7 s', '12.3 s', '432 s')
    """
    if value < 0.1:
        return f"{1e3 * value:.3g} ms"
    return f"{value:.3g} s" if value < 100 else f"{value:.0f} s"
