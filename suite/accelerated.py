"""Lines of the labelled suite on accelerators: what devices measure comes late, and beside it a steady CPU time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from rankwatch_detectors.base import Kind
from rankwatch_service.simulate.job import Job
from suite.cases import Case

KINDS_ON_DEVICES: Final = frozenset({Kind.STRAGGLER, Kind.SLOWDOWN, Kind.HANG, Kind.NONFINITE})
CAUSES: Final = {"worker": "device"}
"""Causes that have another name where devices measure their own work."""


def on_accelerators(cases: Iterable[Case]) -> Iterator[Case]:
    """Those with a slow rank, a slow job, a hang or a NaN, as jobs whose devices measure their steps."""
    for case in cases:
        job = case.job(0)
        if job.placement.accelerated and any(label.kind in KINDS_ON_DEVICES for label in job.labels):
            name = f"{case.name}, on accelerators"
            yield replace(case, name=name, job=_Accelerated(case), cause=CAUSES.get(case.cause, case.cause))


class _Accelerated:
    """The jobs of a case, as those of devices."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def __call__(self, seed: int) -> Job:
        job = self._case.job(seed)
        return replace(job, placement=replace(job.placement, launch_cpu=True, device_times=True), late_values=True)
