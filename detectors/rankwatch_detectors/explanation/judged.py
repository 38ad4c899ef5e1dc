"""What is judged of a job now: by each detector the rows, its noise, and the smallest faults that would be reported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rankwatch_detectors.base import Kind
from rankwatch_detectors.explanation.explained import JUDGED, Detectable, ExplainedDetector, FrameCounts, LeftOut

WHY_NOT: Final = {
    LeftOut.OWN_PACE: "ranks go at their own pace and are compared with their own past",
    LeftOut.ALONE: "the job has no other rank to compare with",
    LeftOut.NOT_MEASURED: "what it judges is not measured",
    LeftOut.NOT_FINITE: "its values are not finite",
    LeftOut.WARM_UP: "what is usual is not known yet",
    LeftOut.FIRST_ROWS: "the first rows of an attempt are skipped",
}
"""By the reason for which rows are left out, if no row is judged."""

RULES: Final = {
    Kind.NONFINITE: "each value of each rank: the first that is not finite is reported",
    Kind.CORRUPTION: "each fingerprint that ranks must share: the first that differs is reported",
    Kind.METRIC: "each rule that people have set on a metric",
    Kind.HANG: "time without progress, against what steps, pauses and long phases of this job usually take",
    Kind.RANK_LOST: "each process of a rank: an end without a reason is reported",
    Kind.TELEMETRY_LOST: "each host: silence of its agent is reported",
    Kind.DEVICE_FAULT: "each error that a driver reports",
    Kind.DEVICE_DEGRADED: "counters of devices, against limits and against their peers",
    Kind.HOST_DEGRADED: "counters of hosts, against limits",
    Kind.NETWORK_DEGRADED: "counters of network ports, against limits and against their peers",
    Kind.RESTART_LOOP: "launches that make no progress, by their number",
    Kind.CHECKPOINT_FAILED: "each save that fails",
    Kind.CHECKPOINT_OVERDUE: "steps since the last save, against the usual interval",
    Kind.RESTORE_FAILED: "each load of a checkpoint that fails",
    Kind.LIMIT_REACHED: "each limit of the service that this job reaches",
    Kind.FORGED_TELEMETRY: "each message that is not signed as it must be",
    Kind.ALERT: "each alert that a Prometheus reports about the job",
}
"""Kinds that are judged by a rule, without a statistic of rows."""


def judged(detectors: Sequence[ExplainedDetector], counts: FrameCounts) -> list[dict[str, Any]]:
    """By detector, in their order, as JSON types."""
    return [_judged(detector, counts) for detector in detectors]


def _judged(detector: ExplainedDetector, counts: FrameCounts) -> dict[str, Any]:
    left_out = detector.rows(counts)
    rows = left_out.pop(JUDGED, 0)
    reasons = [WHY_NOT[reason] for reason in LeftOut if reason in WHY_NOT and left_out.get(reason)]
    return {
        "kind": str(detector.kind),
        "detector": detector.name,
        "judged": rows > 0,
        "why_not": "" if rows else (reasons or ["no row of a training step has come"])[0],
        "rows": rows,
        "left_out": left_out,
        "smallest": [
            {
                "fault": one.fault,
                "unit": one.unit,
                "noise": one.noise,
                "sizes": [{"rows": count, "size": size} for count, size in one.sizes],
            }
            for one in (_detectable(detector) if rows else ())
        ],
    }


def _detectable(detector: ExplainedDetector) -> Sequence[Detectable]:
    try:
        return detector.detectable()
    except ArithmeticError:  # a curve near the largest float: nothing larger can be written down
        return ()
