"""Summaries and evidence for a job that has become slower: a shift, a drift, or a wandering pace."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rankwatch_detectors.base import Severity
from rankwatch_detectors.pace.step_parts import cause_of
from rankwatch_detectors.statistics.anchor import Anchor
from rankwatch_detectors.statistics.shift import Crossing

LONGER: Final = {
    "communication": " Most of it is communication: even the rank that comes last waits longer in collectives.",
    "device": " Most of it is work of the devices, of all ranks alike.",
    "data": " Most of it is waiting for data, of all ranks alike.",
}
"""What has grown, by cause class."""


def shifted(
    crossing: Crossing, seconds: float, sigma: float, world_size: int, *, shared: bool, grown_s: Mapping[str, float]
) -> dict[str, Any]:
    """Summary and evidence of a step time that has changed at once.

    Args:
        crossing: the change.
        seconds: duration of a step now.
        sigma: noise of its logarithm.
        world_size: number of ranks that lose time.
        shared: CPU time was judged, since ranks share their cores with others.
        grown_s: see `StepParts.grown_s`.
    """
    ratio = math.exp(crossing.effect)
    usual_s, what = seconds / ratio, "CPU time per step" if shared else "step time"
    return {
        "score": crossing.effect / sigma * math.sqrt(crossing.rows),
        "confidence": 1.0 - math.exp(-crossing.evidence / 4),
        "summary": f"The job's {what} is {ratio:.2f} times its usual {usual_s:.3g} s since step {crossing.onset_step}."
        + LONGER.get(cause_of(grown_s), ""),
        "evidence": {
            "ratio": ratio,
            "seconds": seconds,
            "usual_s": usual_s,
            "witness": "cpu" if shared else "wall",
            "rows": crossing.rows,
            "log_likelihood_ratio": crossing.evidence,
            "cost_gpu_hours_per_hour": world_size * (1 - 1 / ratio),
            **({"grown_s": grown_s} if grown_s else {}),
        },
    }


def drifted(anchor: Anchor, sigma: float, world_size: int) -> dict[str, Any]:
    """Summary and evidence of a step time that has left its best level; other parameters as in `shifted`."""
    ratio = math.exp(anchor.excess)
    best_s = math.exp(anchor.best)
    since = f" since step {anchor.onset_step}" if anchor.onset_step is not None else ""
    return {
        "score": anchor.excess / sigma,
        "summary": f"The job's step time has drifted to {ratio:.2f} times its best level of {best_s:.3g} s{since}.",
        "evidence": {
            "ratio": ratio,
            "seconds": math.exp(anchor.now),
            "best_s": best_s,
            "usual_s": best_s,
            "least_ratio": math.exp(anchor.least),
            "witness": "wall",
            "cost_gpu_hours_per_hour": world_size * (1 - 1 / ratio),
        },
    }


def wanders(bouts: Sequence[float], seconds: float, sigma: float) -> dict[str, Any]:
    """Summary and evidence of slowdowns that came and went; each of `bouts` is the logarithm of a ratio."""
    low, high = math.exp(min(bouts)), math.exp(max(bouts))
    return {
        "severity": Severity.INFO,
        "score": max(bouts) / sigma,
        "confidence": 0.9,
        "summary": f"The job's pace wanders: {len(bouts)} times it became {low:.2f} to {high:.2f} times slower and "
        "recovered by itself. Slowdowns of this size are not reported again.",
        "evidence": {"standing": True, "times": len(bouts), "ratio": high, "ratio_least": low, "seconds": seconds},
    }
