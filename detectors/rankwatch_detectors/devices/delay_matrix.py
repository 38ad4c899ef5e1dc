"""Which sender, receiver or link is slow, from a matrix of delays between hosts. Pure.

A slow row is a sender, a slow column a receiver, and a single slow cell the link between the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from rankwatch_detectors.base import Floats

HOSTS_MIN: Final = 3
"""Fewer hosts do not tell a sender from a receiver."""
HOSTS_MAX: Final = 64
SLOW: Final = 2.0
"""Times the matrix's median from which on a row, a column or a cell is slow."""
SPREADS: Final = 6.0
"""And so many times the cells' own spread (median absolute deviation) above it."""


@dataclass(frozen=True, slots=True)
class SlowPath:
    """What is slow at a host, with its delay and what is usual."""

    host: str
    part: str
    """sender, receiver, both, or "link to HOST"."""
    delay_s: float
    usual_s: float


def slow_paths(fields: Mapping[str, Any]) -> list[SlowPath]:
    """What stands out in a matrix; nothing if it is not one.

    Args:
        fields: `hosts`, their names; `delay_s`, rows of seconds by sender and receiver in that order. The diagonal, and
            what was not measured (None, NaN), do not count.
    """
    read = _matrix(fields)
    if read is None:
        return []
    hosts, delay_s = read
    cells = delay_s[np.isfinite(delay_s)]
    if cells.size < len(hosts):
        return []
    usual_s = float(np.median(cells))
    if usual_s <= 0:
        return []  # rounded to nothing: there is nothing to compare with
    spread_s = float(np.median(np.abs(cells - usual_s)))
    limit_s = max(SLOW * usual_s, usual_s + SPREADS * spread_s)
    rows, columns = _medians(delay_s), _medians(delay_s.T)
    found = list[SlowPath]()
    for at, host in enumerate(hosts):
        sends, receives = rows[at] > limit_s, columns[at] > limit_s
        if sends or receives:
            part = "both" if sends and receives else "sender" if sends else "receiver"
            found.append(SlowPath(host, part, max(rows[at], columns[at]), usual_s))
    for sender, receiver in np.argwhere(delay_s > limit_s).tolist():
        if rows[sender] <= limit_s and columns[receiver] <= limit_s:
            path = float(delay_s[sender, receiver])
            found.append(SlowPath(hosts[sender], f"link to {hosts[receiver]}", path, usual_s))
    return found


def _matrix(fields: Mapping[str, Any]) -> tuple[list[str], Floats] | None:
    hosts, rows = fields.get("hosts"), fields.get("delay_s")
    if not isinstance(hosts, list | tuple) or not HOSTS_MIN <= len(hosts) <= HOSTS_MAX:
        return None
    try:
        delay_s = np.array(rows, dtype=float)  # None becomes NaN
    except (TypeError, ValueError):
        return None
    if delay_s.shape != (len(hosts), len(hosts)) or not all(isinstance(host, str) for host in hosts):
        return None
    np.fill_diagonal(delay_s, np.nan)
    delay_s[delay_s < 0] = np.nan
    return list(hosts), delay_s


def _medians(rows: Floats) -> list[float]:
    """The median of each row's finite cells; 0 where it has none."""
    return [float(np.median(row[np.isfinite(row)])) if np.isfinite(row).any() else 0.0 for row in rows]
