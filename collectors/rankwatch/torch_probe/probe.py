"""`watch.torch(model, optimizer)`: combines the measuring parts and writes their values to the recorder.

Nothing here starts a collective, waits for a device (except with `on_nonfinite="skip"`) or raises into training. Values
on a device are recorded when they have arrived, one or more steps later.
"""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import Any, Final, Literal

import torch
from torch.utils.hooks import RemovableHandle

from rankwatch.meter import EXACT_METRICS, Sink
from rankwatch.torch_probe.arguments import Handed, Optimizer, Scaler
from rankwatch.torch_probe.backward import BackwardMarks
from rankwatch.torch_probe.fingerprint import bit_sum, fingerprint
from rankwatch.torch_probe.gradients import LocalGradients, Scalar, total_norm
from rankwatch.torch_probe.late import CudaDevice, Device, LateValues
from rankwatch.torch_probe.phases import EVAL, AutomaticPhases, Mark
from rankwatch.torch_probe.share import PLACE, SHARED, Share, together
from rankwatch.torch_probe.start import Start
from rankwatch.torch_probe.updates import Updates
from rankwatch.torch_probe.watched_model import WatchedModel, WatchedModels, active_ddp, gradients

FINGERPRINT_STEPS: Final = 10
"""Default steps between fingerprints. One is a pass over the parameters, up to 2 % of a small step on a CPU. Every 10th
step this is 0.2 %, and a corrupted replica is found before many steps depend on it."""

_FIRST_METRICS: Final = ("grad_norm", "local_grad_norm", "nonfinite", "nonfinite_first", "fingerprint")
_OF: Final = "\0"
"""Separates a value's name from the number of its optimizer; occurs in no metric's name."""
_LOG: Final = logging.getLogger("rankwatch")


class TorchProbe:
    """Measures a rank through torch while it trains. Implements `rankwatch.meter.Probe`.

    Metrics: `grad_norm` (the total norm, before the loop clips it), `local_grad_norm`, `nonfinite` and
    `nonfinite_first` (this rank's own gradients, before the reduction), `fingerprint`, `optimizer_skipped` (1 in steps
    whose update was skipped because gradients were not finite), `loss_scale`, `device.PHASE` (seconds of device time).
    Norms are divided by the loss scale, and an overflow caused by the scale is a skip, not a non-finite gradient.
    With several optimizers a norm covers all their updates of the step.

    Compile a model before passing it: hooks are not traced.
    """

    def __init__(
        self,
        sink: Sink,
        model: Any,
        optimizer: Any,
        *,
        scaler: Scaler | None = None,
        grad_norm: bool = True,
        local_gradients: bool = True,
        phases: bool = True,
        fingerprint_every: int = FINGERPRINT_STEPS,
        replicated: bool | None = None,
        on_nonfinite: Literal["record", "skip"] = "record",
        device: Device | None = None,
        placed: bool = True,
        earlier: tuple[Handed, ...] = (),
    ) -> None:
        """Register the hooks on models and optimizers. After the arguments are checked, nothing raises.

        If parameters are sharded (DTensor, FSDP), their norm would need a collective, so both gradient parts are left
        out, and the fingerprint covers the rank's own shards.

        Args:
            sink: where values go.
            model: the trained module, or a list or dict of them; plain or wrapped by DistributedDataParallel and
                torch.compile.
            optimizer: the optimizer of its parameters, or a list or dict of them.
            scaler: the job's torch.amp.GradScaler; if None, it is found at its first update.
            grad_norm: measure the total norm. A loop that clips can save the cost by logging the tensor that
                `clip_grad_norm_` returns as `grad_norm`. If another wrapper or the loop itself reduces gradients, the
                norm is taken before the optimizer's step.
            local_gradients: measure this rank's gradients before the reduction. Correct if gradients were cleared
                since the last reduction.
            phases: mark forward, backward, optimizer and, with DDP, the wait for its reduction (collective).
            fingerprint_every: steps between fingerprints of the parameters; 0 for none.
            replicated: whether ranks of a peer group hold bit-equal parameters, so that fingerprints can be compared;
                None: true under DDP. Pass True if the loop itself keeps replicas equal.
            on_nonfinite: "skip" skips the update of a step whose total norm is not finite. After the reduction every
                rank has the same norm, so all decide alike. On an accelerator this waits for the norm.
            device: the accelerator; if None, the device of the parameters.
            placed: the topology was declared, so that it is known which ranks are replicas of each other.
            earlier: earlier calls of `watch.torch`.

        Raises:
            TypeError: an argument is not a model or not an optimizer.
            ValueError: the arguments contradict each other.
        """
        _check(fingerprint_every, on_nonfinite, grad_norm)
        newest = Handed.of(model, optimizer, scaler, replicated)
        self.handed = (*(call.without(newest) for call in earlier), newest)
        self._sink = sink
        self._told = False
        self._fingerprint_every = fingerprint_every
        self._skips = on_nonfinite == "skip"
        self._logged: dict[str, Scalar] = {}
        self._logged_norm: Scalar | None = None
        self._norm_was_logged = False
        self._made = 0
        self._model = models = WatchedModels(self.handed, placed=placed)
        self._one = torch.ones((), dtype=torch.float64, device=models.home)
        self._norm_wanted = grad_norm and not models.sharded
        self._local_wanted = local_gradients and not models.sharded
        self._device = device or (CudaDevice() if models.home.type == "cuda" else None)
        self._late = self._ring(self._device) if self._device is not None else None
        self._phases = AutomaticPhases(sink, self._device, self._failed) if phases else None
        self._updates = Updates(sink)
        self._shares, self._owner = self._shared_out()
        self._start = Start(models, self._shares, grad_norm, local_gradients, fingerprint_every)
        self._handles: list[RemovableHandle] = []
        self._place_hooks()
        self._declare()
        for name in _FIRST_METRICS:  # named first, so that their values fit into the step entry (page 0)
            sink.metric(name, exact=name in EXACT_METRICS)

    def _shared_out(self) -> tuple[list[Share], list[Share]]:
        """Each optimizer's share; and each parameter's share by its index, the first one if no optimizer has it."""
        given = [(optimizer, call.scaler) for call in self.handed for optimizer in call.optimizers]
        owner: dict[int, int] = {}
        for number, (optimizer, _) in enumerate(given):
            owner |= {id(parameter): number for group in optimizer.param_groups for parameter in group["params"]}
        numbers = [owner.get(id(parameter), 0) for parameter in self._model.parameters]
        shares = []
        for number, (optimizer, scaler) in enumerate(given):
            own = [one for one, whose in zip(self._model.parameters, numbers, strict=True) if whose == number]
            local = None
            if self._local_wanted:
                local = LocalGradients(at_once=self._model.reduces_early, on_host=self._device is None)
            shares.append(Share(optimizer, own, scaler, local))
        return shares, [shares[number] for number in numbers]

    def _place_hooks(self) -> None:
        self._marks = BackwardMarks(
            self._model.parameters,
            gradient=self._on_gradient,
            computed=self._on_computed,
            reduced=self._on_reduced,
            failed=self._failed,
        )
        for share in self._shares:
            try:
                self._handles += [
                    share.optimizer.register_step_pre_hook(partial(self._before_update, share)),
                    share.optimizer.register_step_post_hook(partial(self._after_update, share)),
                ]
            except Exception as error:  # noqa: BLE001 -- a third-party optimizer without torch's hooks
                self._failed(error)
        for model in self._model.each:
            if model.ddp is None:
                look = Mark(partial(self._look_around, model), self._failed)
                self._handles.append(model.module.register_forward_pre_hook(look))
            if self._phases is not None:
                self._handles += self._phases.watch_model(model.module, model.bare)

    def _declare(self) -> None:
        self._sink.declare(
            {
                "parameters": self._model.names,
                "replicated": self._model.replicated,
                "optimizers": len(self._shares),
            }
        )

    # ---- what the watch calls ----------------------------------------------------------------------------------------

    def step_begin(self, step: int, k: int) -> None:
        """A step begins; values of a step that an exception ended are discarded."""
        del step, k
        self._updates.step_begins()
        if self._phases is not None:
            self._phases.step_begins()
        self._clear()

    def step_end(self, step: int, k: int) -> None:
        """Hand over what was measured in the step: host values at once, device values when they have arrived."""
        if self._phases is not None:
            self._phases.leave(EVAL)
        floats, ints = self._measured(step)
        if self._late is None:
            self._put({name: float(value) for name, value in floats.items()}, {n: int(v) for n, v in ints.items()})
        else:
            self._late.collect()
            spans = self._phases.take_spans() if self._phases is not None else ()
            self._late.send(step, k, floats, ints, spans)
        if not self._start.told:
            self._start.tell(self._sink)

    def log(self, name: str, value: Any) -> None:
        """Record a tensor of one element under the user's name, without waiting for its device."""
        value = value.detach()  # otherwise it would keep its step's whole graph in memory
        on_host = value.device.type == "cpu"
        if name == "grad_norm":
            # Kept for `_judge`: a loss scaler's overflow appears in the loop's norm too.
            self._logged_norm = float(value) if on_host else value
        elif on_host:
            self._sink.put(self._sink.metric(name), float(value))
        else:
            self._logged[name] = value
        if not on_host and self._late is None:
            self._late = self._ring(CudaDevice())

    def after_restore(self) -> int:
        """Parameters were replaced: discard the values of the interrupted step.

        Returns:
            Their fingerprint; 0 if ranks need not be equal. Waits for the device, which is harmless while held.
        """
        self._clear()
        return fingerprint(self._model.own_parts) if self._model.replicated else 0

    def close(self) -> None:
        """Remove all hooks."""
        self._marks.remove()
        for handle in self._handles:
            handle.remove()

    # ---- marks within the step ---------------------------------------------------------------------------------------

    def _look_around(self, model: WatchedModel, *_: Any) -> None:
        """Before a forward: find the DDP wrapper of a model that was passed without it."""
        ddp = active_ddp()
        if ddp is not None and model.found_within(ddp):
            for share in self._shares:
                if share.local is not None:
                    share.local.at_once = self._model.reduces_early
            self._declare()

    def _on_gradient(self, index: int, gradient: torch.Tensor) -> None:
        self._owner[index].gradient(index, gradient)

    def _on_computed(self) -> None:
        self._updates.gradients_are_computed()
        for share in self._shares:
            if share.local is not None:
                share.local.flush()
        if self._phases is not None:
            self._phases.leave("backward")
        if self._model.reduces:
            self._sink.collective()
            if self._phases is not None:
                self._phases.enter("collective")

    def _on_reduced(self) -> None:
        if self._phases is not None:
            self._phases.leave("collective")
        for share in self._shares:
            if not share.touched:
                continue
            share.reduced(self._one)
            if self._model.is_whole_after_backward and self._takes_norm():
                local = None if self._model.reduced_by_ddp else share.now.local
                share.now.norm = local.norm if local is not None else self._total_norm(share)
            if share.in_closure:
                self._gradients_are_final(share)

    def _before_update(self, share: Share, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            self._updates.begins()
            share.begins(self._one)
            # With a closure (Lightning, LBFGS) the optimizer itself calls forward and backward.
            share.in_closure = any(callable(argument) for argument in (*args[1:], *kwargs.values()))
            if not share.in_closure:
                self._gradients_are_final(share)
        except Exception as error:  # noqa: BLE001 -- an error of the probe must not end a user's step
            self._failed(error)

    def _gradients_are_final(self, share: Share) -> None:
        """The gradients now have the values that the optimizer will use."""
        if self._phases is not None:
            self._phases.enter("optimizer")
        now = share.now
        if not self._model.is_whole_after_backward and self._takes_norm():
            now.norm = self._total_norm(share)
            if getattr(share.optimizer, "grad_scale", None) is None:
                now.norm_scaled = False
        norm = now.norm if self._logged_norm is None else self._logged_norm
        if self._skips and norm is not None and not math.isfinite(norm):
            share.optimizer.zero_grad(set_to_none=True)  # optimizers skip parameters without a gradient
            self._sink.put(self._sink.metric("optimizer_skipped"), 1.0)

    def _after_update(self, share: Share, *_: Any) -> None:
        try:
            if self._phases is not None:
                self._phases.leave("optimizer")
            share.ends()
            share.place = self._made
            self._made += 1
            self._updates.ends()
        except Exception as error:  # noqa: BLE001 -- the same
            self._failed(error)

    # ---- what the marks found ----------------------------------------------------------------------------------------

    def _measured(self, step: int) -> tuple[dict[str, Scalar], dict[str, Scalar]]:
        """Values and 64-bit integers by name; names of all optimizers but the first have their number."""
        floats, ints = dict(self._logged), dict[str, Scalar]()
        for number, share in enumerate(self._shares):
            own_floats, own_ints = share.values()
            if self._logged_norm is not None:
                own_floats.pop("grad_norm", None)
            if len(self._shares) > 1:
                own_ints[PLACE] = share.place
            if number:
                own_floats = {f"{name}{_OF}{number}": value for name, value in own_floats.items()}
                own_ints = {f"{name}{_OF}{number}": value for name, value in own_ints.items()}
            floats |= own_floats
            ints |= own_ints
        if self._logged_norm is not None:
            floats["grad_norm"] = self._logged_norm
        if self._fingerprint_every and step % self._fingerprint_every == 0:
            total = bit_sum(self._model.own_parts)
            if total is not None:
                ints["fingerprint"] = total
        return floats, ints

    def _judge(self, floats: dict[str, float], ints: dict[str, int]) -> None:
        """Turn measured values into recorded ones, in place."""
        if len(self._shares) == 1:
            self._shares[0].judge(floats, ints)
            return
        judged = []
        for number, share in enumerate(self._shares):
            own = _own(floats, number), _own(ints, number)
            share.judge(*own)
            judged.append(own)
        all_floats, all_ints = together(judged)
        floats |= all_floats
        ints |= all_ints

    def _put(self, floats: dict[str, float], ints: dict[str, int]) -> None:
        """Record host values of the step that ends now."""
        self._judge(floats, ints)
        for name, value in floats.items():
            self._sink.put(self._sink.metric(name), value)
        for name, number in ints.items():
            self._sink.put_exact(name, number)

    def _arrived(self, step: int, k: int, floats: dict[str, float], ints: dict[str, int]) -> None:
        """Record device values of a step that has ended."""
        self._judge(floats, ints)
        self._sink.late(step, k, {self._sink.metric(name): value for name, value in floats.items()}, ints)

    def _clear(self) -> None:
        """Discard all values of the last step."""
        self._norm_was_logged = self._logged_norm is not None
        self._logged_norm = None
        self._logged.clear()
        self._made = 0
        self._marks.reset()
        for place, share in enumerate(self._shares):
            share.clear()
            share.place = len(self._shares) + place  # after those that made an update

    def _failed(self, error: Exception) -> None:
        """Count an error of the probe, and log the first; none may end a user's forward, backward or step."""
        self._sink.drop("probe_errors")
        if not self._told:
            self._told = True
            _LOG.warning("a hook of the torch probe failed; training goes on", exc_info=error)

    def _ring(self, device: Device) -> LateValues:
        return LateValues(device, self._arrived, lambda count: self._sink.drop("late_values", count))

    def _takes_norm(self) -> bool:
        """Whether to measure the total norm; a loop that logged its own in the last step is expected to do so again."""
        return self._norm_wanted and (self._skips or not self._norm_was_logged)

    def _total_norm(self, share: Share) -> Scalar | None:
        return total_norm(gradients(share.parameters), on_host=self._device is None)


def _own(values: dict[str, Any], number: int) -> dict[str, Any]:
    """Remove the values of one optimizer from a step's values, and return them."""
    if number:
        names = [name for name in values if name.endswith(f"{_OF}{number}")]
        return {name.partition(_OF)[0]: values.pop(name) for name in names}
    return {name: values.pop(name) for name in SHARED if name in values}


def _check(fingerprint_every: int, on_nonfinite: str, grad_norm: bool) -> None:
    if fingerprint_every < 0:
        raise ValueError(f"fingerprint_every must be 0 or more, not {fingerprint_every}")
    if on_nonfinite not in ("record", "skip"):
        raise ValueError(f'on_nonfinite must be "record" or "skip", not {on_nonfinite!r}')
    if on_nonfinite == "skip" and not grad_norm:
        raise ValueError('on_nonfinite="skip" decides by the total gradient norm: leave grad_norm on')
