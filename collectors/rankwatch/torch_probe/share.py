"""One optimizer's share of a step: its gradients, whether its update was made, and the values recorded of both.

Norms are divided by the loss scale. A loss scaler that overflows skips the update and lowers its scale: that is normal
and no fault of the job, so such a step has no gradient values, only `optimizer_skipped`. It is a fault if the scale
cannot be lowered further, or if no scaler was ever seen and too many updates in a row are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from rankwatch.torch_probe.arguments import Optimizer, Scaler
from rankwatch.torch_probe.gradients import LocalGradients, LocalResult, Scalar
from rankwatch.torch_probe.scaler import calling_scaler

SKIPS_MAX: Final = 20
"""Skipped updates in a row that a scaler not seen yet may explain: halving 2^16 twenty times leaves less than 1, and at
such a scale the gradients themselves overflow."""

_NORMS: Final = ("grad_norm", "local_grad_norm")
_EXCUSED: Final = "excused"
"""Internal value of a step: the loss scaler skipped the update, and the scale may be the reason."""
_UNSEEN: Final = "unseen"
"""Internal value of a step: no update was ever made, so a loss scaler may have skipped this one."""
PLACE: Final = "place"
"""Internal value of a step: index of this update among the step's updates, from 0."""
SHARED: Final = (*_NORMS, "loss_scale", "nonfinite", "nonfinite_first", _EXCUSED, _UNSEEN, PLACE)
"""Names of the values that each optimizer has."""


@dataclass(slots=True)
class Measures:
    """Measurements of the gradients since the last update. Tensors are 0-d, on the device of the gradients."""

    local: LocalResult | None = None
    norm: Scalar | None = None
    """Total gradient norm."""
    norm_scaled: bool = True
    """The norm is that of gradients multiplied by the loss scale."""
    scale: torch.Tensor | None = None
    """Loss scale of the newest backward; None without a loss scaler."""
    made: bool = False
    """The optimizer was called."""
    overflowed: torch.Tensor | None = None
    """The loss scaler's flag for a fused optimizer, which skips its update itself; skipped if not 0."""

    def values(self) -> tuple[dict[str, Scalar], dict[str, Scalar]]:
        """Values and 64-bit integers by metric name."""
        floats, ints = dict[str, Scalar](), dict[str, Scalar]()
        if self.norm is not None:
            floats["grad_norm"] = self._unscaled(self.norm) if self.norm_scaled else self.norm
        if self.local is not None:
            floats["local_grad_norm"] = self._unscaled(self.local.norm)
            ints["nonfinite"] = self.local.nonfinite
            ints["nonfinite_first"] = self.local.first
        if self.scale is not None:
            floats["loss_scale"] = self.scale
            if not self.made or self.overflowed is not None:
                # At a scale of 1 or less the true gradient overflows too, which is a fault of the job.
                excused = self.scale > 1
                ints[_EXCUSED] = excused if self.overflowed is None else excused & self.overflowed.bool()
        return floats, ints

    def _unscaled(self, norm: Scalar) -> Scalar:
        return norm if self.scale is None else norm / self.scale


class Share:
    """One optimizer with its parameters, from step to step."""

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[torch.nn.Parameter],
        scaler: Scaler | None,
        local: LocalGradients | None,
    ) -> None:
        self.optimizer = optimizer
        self.parameters = parameters
        self.local = local
        self.touched = False
        """The current backward has reached a parameter of this optimizer."""
        self.now = Measures()
        self.in_closure = False
        """The optimizer computes its gradients itself, by a closure."""
        self.place = 0
        """Index of its newest update among the step's updates, from 0."""
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.ever_made = False
        self.ever_touched = False
        self._taken: Measures | None = None
        self._skips = 0

    def gradient(self, index: int, gradient: torch.Tensor) -> None:
        """A parameter's gradient is complete on this rank."""
        self.touched = self.ever_touched = True
        if self.local is not None:
            self.local.add(index, gradient)

    def reduced(self, one: torch.Tensor) -> None:
        """A backward that touched these parameters is reduced; `one` is a tensor 1 on their device."""
        self.touched = False
        if self.local is not None:
            self.now.local = self.local.result()
        if self._scaler is not None:
            self.now.scale = self._scaler.scale(one)

    def begins(self, one: torch.Tensor) -> None:
        """The optimizer is called, for instance by a loss scaler."""
        self.ever_made = self.now.made = True
        if self._scaler is None:
            found = calling_scaler()
            if found is not None:
                self._scaler = found
                self.now.scale = found.scale(one)
        # Fused optimizers are called in every step and skip the update themselves, on the device.
        self.now.overflowed = getattr(self.optimizer, "found_inf", None)

    def ends(self) -> None:
        """The optimizer has returned: gradients of a later backward belong to the next update."""
        if self.now.local is not None or self.now.norm is not None:
            self._taken = self.now
        elif self._taken is None:
            return
        if self.local is not None:
            self.local.clear()
        self.now = Measures()

    def clear(self) -> None:
        """Discard all measurements at the start of a step."""
        if self.local is not None:
            self.local.clear()
        self.touched = self.in_closure = False
        self.now, self._taken = Measures(), None

    def values(self) -> tuple[dict[str, Scalar], dict[str, Scalar]]:
        """Values and 64-bit integers by metric name; pass them to `judge` once they are numbers."""
        floats, ints = (self._taken or self.now).values()
        if self._scaler is None and not self.ever_made:
            ints[_UNSEEN] = 1
        return floats, ints

    def judge(self, floats: dict[str, float], ints: dict[str, int]) -> None:
        """Turn a step's measured values into recorded ones, in place. Call it for each step, in order."""
        excused, unseen = ints.pop(_EXCUSED, 0), ints.pop(_UNSEEN, 0)
        if ints.get("nonfinite") or not math.isfinite(floats.get("grad_norm", 0.0)):
            self._skips += 1
            if excused or (unseen and self._skips < SKIPS_MAX):
                floats.pop("grad_norm", None)
                floats.pop("local_grad_norm", None)
                if "nonfinite" in ints:
                    ints["nonfinite"] = 0
                floats["optimizer_skipped"] = 1.0
        elif "grad_norm" in floats or "nonfinite" in ints:
            self._skips = 0
        if not ints.get("nonfinite"):
            ints.pop("nonfinite_first", None)


def together(shares: Sequence[tuple[dict[str, float], dict[str, int]]]) -> tuple[dict[str, float], dict[str, int]]:
    """The values of a step with several optimizers: the norm over all, and the first parameter that is not finite.

    An update with non-finite gradients of one rank makes its parameters non-finite on all ranks, and so everything
    computed from them later in the step. These later gradients are not counted, as they are no fault of their rank.
    """
    floats, ints = dict[str, float](), dict[str, int]()
    spoilt = False
    for one_floats, one_ints in sorted(shares, key=lambda share: share[1].pop(PLACE)):
        if spoilt and one_ints.get("nonfinite"):
            one_ints |= {"nonfinite": 0}
        spoilt |= bool(one_ints.get("nonfinite")) or not math.isfinite(one_floats.get("grad_norm", 0.0))
        for name, value in one_floats.items():
            known = floats.get(name)
            floats[name] = value if known is None or name not in _NORMS else math.hypot(known, value)
        if one_ints.get("nonfinite") and not ints.get("nonfinite"):
            ints["nonfinite_first"] = one_ints["nonfinite_first"]
        if "nonfinite" in one_ints:
            ints["nonfinite"] = ints.get("nonfinite", 0) + one_ints["nonfinite"]
    if "optimizer_skipped" in floats:  # the norm over the other updates alone is not comparable with other steps
        for name in _NORMS:
            floats.pop(name, None)
    return floats, ints
