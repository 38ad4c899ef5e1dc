"""What the detectors of slow ranks and slow jobs find in the device times of real ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rankwatch_detectors.base import AttemptStart, Finding, Observation, Topology
from rankwatch_detectors.pace.slowdown import SlowdownConfig, SlowdownDetector
from rankwatch_detectors.pace.straggler import StragglerConfig, StragglerDetector
from tests.support.detection.verdicts import evaluate, opened
from tests.support.values.presences import ATTEMPT, frame


def findings(ranks: Sequence[Sequence[Mapping[str, float]]], topology: Topology) -> list[Finding]:
    """Judge the rows of each rank. What hosts measure is equal, as in synchronous training."""
    observations: list[Observation] = [AttemptStart(ATTEMPT, topology, 0.0)]
    for step, rows in enumerate(zip(*ranks, strict=True)):
        hosts = {"step_time_s": [0.05] * len(rows), "busy_s": [0.045] * len(rows)}
        names = sorted({name for row in rows for name in row if name.startswith("device_")})
        devices = {name: [row.get(name, np.nan) for row in rows] for name in names}
        observations.append(frame(step, hosts | devices, time_s=0.05 * step))
    return opened(evaluate(observations, [StragglerDetector(StragglerConfig()), SlowdownDetector(SlowdownConfig())]))
