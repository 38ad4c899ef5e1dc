"""Explains what a detector judges by witnesses, and what it does not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rankwatch_detectors.base import Finding, Frame
from rankwatch_detectors.explanation.explained import (
    DETECTABLE_ROWS,
    TRAIN,
    Detectable,
    ExplainedDetector,
    FrameCounts,
    LeftOut,
    split,
)
from rankwatch_detectors.explanation.suspect import Statistic, Suspect
from rankwatch_detectors.pace.witness import Witness

MEASURED = frozenset({"busy_s", "device_busy_s", "device_wait_s"})


class WitnessedDetector(ExplainedDetector):
    """Base of a detector whose scopes are ranks, each judged by one or more witnesses."""

    _config: Any
    _rows: int
    witnesses: dict[str, Witness]
    """By name."""

    def _name(self, witness: Witness) -> str:
        return next(name for name, one in self.witnesses.items() if one is witness)

    def _rows_of_steps(self, counts: FrameCounts) -> dict[str, int]:
        if self.world_size == 1:
            return {LeftOut.ALONE: counts[TRAIN]}
        known = max(witness.known_rows for witness in self.witnesses.values())
        warm = self._config.baseline.warm_rows
        before = max(known - max(self._rows - self._config.skipped_rows, 0), 0)
        not_measured = {LeftOut.NOT_MEASURED: max(counts[TRAIN] - self._rows, 0)}
        return split(self._rows, self._config.skipped_rows, max(warm - before, 0)) | not_measured

    def suspects(self, frame: Frame) -> Sequence[Suspect]:
        """Ranks with half of the evidence that is reported, or more, by each witness."""
        if frame.family == "values":
            return ()
        near = [name for name, witness in self.witnesses.items() if witness.bank.near]
        return [suspect for name in near for suspect in self.witnesses[name].suspected(name)] if near else ()

    def crossed(self, finding: Finding) -> Suspect | None:
        """The evidence of the run; None for differences that are reported without one."""
        told = finding.evidence
        if "log_likelihood_ratio" not in told:
            return None
        effect = finding.score * told["sigma"] / math.sqrt(told["rows"])
        value, limit = told["log_likelihood_ratio"], self.witnesses[told["witness"]].limit
        ratio = math.exp(effect)
        return Suspect(finding.scope, Statistic.EVIDENCE, value, limit, told["rows"], ratio, source=told["witness"])

    def needed(self, crossed: Suspect, rows: int) -> float | None:
        """The mean ratio that would have been reported."""
        return _ratio(self.witnesses[crossed.source].detectable(crossed.scope.number, rows))

    def detectable(self) -> Sequence[Detectable]:
        """By each witness, for a rank with the median noise and for the noisiest."""
        found = []
        for name, witness in self.witnesses.items():
            ranks = np.flatnonzero(witness.baseline.ready())
            if ranks.size:
                sigma = witness.baseline.sigma()
                order = ranks[np.argsort(sigma[ranks], kind="stable")]
                middle, noisiest = int(order[order.size // 2]), int(order[-1])
                found.append(_detectable(witness, middle, f"a slow rank, by {name} time"))
                found.append(_detectable(witness, noisiest, f"rank {noisiest}, the noisiest, by {name} time"))
        return found


def _detectable(witness: Witness, rank: int, fault: str) -> Detectable:
    sizes = tuple((rows, _ratio(witness.detectable(rank, rows))) for rows in DETECTABLE_ROWS)
    return Detectable(fault, "ratio", math.expm1(float(witness.baseline.sigma()[rank])), sizes)


def _ratio(shift: float | None) -> float | None:
    return None if shift is None else math.exp(shift)
