"""Where a slow rank's time goes: its phases that are longer than its peers', and the cause class that follows."""

from __future__ import annotations

import numpy as np

from rankwatch_detectors.base import Frame

PHASES_SHOWN = 4


def phase_excess(frame: Frame, rank: int, peers: list[int]) -> dict[str, float]:
    """Seconds by which each phase of the rank is longer than its peers' median, largest first."""
    excess = {}
    for name, values in frame.values.items():
        present = frame.present[name]
        if name.startswith("phase.") and present[rank] and np.isfinite(values[rank]):
            among = [peer for peer in peers if present[peer] and np.isfinite(values[peer])]
            if among:
                excess[name.removeprefix("phase.")] = float(values[rank] - np.median(values[among]))
    longest = sorted(excess.items(), key=lambda item: (-item[1], item[0]))
    return dict(longest[:PHASES_SHOWN])


def cause_class(phase_excess_s: dict[str, float], *, host: bool) -> str:
    """Cause class by the longest excess: data_wait is `data`, checkpoint_save is `storage`, else `host` or `worker`."""
    grown = {name: seconds for name, seconds in phase_excess_s.items() if seconds > 0}
    longest = max(grown, key=lambda name: grown[name], default="")
    named = {"data_wait": "data", "checkpoint_save": "storage"}
    return named.get(longest, "host" if host else "worker")
