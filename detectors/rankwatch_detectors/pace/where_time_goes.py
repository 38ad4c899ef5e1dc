"""Where a slow rank's time goes: its phases that are longer than its peers', and the cause class that follows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rankwatch_detectors.base import Frame

PHASES_SHOWN = 4


def phase_excess(frame: Frame, ranks: Sequence[int], peers: Sequence[int]) -> dict[str, float]:
    """Seconds by which each phase of these ranks is longer than of their peers, by the medians, largest first."""
    excess = {}
    for name, values in frame.values.items():
        if name.startswith("phase."):
            usable = frame.present[name] & np.isfinite(values)
            here, among = ([one for one in some if usable[one]] for some in (ranks, peers))
            if here and among:
                excess[name.removeprefix("phase.")] = float(np.median(values[here]) - np.median(values[among]))
    longest = sorted(excess.items(), key=lambda item: (-item[1], item[0]))
    return dict(longest[:PHASES_SHOWN])


def cause_class(phase_excess_s: dict[str, float], added_s: float, *, witness: str, device: bool) -> str:
    """Cause class of a slow rank: `device` if that works for longer, else by its phases, else `host` or `worker`.

    The longest excess decides: data_wait is `data`, checkpoint_save is `storage`. Where devices measure their own work,
    other phases of the host contain the wait for its device, so one of these has to explain half of what is added.

    Args:
        phase_excess_s: of each phase of the host.
        added_s: seconds by which the rank takes longer.
        witness: the quantity that shows it.
        device: its device works for longer.
    """
    if device:
        return "device"
    least_s = added_s / 2 if witness == "arrival" else 0.0
    grown = {name: seconds for name, seconds in phase_excess_s.items() if seconds > least_s}
    longest = max(grown, key=lambda name: grown[name], default="")
    named = {"data_wait": "data", "checkpoint_save": "storage"}
    return named.get(longest, "host" if witness in ("host", "arrival") else "worker")
