"""One optimizer's share of a step: its gradients, whether its update was made, and the values recorded of both.

Norms are divided by the loss scale. A loss scaler that overflows skips the update and lowers its scale: that is normal
and no fault of the job, so such a step has no gradient values, only `optimizer_skipped`. It is a fault if the scale
cannot be lowered further, or if no scaler was ever seen and too many updates in a row are skipped.

Finds the loss scaler that calls an optimizer, if any.

A torch.amp.GradScaler and its optimizers have no reference to each other, but the scaler's `step` is on the stack while
it calls an optimizer.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from rankwatch.layout import SLICES_MAX
from rankwatch.torch_probe.gradients import LocalGradients, LocalResult, Scalar
from rankwatch.torch_probe.watched_model import Handed, Optimizer, Scaler

TRAINED_EVERY: Final = 8
"""Updates between two counts of the trained parameters: a count reads each of thousands."""
FRAMES_MAX: Final = 16
"""Depth of the search on the stack: torch and the schedulers add 2 frames, frameworks another 4."""

_STEP: Final = torch.amp.GradScaler.step.__code__


def calling_scaler() -> Scaler | None:
    """The enabled scaler whose `step` is on the caller's stack; None without one."""
    frame = sys._getframe(1)
    for _ in range(FRAMES_MAX):
        if frame.f_code is _STEP:
            found = frame.f_locals["self"]
            return found if found.is_enabled() else None
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


SKIPS_MAX: Final = 20
"""Skipped updates in a row that a scaler not seen yet may explain: halving 2^16 twenty times leaves less than 1, and at
such a scale the gradients themselves overflow."""

TOTALS: Final = ("grad_norm", *(f"grad_norm.{number}" for number in range(SLICES_MAX)))
"""The norm of all gradients; of sharded models, the norms of this rank's slices instead."""
_NORMS: Final = (*TOTALS, "local_grad_norm")
_EXCUSED: Final = "excused"
"""Internal value of a step: the loss scaler skipped the update, and the scale may be the reason."""
_UNSEEN: Final = "unseen"
"""Internal value of a step: no update was ever made, so a loss scaler may have skipped this one."""
POSITION: Final = "position"
"""Internal value of a step: index of this update among the step's updates, from 0."""
SHARED: Final = (*_NORMS, "loss_scale", "nonfinite", "nonfinite_first", _EXCUSED, _UNSEEN, POSITION)
"""Names of the values that each optimizer has."""
OF: Final = "\0"
"""Separates a value's name from the number of its optimizer; occurs in no metric's name."""


@dataclass(slots=True)
class Measures:
    """Measurements of the gradients since the last update. Tensors are 0-d, on the device of the gradients."""

    local: LocalResult | None = None
    norm: Scalar | None = None
    """Total gradient norm."""
    slices: Mapping[str, Scalar] = field(default_factory=dict)
    """The norms of slices, by metric; empty if the model is not sharded or they are not known."""
    norm_scaled: bool = True
    """The norms are those of gradients multiplied by the loss scale."""
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
        for name, norm in self.slices.items():
            floats[name] = self._unscaled(norm) if self.norm_scaled else norm
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
        self.position = 0
        """Index of its newest update among the step's updates, from 0."""
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.rate: float | None = None
        """The largest learning rate of its groups; None where they are on a device."""
        self._looks = self._held = 0
        self.trains = self._trained()
        """How many parameters it trains, ..."""
        self._trains = {self.trains}
        """... and all such numbers so far: of what alternates, each is new once."""
        self.ever_made = False
        self.ever_touched = False
        self._taken: Measures | None = None
        self._skips = 0

    @property
    def scales(self) -> bool:
        """Whether a loss scaler multiplies the gradients."""
        return self._scaler is not None

    def gradients(self, found: dict[int, torch.Tensor], *, summands: bool) -> None:
        """Gradients, by the index of their parameter, are complete on this rank; see `LocalGradients.add`."""
        self.touched = self.ever_touched = True
        if self.local is not None:
            self.local.add(found, summands=summands)

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

    def look_at_groups(self) -> None:
        """Read the learning rate, and how many parameters the optimizer trains: each `TRAINED_EVERY` updates, and where
        it has got further ones.
        """
        rates = [group.get("lr", 0.0) for group in self.optimizer.param_groups]
        on_host = [float(one) for one in rates if not isinstance(one, torch.Tensor) or one.device.type == "cpu"]
        self.rate = max(on_host, default=None)
        held, self._held = self._held, sum(len(group["params"]) for group in self.optimizer.param_groups)
        self._looks += 1
        if held == self._held and self._looks % TRAINED_EVERY:
            return
        trained = self._trained()
        if trained not in self._trains:
            self._trains.add(trained)
            self.trains = trained

    def _trained(self) -> int:
        return sum(parameter.requires_grad for group in self.optimizer.param_groups for parameter in group["params"])

    def ends(self) -> None:
        """The optimizer has returned: gradients of a later backward belong to the next update."""
        if self.now.local is not None or self.now.norm is not None or self.now.slices:
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
        """Values and 64-bit integers by metric name; pass them to `evaluate` once they are numbers."""
        floats, ints = (self._taken or self.now).values()
        if self._scaler is None and not self.ever_made:
            ints[_UNSEEN] = 1
        return floats, ints

    def evaluate(self, floats: dict[str, float], ints: dict[str, int]) -> None:
        """Turn a step's measured values into recorded ones, in place. Call it for each step, in order."""
        excused, unseen = ints.pop(_EXCUSED, 0), ints.pop(_UNSEEN, 0)
        if ints.get("nonfinite") or not _is_finite(floats):
            self._skips += 1
            if excused or (unseen and self._skips < SKIPS_MAX):
                for name in _NORMS:
                    floats.pop(name, None)
                if "nonfinite" in ints:
                    ints["nonfinite"] = 0
                floats["optimizer_skipped"] = 1.0
        elif "nonfinite" in ints or any(name in floats for name in TOTALS):
            self._skips = 0
        if not ints.get("nonfinite"):
            ints.pop("nonfinite_first", None)


def _is_finite(floats: Mapping[str, float]) -> bool:
    """Whether the norms after the reduction are."""
    return all(math.isfinite(floats.get(name, 0.0)) for name in TOTALS)


def shared_out(
    handed: Iterable[Handed],
    parameters: Sequence[torch.nn.Parameter],
    owned: Sequence[torch.Tensor],
    new_local: Callable[[], LocalGradients | None],
) -> tuple[list[Share], list[Share]]:
    """Each optimizer's share; and the share of each tensor of `owned`, the first one if no optimizer has it.

    Args:
        handed: the optimizers with their loss scalers.
        parameters: all watched parameters.
        owned: tensors that optimizers have, by the index of their gradients; the first ones belong to `parameters`.
        new_local: returns what measures a share's local gradients.
    """
    given = [(optimizer, call.scaler) for call in handed for optimizer in call.optimizers]
    owner: dict[int, int] = {}
    for number, (optimizer, _) in enumerate(given):
        owner |= {id(parameter): number for group in optimizer.param_groups for parameter in group["params"]}
    numbers = [owner.get(id(tensor), 0) for tensor in owned]
    shares = []
    for number, (optimizer, scaler) in enumerate(given):
        own = [one for one, whose in zip(parameters, numbers, strict=False) if whose == number]
        shares.append(Share(optimizer, own, scaler, new_local()))
    return shares, [shares[number] for number in numbers]


def measured(shares: Sequence[Share], logged_norm: Scalar | None) -> tuple[dict[str, Scalar], dict[str, Scalar]]:
    """A step's values and 64-bit integers by name; names of all optimizers but the first have their number.

    Args:
        shares: of the optimizers.
        logged_norm: the total norm that the loop has logged, which replaces the measured one.
    """
    floats, ints = dict[str, Scalar](), dict[str, Scalar]()
    for number, share in enumerate(shares):
        own_floats, own_ints = share.values()
        if logged_norm is not None:
            for name in TOTALS:
                own_floats.pop(name, None)
        if len(shares) > 1:
            own_ints[POSITION] = share.position
        if number:
            own_floats = {f"{name}{OF}{number}": value for name, value in own_floats.items()}
            own_ints = {f"{name}{OF}{number}": value for name, value in own_ints.items()}
        floats |= own_floats
        ints |= own_ints
    if logged_norm is not None:
        floats["grad_norm"] = logged_norm
    return floats, ints


def evaluate(shares: Sequence[Share], floats: dict[str, float], ints: dict[str, int]) -> None:
    """Turn a step's measured values into recorded ones, in place; names of all but the first have their number."""
    if len(shares) == 1:
        shares[0].evaluate(floats, ints)
        return
    judged = []
    for number, share in enumerate(shares):
        own = _own_values(floats, number), _own_values(ints, number)
        share.evaluate(*own)
        judged.append(own)
    all_floats, all_ints = _together(judged)
    floats |= all_floats
    ints |= all_ints


def keep_faults(floats: dict[str, float], ints: dict[str, int]) -> None:
    """Keep of the recorded values of a step that is not whole those that are not finite, in place."""
    for name in [name for name, value in floats.items() if math.isfinite(value)]:
        del floats[name]
    if not ints.get("nonfinite"):
        ints.clear()


def _together(shares: Sequence[tuple[dict[str, float], dict[str, int]]]) -> tuple[dict[str, float], dict[str, int]]:
    """The values of a step with several optimizers: the norm over all, and the first parameter that is not finite.

    An update with non-finite gradients of one rank makes its parameters non-finite on all ranks, and so everything
    computed from them later in the step. These later gradients are not counted, as they are no fault of their rank.
    """
    floats, ints = dict[str, float](), dict[str, int]()
    corrupted = False
    for one_floats, one_ints in sorted(shares, key=lambda share: share[1].pop(POSITION)):
        if corrupted and one_ints.get("nonfinite"):
            one_ints |= {"nonfinite": 0}
        corrupted |= bool(one_ints.get("nonfinite")) or not _is_finite(one_floats)
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


def _own_values(values: dict[str, Any], number: int) -> dict[str, Any]:
    """Remove the values of one optimizer from a step's values, and return them."""
    if number:
        names = [name for name in values if name.endswith(f"{OF}{number}")]
        return {name.partition(OF)[0]: values.pop(name) for name in names}
    return {name: values.pop(name) for name in SHARED if name in values}
