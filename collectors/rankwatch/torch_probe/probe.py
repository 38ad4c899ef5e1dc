"""`watch.torch(model, optimizer)`: joins the measuring parts and hands what they see to the recorder.

Nothing here makes a collective, waits for a device (`on_nonfinite="skip"` excepted) or raises into training. What lives
on a device is recorded when it has arrived, one or more steps later.
"""

from __future__ import annotations

import logging
import math
from typing import Any, Final, Literal, Protocol

import torch

from rankwatch.meter import EXACT_METRICS, Sink
from rankwatch.torch_probe.backward import BackwardMarks
from rankwatch.torch_probe.fingerprint import bit_sum, fingerprint
from rankwatch.torch_probe.gradients import LocalGradients, Scalar, total_norm
from rankwatch.torch_probe.late import CudaDevice, Device, LateValues
from rankwatch.torch_probe.measures import Measures, judge
from rankwatch.torch_probe.phases import AutomaticPhases
from rankwatch.torch_probe.updates import Updates
from rankwatch.torch_probe.watched_model import WatchedModel

FINGERPRINT_STEPS: Final = 10
"""Default distance of fingerprints. One is a pass over the parameters, up to 2 % of a small step on a CPU; every 10th
step that is 0.2 %, and a corrupted replica shows before many steps build on it."""

_FIRST_METRICS: Final = ("grad_norm", "local_grad_norm", "nonfinite", "nonfinite_first", "fingerprint")
_LOG: Final = logging.getLogger("rankwatch")


class Scaler(Protocol):
    """torch.amp.GradScaler, as far as it is read."""

    def scale(self, outputs: torch.Tensor) -> torch.Tensor:
        """Multiply by the loss scale."""

    def is_enabled(self) -> bool:
        """Whether it scales at all."""


class TorchProbe:
    """What torch can tell about a rank, measured while it trains. Implements `rankwatch.meter.Probe`.

    Metrics: `grad_norm` (the total norm, before the loop clips it), `local_grad_norm`, `nonfinite` and
    `nonfinite_first` (this rank's own gradients, before the reduction), `fingerprint`, `optimizer_skipped` (1 in steps
    whose update was left out because gradients were not finite), `device.PHASE` (seconds of device time). A loss scale
    is taken out of all norms, and what overflowed only because of it is a skip, not a non-finite gradient.

    Compile a model before it is handed over: hooks are not traced.
    """

    def __init__(
        self,
        sink: Sink,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        scaler: Scaler | None = None,
        grad_norm: bool = True,
        local_gradients: bool = True,
        phases: bool = True,
        fingerprint_every: int = FINGERPRINT_STEPS,
        replicated: bool | None = None,
        on_nonfinite: Literal["record", "skip"] = "record",
        device: Device | None = None,
    ) -> None:
        """Place the hooks on `model` and `optimizer`.

        Where parameters are sharded (DTensor, FSDP) their norm would take a collective, so both gradient parts are
        left out, and the fingerprint is that of the rank's own shards.

        Args:
            sink: where values go.
            model: what is trained; plain or wrapped by DistributedDataParallel, which is made first.
            optimizer: the one whose step changes the parameters.
            scaler: the job's torch.amp.GradScaler, if it uses one.
            grad_norm: measure the total norm. A loop that clips has it already and saves the cost by logging what
                `clip_grad_norm_` returned, a tensor, as `grad_norm`. Where another wrapper or the loop itself
                reduces gradients it is taken before the optimizer's step.
            local_gradients: measure this rank's gradients before the reduction. Correct if gradients were cleared
                since the last reduction.
            phases: mark forward, backward, optimizer and, with DDP, the wait for its reduction (collective).
            fingerprint_every: steps between fingerprints of the parameters; 0 for none.
            replicated: ranks of a peer group hold bit-equal parameters, so that fingerprints can be compared; None =
                under DDP they do. Say True where the loop itself keeps replicas equal.
            on_nonfinite: "skip" leaves out the update of a step whose total norm is not finite. After the reduction
                every rank sees the same norm, so all decide alike. On an accelerator this waits for the norm.
            device: the accelerator; found from the parameters if left out.

        Raises:
            ValueError: the arguments contradict each other.
        """
        _check(fingerprint_every, on_nonfinite, grad_norm)
        self._sink = sink
        self._model = watched = WatchedModel(model, replicated)
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._one = torch.ones((), dtype=torch.float64, device=watched.home)
        self._fingerprint_every = fingerprint_every
        self._skips = on_nonfinite == "skip"
        self._norm_wanted = grad_norm and not watched.sharded
        self._device = device or (CudaDevice() if watched.home.type == "cuda" else None)
        self._late = self._ring(self._device) if self._device is not None else None
        self._local: LocalGradients | None = None
        if local_gradients and not watched.sharded:
            self._local = LocalGradients(at_once=watched.reduces_early, on_host=self._device is None)
        self._phases = AutomaticPhases(sink, self._device, self._failed) if phases else None
        self._updates = Updates(sink)
        self._now = Measures()
        self._norm_is_logged = self._norm_was_logged = False
        self._told = False
        self._place_hooks(optimizer)
        sink.declare({"parameters": watched.names, "replicated": watched.replicated})
        for name in _FIRST_METRICS:  # the first sixteen names travel within the step's own entry
            sink.metric(name, exact=name in EXACT_METRICS)

    def _place_hooks(self, optimizer: torch.optim.Optimizer) -> None:
        self._marks = BackwardMarks(
            self._model.parameters,
            gradient=self._on_gradient,
            computed=self._on_computed,
            reduced=self._on_reduced,
            failed=self._failed,
        )
        self._handles = [
            optimizer.register_step_pre_hook(self._before_update),
            optimizer.register_step_post_hook(self._after_update),
        ]
        if self._phases is not None:
            self._handles += self._phases.watch_model(self._model.module)

    # ---- what the watch calls ----------------------------------------------------------------------------------------

    def step_begin(self, step: int, k: int) -> None:
        """A step begins; whatever an exception cut off in the last one is forgotten."""
        del step, k
        self._updates.step_begins()
        self._clear()

    def step_end(self, step: int, k: int) -> None:
        """Hand over what was measured in the step: host values at once, device values when they have arrived."""
        floats, ints = self._measured(step)
        if self._late is None:
            self._put({name: float(value) for name, value in floats.items()}, {n: int(v) for n, v in ints.items()})
            return
        self._late.collect()
        spans = self._phases.take_spans() if self._phases is not None else ()
        self._late.send(step, k, floats, ints, spans)

    def log(self, name: str, value: Any) -> None:
        """Record a tensor of one element under the user's name. On a device it is never waited for."""
        value = value.detach()  # else it would keep the whole graph of its step
        on_host = value.device.type == "cpu"
        if name == "grad_norm":
            # Judged with the step's other values: a loss scaler's overflow shows in the loop's norm too.
            self._now.norm, self._now.norm_scaled = float(value) if on_host else value, False
            self._norm_is_logged = True
        elif on_host:
            self._sink.put(self._sink.metric(name), float(value))
        else:
            self._now.logged[name] = value
        if not on_host and self._late is None:
            self._late = self._ring(CudaDevice())

    def after_restore(self) -> int:
        """Parameters were replaced: what was measured of the cut-off step is void.

        Returns:
            Their fingerprint; 0 where ranks need not be equal. Waits for the device: the rank is held.
        """
        self._clear()
        return fingerprint(self._model.own_parts) if self._model.replicated else 0

    def close(self) -> None:
        """Take all hooks away."""
        self._marks.remove()
        for handle in self._handles:
            handle.remove()

    # ---- marks within the step ---------------------------------------------------------------------------------------

    def _on_gradient(self, index: int, gradient: torch.Tensor) -> None:
        if self._local is not None:
            self._local.add(index, gradient)

    def _on_computed(self) -> None:
        self._updates.gradients_are_computed()
        if self._local is not None:
            self._local.flush()
        if self._phases is not None:
            self._phases.leave("backward")
        if self._model.reduces:
            self._sink.collective()
            if self._phases is not None:
                self._phases.enter("collective")

    def _on_reduced(self) -> None:
        if self._phases is not None:
            self._phases.leave("collective")
        if self._local is not None:
            self._now.local = self._local.result()
        if self._scaler is not None:
            self._now.scale = self._scaler.scale(self._one)
        if self._model.is_whole_after_backward and self._takes_norm():
            local = self._now.local if self._model.ddp is None else None
            self._now.norm = local.norm if local is not None else self._total_norm()

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        try:
            self._updates.begins()
            self._now.updated = True
            # Fused optimizers are called for every step and leave out the update themselves, on the device.
            self._now.overflowed = getattr(optimizer, "found_inf", None)
            if self._phases is not None:
                self._phases.enter("optimizer")
            if not self._model.is_whole_after_backward and self._takes_norm():
                self._now.norm = self._total_norm()
                if getattr(optimizer, "grad_scale", None) is None:
                    self._now.norm_scaled = False
            norm = self._now.norm
            if self._skips and norm is not None and not math.isfinite(norm):
                optimizer.zero_grad(set_to_none=True)  # optimizers pass over parameters without a gradient
                self._sink.put(self._sink.metric("optimizer_skipped"), 1.0)
        except Exception as error:  # noqa: BLE001 -- nothing of ours may end a user's step
            self._failed(error)

    def _after_update(self, *_: Any) -> None:
        try:
            if self._phases is not None:
                self._phases.leave("optimizer")
            self._updates.ends()
        except Exception as error:  # noqa: BLE001 -- the same
            self._failed(error)

    # ---- what the marks found ----------------------------------------------------------------------------------------

    def _measured(self, step: int) -> tuple[dict[str, Scalar], dict[str, Scalar]]:
        floats, ints = self._now.values()
        if self._fingerprint_every and step % self._fingerprint_every == 0:
            total = bit_sum(self._model.own_parts)
            if total is not None:
                ints["fingerprint"] = total
        return floats, ints

    def _put(self, floats: dict[str, float], ints: dict[str, int]) -> None:
        """Put host values into the step that ends now."""
        judge(floats, ints)
        for name, value in floats.items():
            self._sink.put(self._sink.metric(name), value)
        for name, number in ints.items():
            self._sink.put_exact(name, number)

    def _arrived(self, step: int, k: int, floats: dict[str, float], ints: dict[str, int]) -> None:
        """Record device values of a step that has ended."""
        judge(floats, ints)
        self._sink.late(step, k, {self._sink.metric(name): value for name, value in floats.items()}, ints)

    def _clear(self) -> None:
        """Nothing is known of a step that begins."""
        self._norm_was_logged, self._norm_is_logged = self._norm_is_logged, False
        self._marks.reset()
        if self._phases is not None:
            self._phases.reset()
        if self._local is not None:
            self._local.clear()
        self._now = Measures()

    def _failed(self, error: Exception) -> None:
        """Nothing of ours may end a user's forward, backward or step: count it, and tell the first time."""
        self._sink.drop("probe_errors")
        if not self._told:
            self._told = True
            _LOG.warning("a hook of the torch probe failed; training goes on", exc_info=error)

    def _ring(self, device: Device) -> LateValues:
        return LateValues(device, self._arrived, lambda count: self._sink.drop("late_values", count))

    def _takes_norm(self) -> bool:
        """Whether to measure the total norm; where the loop logged its own in the last step, it will do so again."""
        return self._norm_wanted and (self._skips or not self._norm_was_logged)

    def _total_norm(self) -> Scalar | None:
        return total_norm(self._model.gradients, on_host=self._device is None)


def _check(fingerprint_every: int, on_nonfinite: str, grad_norm: bool) -> None:
    if fingerprint_every < 0:
        raise ValueError(f"fingerprint_every must be 0 or more, not {fingerprint_every}")
    if on_nonfinite not in ("record", "skip"):
        raise ValueError(f'on_nonfinite must be "record" or "skip", not {on_nonfinite!r}')
    if on_nonfinite == "skip" and not grad_norm:
        raise ValueError('on_nonfinite="skip" decides by the total gradient norm: leave grad_norm on')
