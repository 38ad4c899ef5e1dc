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

from rankwatch.meter import EXACT_METRICS
from rankwatch.sink import Sink
from rankwatch.torch_probe.device import NO_SPANS, CudaDevice, Device
from rankwatch.torch_probe.device_times import DeviceTimes
from rankwatch.torch_probe.fingerprint import bit_sum, fingerprint
from rankwatch.torch_probe.gradients import BackwardMarks, LocalGradients, LocalResult, Scalar, Updates, total_norm
from rankwatch.torch_probe.late import LateValues
from rankwatch.torch_probe.phases import AutomaticPhases, Mark
from rankwatch.torch_probe.sharded import ShardedModels, sharded_models
from rankwatch.torch_probe.share import Share, evaluate, keep_faults, measured, shared_out
from rankwatch.torch_probe.start import OVERHEAD_MAX, Sampling, Start
from rankwatch.torch_probe.topology import placed_by
from rankwatch.torch_probe.watched_model import (
    Handed,
    Optimizer,
    Scaler,
    WatchedModel,
    WatchedModels,
    active_ddp,
    check_parts,
    check_skip,
    gradients,
    is_distributed,
)

FINGERPRINT_STEPS: Final = 10
"""Default steps between fingerprints. One is a pass over the parameters, up to 2 % of a small step on a CPU. Every 10th
step this is 0.2 %, and a corrupted replica is found before many steps depend on it."""

_FIRST_METRICS: Final = ("grad_norm", "local_grad_norm", "nonfinite", "nonfinite_first", "fingerprint", "lr")
_NO_STEP: Final = -1, -1
_LOG: Final = logging.getLogger("rankwatch")


class TorchProbe:
    """Measures a rank through torch while it trains. Implements `rankwatch.sink.Probe`.

    Metrics: `grad_norm` (the total norm, before the loop clips it), `local_grad_norm`, `nonfinite` and
    `nonfinite_first` (this rank's own gradients, before the reduction), `fingerprint` (of sharded models `grad_norm.N`
    and `fingerprint.N`, each rank's own slices, of which the service makes the total), `optimizer_skipped` (1 in steps
    whose update was skipped because gradients were not finite), `loss_scale`, `lr` (the largest learning rate of any
    parameter group); of a device the seconds in `device_timer`. Norms are divided by the loss scale, and an overflow
    caused by the scale is a skip, not a non-finite gradient. With several optimizers a norm covers all their updates of
    the step.

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
        overhead_max: float = OVERHEAD_MAX,
        device: Device | None = None,
        place: tuple[bool, int, str] = (True, 0, ""),
        earlier: tuple[Handed, ...] = (),
    ) -> None:
        """Register the hooks on models and optimizers. After the arguments are checked, nothing raises.

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
                rank has the same norm, so all decide alike. On an accelerator this waits for the norm. Of a model that
                is divided over ranks it takes the norm that the script logs, with `grad_norm=False`.
            overhead_max: largest part of the training time that the total norm may take; where steps are too short for
                it, it is left out in some; not with "skip", a loss scaler, several optimizers or no local gradients.
            device: the accelerator; if None, the device of the parameters.
            place: whether the topology was declared, so that it is known which ranks are replicas of each other, the
                pipeline stage in it, and the device's UUID, if it is known. A topology that was not declared is read
                from meshes and frameworks, and a UUID that is not known from torch; both are then declared.
            earlier: earlier calls of `watch.torch`.

        Raises:
            TypeError: an argument is not a model or not an optimizer.
            ValueError: the arguments contradict each other.
        """
        check_parts(fingerprint_every, on_nonfinite, overhead_max)
        newest = Handed.of(model, optimizer, scaler, replicated)
        self.handed = (*(call.without(newest) for call in earlier), newest)
        self._sink = sink
        self._reported = False
        self._fingerprint_every = fingerprint_every
        self._skips = on_nonfinite == "skip"
        self._logged: dict[str, Scalar] = {}
        self._logged_norm: Scalar | None = None
        self._norm_was_logged = False
        self._made, self._cut_short = 0, _NO_STEP
        placed, stage, uuid = place
        self._model = models = WatchedModels(self.handed, placed=placed)
        if self._skips:
            check_skip(divided=models.divided, grad_norm=grad_norm)
        self._one = torch.ones((), dtype=torch.float64, device=models.home)
        self._topology = {} if placed else placed_by(models, self._failed)
        self._sharded = sharded_models(models, self._topology.get("pp", stage), self._failed)
        known = self._sharded is not None or not models.sharded
        self._norm_wanted, self._local_wanted = grad_norm and known, local_gradients and known
        self._device = device or (CudaDevice(models.home) if models.home.type == "cuda" else None)
        self._late = self._ring(self._device) if self._device is not None else None
        self._home = self._device.describe(uuid, self._failed) if self._device else {"device_type": models.home.type}
        self._times = DeviceTimes(self._device, models, sink, self._failed) if self._device and phases else None
        timer = None if self._times is None else self._times.timer
        self._phases = AutomaticPhases(sink, timer, self._failed) if phases else None
        self._updates = Updates(sink)
        owned = models.parameters if self._sharded is None else self._sharded.owned
        self._shares, self._owner = shared_out(self.handed, models.parameters, owned, self._new_local)
        self._sampling = Sampling(overhead_max)
        wanted = grad_norm, local_gradients, fingerprint_every
        self._start = Start(models, self._sharded, self._shares, wanted, self._sampling)
        self._handles: list[RemovableHandle] = []
        self._place_hooks()
        self._declare()
        for name in _FIRST_METRICS:  # named first, so that their values fit into the step entry (page 0)
            sink.metric(name, exact=name in EXACT_METRICS)

    def _new_local(self) -> LocalGradients | None:
        return LocalGradients(on_host=self._device is None) if self._local_wanted else None

    def _place_hooks(self) -> None:
        self._marks = BackwardMarks(
            enumerate(self._model.parameters) if self._sharded is None else self._sharded.leaves(),
            gradients=self._on_gradients,
            summands=partial(self._on_gradients, summands=True),
            computed=self._on_computed,
            reduced=self._on_reduced,
            failed=self._failed,
        )
        self._marks.at_once = self._reduces_early
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
                mark = Mark(partial(self._look_around, model), self._failed)
                self._handles.append(model.module.register_forward_pre_hook(mark))
            if self._phases is not None:
                self._handles += self._phases.watch_model(model.module, model.bare)
            if self._sharded is not None:
                mark = Mark(partial(self._mark_gathered, self._sharded), self._failed)
                self._handles.append(model.module.register_forward_hook(mark))

    def _declare(self) -> None:
        fields = {"parameters": self._model.names} if self._sharded is None else self._sharded.declaration()
        fields |= {"replicated": self._model.replicated, "optimizers": len(self._shares)}
        self._sink.declare({**fields, **self._topology, **self._home})

    # ---- what the watch calls ----------------------------------------------------------------------------------------

    def step_begin(self, step: int, k: int) -> None:
        """A step begins; values of a step that an exception ended are discarded."""
        del k
        self._updates.step_begins()
        self._sampling.step_begins(step)
        if self._phases is not None:
            self._phases.step_begins()
        self._clear()

    def step_end(self, step: int, k: int) -> None:
        """Hand over what was measured in the step: host values at once, device values when they have arrived."""
        if self._phases is not None:
            self._phases.step_ends()
        floats, ints = self._measured()
        self._hand_over(step, k, floats, ints | self._fingerprints(step))
        self._start.step_ends(self._sink)

    def cut_short(self, step: int, k: int) -> None:
        """See `Probe`. Waits for the values of a device, for a short time."""
        self._cut_short = step, k
        self._hand_over(step, k, *self._measured())
        if self._late is not None:
            self._late.drain()

    def log(self, name: str, value: Any) -> None:
        """Record a tensor of one element under the user's name, without waiting for its device."""
        value = value.detach()  # otherwise it would keep its step's whole graph in memory
        on_host = value.device.type == "cpu"
        if name == "grad_norm":
            # Kept for `evaluate`: a loss scaler's overflow appears in the loop's norm too.
            self._logged_norm = float(value) if on_host else value
        elif on_host:
            self._sink.put(self._sink.metric(name), float(value))
        else:
            self._logged[name] = value
        if not on_host and self._late is None:
            self._late = self._ring(CudaDevice(value.device))

    def after_restore(self) -> int:
        """Discard the values of the interrupted step; see `Probe`. Waits for the device: harmless while held."""
        self._clear()
        if self._model.replicated:
            return fingerprint(self._model.own_parts)
        return 0 if self._sharded is None else self._sharded.shared_fingerprint()

    def close(self) -> None:
        """Remove all hooks."""
        self._marks.remove()
        if self._times is not None:
            self._times.remove()
        for handle in self._handles:
            handle.remove()

    # ---- marks within the step ---------------------------------------------------------------------------------------

    def _look_around(self, model: WatchedModel, *_: Any) -> None:
        """Before a forward: find the DDP wrapper of a model that was passed without it."""
        ddp = active_ddp()
        if ddp is not None and model.found_within(ddp):
            self._marks.at_once = self._reduces_early
            self._declare()

    @property
    def _reduces_early(self) -> bool:  # then a local gradient has to be read as soon as it is complete
        return self._local_wanted and (self._sharded is not None or self._model.reduces_early)

    def _mark_gathered(self, sharded: ShardedModels, *_: Any) -> None:
        """After a forward: FSDP2 has created the parameters whose gradients are this rank's own."""
        for index, leaf in sharded.gathered():
            self._marks.mark(index, leaf)

    def _on_gradients(self, found: dict[int, torch.Tensor], *, summands: bool = False) -> None:
        if self._sharded is not None:
            found = dict(part for index, gradient in found.items() for part in self._sharded.parts(index, gradient))
        one = len(self._shares) == 1
        for share in self._shares:
            own = found if one else {index: part for index, part in found.items() if self._owner[index] is share}
            if own:
                share.gradients(own, summands=summands)

    def _on_computed(self) -> None:
        self._updates.gradients_are_computed()
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
            whole = self._model if self._sharded is None else self._sharded
            if whole.is_whole_after_backward and self._takes_norm():
                self._take_norm(share, share.now.local if self._model.unreduced else None)
            if share.in_closure:
                self._gradients_are_final(share)

    def _before_update(self, share: Share, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            self._updates.begins()
            share.begins(self._one)
            self._look_at_groups(share)
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
        measured = now.slices if self._sharded is not None else self._model.is_whole_after_backward
        if not measured and self._takes_norm():
            self._take_norm(share)
            if getattr(share.optimizer, "grad_scale", None) is None:
                now.norm_scaled = False
        norm = now.norm if self._logged_norm is None else self._logged_norm
        if self._skips and norm is not None and not math.isfinite(norm):
            share.optimizer.zero_grad(set_to_none=True)  # optimizers skip parameters without a gradient
            self._sink.put(self._sink.metric("optimizer_skipped"), 1.0)

    def _look_at_groups(self, share: Share) -> None:
        """Record the learning rate, and a change of how many parameters the optimizer trains."""
        before = share.trains
        share.look_at_groups()
        rates = [one.rate for one in self._shares if one.rate is not None]
        if rates:
            self._sink.put(self._sink.metric("lr"), max(rates))
        if share.trains != before and (not is_distributed() or torch.distributed.get_rank() == 0):
            what = f"{share.trains} trained parameters instead of {before} ({type(share.optimizer).__name__})"
            self._sink.note("declared", {"kind": "model", "what": what, "detail": ""})

    def _after_update(self, share: Share, *_: Any) -> None:
        try:
            if self._phases is not None:
                self._phases.leave("optimizer")
            share.ends()
            share.position = self._made
            self._made += 1
            self._updates.ends()
        except Exception as error:  # noqa: BLE001 -- the same
            self._failed(error)

    # ---- what the marks found ----------------------------------------------------------------------------------------

    def _measured(self) -> tuple[dict[str, Scalar], dict[str, Scalar]]:
        floats, ints = measured(self._shares, self._logged_norm)
        return self._logged | floats, ints

    def _fingerprints(self, step: int) -> dict[str, Scalar]:
        if not self._fingerprint_every or step % self._fingerprint_every:
            return {}
        if self._sharded is not None and not self._model.replicated:
            return self._sharded.fingerprints()
        total = bit_sum(self._model.own_parts)
        return {} if total is None else {"fingerprint": total}

    def _hand_over(self, step: int, k: int, floats: dict[str, Scalar], ints: dict[str, Scalar]) -> None:
        if self._late is None:
            self._put(step, k, {n: float(one) for n, one in floats.items()}, {n: int(one) for n, one in ints.items()})
            return
        self._late.collect()
        self._late.send(step, k, floats, ints, NO_SPANS if self._times is None else self._times.take())

    def _evaluate(self, step: tuple[int, int], floats: dict[str, float], ints: dict[str, int]) -> None:
        evaluate(self._shares, floats, ints)
        if step == self._cut_short:
            keep_faults(floats, ints)

    def _put(self, step: int, k: int, floats: dict[str, float], ints: dict[str, int]) -> None:
        """Record host values of the step that ends now."""
        self._evaluate((step, k), floats, ints)
        for name, value in floats.items():
            self._sink.put(self._sink.metric(name), value)
        for name, number in ints.items():
            self._sink.put_exact(name, number)

    def _arrived(self, step: int, k: int, floats: dict[str, float], ints: dict[str, int]) -> None:
        """Record device values of a step that has ended."""
        self._evaluate((step, k), floats, ints)
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
            share.position = len(self._shares) + place  # after those that made an update

    def _failed(self, error: Exception) -> None:
        """Count an error of the probe, and log the first; none may end a user's forward, backward or step."""
        self._sink.drop("probe_errors")
        if not self._reported:
            self._reported = True
            _LOG.warning("a hook of the torch probe failed; training goes on", exc_info=error)

    def _ring(self, device: Device) -> LateValues:
        return LateValues(device, self._arrived, lambda count: self._sink.drop("late_values", count))

    def _takes_norm(self) -> bool:
        """Whether to measure the total norm; a loop that logged its own in the last step is expected to do so again."""
        if not self._norm_wanted or self._skips:
            return self._norm_wanted
        may_wait = self._local_wanted and len(self._shares) == 1 and not self._shares[0].scales
        return not self._norm_was_logged and (self._sampling.due or not may_wait)

    def _take_norm(self, share: Share, local: LocalResult | None = None) -> None:
        """Measure the gradients that the optimizer will use; `local`: they are these, as nobody reduces them."""
        on_host, begun_ns = self._device is None, self._sampling.now()
        if self._sharded is not None:
            share.now.slices = self._sharded.norms(share.parameters, on_host=on_host) or {}
        elif local is not None:
            share.now.norm = local.norm
            return
        else:
            share.now.norm = total_norm(gradients(share.parameters), on_host=on_host)
        self._sampling.took(self._sampling.now() - begun_ns)
