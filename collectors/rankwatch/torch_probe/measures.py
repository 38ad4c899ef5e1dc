"""What one step's hooks have found, and how it becomes values to record.

A loss scale is taken out of the norms. A loss scaler that overflows leaves the update out and lowers its scale: that
is its daily work and no fault of the job, so such a step has no gradient values, only `optimizer_skipped`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

import torch

from rankwatch.torch_probe.gradients import LocalResult, Scalar

_EXCUSED: Final = "excused"
"""Travels with a step's values: the update was left out by the loss scaler, and the scale may be the reason."""


@dataclass(slots=True)
class Measures:
    """One step, as far as it is known. Tensors are 0-d and on whatever device they were computed."""

    logged: dict[str, Scalar] = field(default_factory=dict)
    local: LocalResult | None = None
    norm: Scalar | None = None
    """Total gradient norm."""
    norm_scaled: bool = True
    """The norm was taken while the loss scale was in the gradients."""
    scale: torch.Tensor | None = None
    """Loss scale of the newest backward; None without a loss scaler."""
    updated: bool = False
    """The optimizer was called."""
    overflowed: torch.Tensor | None = None
    """What the loss scaler told a fused optimizer, which leaves out its update by itself; not 0 = left out."""

    def values(self) -> tuple[dict[str, Scalar], dict[str, Scalar]]:
        """Values and 64-bit integers by metric name; `judge` them once they are numbers."""
        floats, ints = dict(self.logged), dict[str, Scalar]()
        if self.norm is not None:
            floats["grad_norm"] = self._unscaled(self.norm) if self.norm_scaled else self.norm
        if self.local is not None:
            floats["local_grad_norm"] = self._unscaled(self.local.norm)
            ints["nonfinite"] = self.local.nonfinite
            ints["nonfinite_first"] = self.local.first
        if self.scale is not None and (not self.updated or self.overflowed is not None):
            # At a scale of 1 or less the true gradient overflows too, and that is a fault of the job.
            excused = self.scale > 1
            ints[_EXCUSED] = excused if self.overflowed is None else excused & self.overflowed.bool()
        return floats, ints

    def _unscaled(self, norm: Scalar) -> Scalar:
        return norm if self.scale is None else norm / self.scale


def judge(floats: dict[str, float], ints: dict[str, int]) -> None:
    """Turn, in place, what was measured into what is recorded."""
    excused = ints.pop(_EXCUSED, 0)
    if excused and (ints.get("nonfinite") or not math.isfinite(floats.get("grad_norm", 0.0))):
        floats.pop("grad_norm", None)
        floats.pop("local_grad_norm", None)
        if "nonfinite" in ints:
            ints["nonfinite"] = 0
        floats["optimizer_skipped"] = 1.0
    if not ints.get("nonfinite"):
        ints.pop("nonfinite_first", None)
