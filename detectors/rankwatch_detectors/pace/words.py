"""How sentences say by how much something takes longer, and how long something takes."""

from __future__ import annotations


def percent(ratio: float) -> str:
    """By how many per cent something is more.

    >>> percent(1.27), percent(1.031), percent(1.05)
    ('27', '3.1', '5')
    """
    more = 100 * (ratio - 1)
    return f"{more:.2g}" if more < 9.95 else f"{more:.0f}"


def slower_than(ratio: float, others: str) -> str:
    """By how much something is slower than others, or than before; `ratio` is above 1.

    >>> slower_than(1.27, "its peers"), slower_than(3.42, "its peers")
    ('27 % slower than its peers', '3.4 times as slow as its peers')
    """
    return f"{percent(ratio)} % slower than {others}" if ratio < 2 else f"{ratio:.1f} times as slow as {others}"


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
