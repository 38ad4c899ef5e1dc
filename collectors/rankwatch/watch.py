"""The interface for training scripts: the watch that `rankwatch.start(...)` returns.

After `start` nothing here raises into the training loop, waits, or grows: errors are counted, and the last one is kept
and logged at most once a minute. Invalid setup raises ValueError. There are three exceptions: an order may hold the
rank, a trace that a person ordered waits for devices, and the process ends if a rollback has begun and no `go` comes.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from rankwatch.faults import Faults
from rankwatch.identity import RankIdentity
from rankwatch.loop import Checkpoint, Loop, advised_checkpoint, stepping
from rankwatch.loop.directive import end_process
from rankwatch.loop.state import Capture, EpochBatches, MemoryTier, TrainingState
from rankwatch.meter import NOTHING, StepMeter
from rankwatch.notices import NoticeReader, say
from rankwatch.recorder import Recorder
from rankwatch.stacks import StackFile
from rankwatch.values import Values

if TYPE_CHECKING:
    from rankwatch.torch_probe.watched_model import Handed

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


class Watch:
    """One rank's watch, created by `rankwatch.start`. For the training thread.

    `errors` and `last_error` report errors of the SDK, which training does not see.
    """

    def __init__(
        self,
        identity: RankIdentity,
        recorder: Recorder,
        *,
        directory: str | None = None,
        placed: bool = False,
        now: Callable[[], int] = time.monotonic_ns,
        cpu: Callable[[], int] | None = None,
        sleep: Callable[[float], None] = time.sleep,
        end_process: Callable[[], None] = end_process,
    ) -> None:
        self.identity = identity
        self._directory = directory
        self._place = placed, identity.pp, identity.device_uuid
        self._torch_parts: dict[str, Any] = {}
        self._handed: weakref.WeakSet[Any] = weakref.WeakSet()
        """All models and optimizers that were handed over."""
        self._recorder = recorder
        self._faults = Faults(recorder, now)
        self._meter = StepMeter(recorder, now=now, cpu=cpu)
        self._loop = Loop(
            identity.launch, recorder, self._meter, self._faults, now=now, sleep=sleep, end_process=end_process
        )
        self._phases = self._meter.phases
        self._values = Values(recorder, self._meter, self._loop, self._faults)
        self.stacks: StackFile | None = None

    # ---- setup -------------------------------------------------------------------------------------------------------

    def torch(self, model: Any, optimizer: Any, **parts: Any) -> None:
        """Measure through torch: gradient norms, non-finite gradients, fingerprints, waits, device values.

        A further call adds models and optimizers; its `parts` then apply to all. After the arguments are checked,
        nothing raises. One line in the output of rank 0 says what is watched.

        Args:
            model: the trained module, as the loop calls it (a DDP wrapper included), or a list or dict of them.
            optimizer: its optimizer, or a list or dict of them; wrappers of frameworks are accepted.
            parts: see `rankwatch.torch_probe.TorchProbe`; each is optional.

        Raises:
            TypeError: an argument is not a model or not an optimizer.
            ValueError: the arguments contradict each other.
        """
        from rankwatch.torch_probe import TorchProbe  # noqa: PLC0415 - torch only for those who ask for it

        own = {name: parts.pop(name) for name in ("scaler", "replicated") if name in parts}
        parts = self._torch_parts | parts
        earlier = self._loop.probe
        handed = earlier.handed if isinstance(earlier, TorchProbe) else ()
        probe = TorchProbe(self._meter, model, optimizer, place=self._place, earlier=handed, **own, **parts)
        if earlier is not None:
            earlier.close()
        self._loop.probe, self._torch_parts = probe, parts
        self._see(probe.handed[-1])

    def _see(self, handed: Handed) -> None:
        """Declare another model, or another optimizer, if training has begun without it."""
        models = [model for _, model in handed.models if model not in self._handed]
        optimizers = [one for one in handed.optimizers if one not in self._handed]
        self._handed.update([*models, *optimizers])
        if optimizers and self._meter.begun > self._loop.in_step:
            names = ", ".join(type(one).__name__ for one in (*models, *optimizers))
            kind = "model" if models else "optimizer"
            self._changed(kind, f"another {kind}: {names}")

    def _changed(self, kind: str, what: str) -> None:
        """Declare a change of the training that was detected and not declared by the script: `model`, `optimizer` or
        `work`. By rank 0 alone.
        """
        if self.identity.rank == 0:
            with self._faults:
                self._meter.note("declared", {"kind": kind, "what": what, "detail": ""})

    def state(self, *, data: Any = None, keep: int = 0, every: int = 100, **objects: Any) -> None:
        """Register what a rollback must restore.

        Args:
            data: a callable that builds an iterator of batches at a position (batches already drawn), or an iterable
                with `state_dict` and `load_state_dict`. Read them from `batches`, within their step; `over` needs none.
                Without data no captures are made.
            keep: captures kept in host memory, each a whole copy of the registered state; 0: none. With 2 or more, one
                place is reserved for the newest capture that proved good.
            every: steps between two captures. A capture is proven good by 20 clean steps after it and about 2 s: choose
                more than that, or it is replaced before it is proven.
            objects: model, optimizer, scheduler, scaler, ...: anything with `state_dict` and `load_state_dict`.

        Raises:
            ValueError: an object without state, or a number out of range.
        """
        loop = self._loop
        loop.memory = MemoryTier(keep, every)
        if keep == 1 and self.identity.rank == 0:
            say(f"keep=1: every {every} steps the only capture is replaced, after a fault too; keep=2 reserves a place")
        loop.state = TrainingState(objects, data)
        loop.declare()

    @property
    def batches(self) -> Iterator[Any]:
        """The batches of `state(data=...)`: one iterator, which a full rollback moves back as well.

        Raises:
            ValueError: `state` was called without data, or not at all.
        """
        if self._loop.state is None or self._loop.state.batches is None:
            raise ValueError("watch.batches needs watch.state(data=...)")
        return self._loop.state.batches

    def on_checkpoint(self, save: _Hook) -> _Hook:
        """Decorator: `save(step)` saves the state at the boundary before `step` and returns its location.

        One with a scheme (`s3://...`) is considered to survive the host. None: it saves soon, and registers the save.
        """
        self._loop.save = save
        self._loop.allow("checkpoint")
        return save

    def on_rollback(self, restore: _Hook) -> _Hook:
        """Decorator: `restore(checkpoint)` loads a `Checkpoint` from disk and returns the step to go on from.

        It must restore everything that belongs to that step, including the position in the data and the script's own
        counters.
        """
        self._loop.restore = restore
        self._loop.declare()
        return restore

    @property
    def rolled_back(self) -> Checkpoint | None:
        """The checkpoint of the last rollback inside this process, with its mode; None before the first."""
        return self._loop.rolled_back

    def allow(self, *actions: str) -> None:
        """Declare further actions that this job supports, for instance `relaunch` with a custom launcher."""
        self._loop.allow(*actions)

    def report_grace(self, seconds: float) -> None:
        """Declare how long the launcher waits between asking the ranks to end and killing them."""
        self._loop.exit.grace_s = seconds
        self._recorder.declare({"grace_s": seconds})

    @property
    def resume(self) -> Checkpoint | None:
        """The newest good checkpoint for a relaunch, as the service advises; None without advice.

        With several hosts, let rank 0 read and broadcast it, so that all ranks load the same one.
        """
        if self._directory is None:
            return None
        with self._faults:  # a bad file is no advice
            return advised_checkpoint(self._directory, self.identity.job)
        return None

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def steps(self, max_steps: int, start: int = 0) -> Iterator[int]:
        """Yield the steps from `start` to `max_steps` - 1; orders are carried out between them.

        After a rollback the steps go on from the restored one; a stop ends them. However the loop is left, the rank
        accepts no further orders until another loop begins, which is recorded after it.
        """
        return stepping.steps(self._loop, max_steps, start)

    def over(
        self,
        loader: Iterable[Any],
        *,
        epochs: int = 1,
        set_epoch: Callable[[int], object] | None = None,
        start: int = 0,
    ) -> Iterator[tuple[int, Any]]:
        """Yield step and batch for each batch of a loader; orders are carried out between them, as with `steps`.

        Waiting for a batch is marked as `data_wait`. A rollback moves the loader back too: by its `state_dict`, if it
        has one, else by drawing the epoch's batches anew and skipping.

        Args:
            loader: yields the batches of one epoch each time it is iterated over.
            epochs: how often.
            set_epoch: called with an epoch's number before it begins; None: that of the loader or of its sampler, if
                there are several epochs.
            start: the first step, as after a relaunch. Batches of earlier steps are skipped, but not those of a loader
                with `load_state_dict`, which the script restores.

        Raises:
            ValueError: `state` was called with `data`, which is read from `batches`.
        """
        loop = self._loop
        if loop.state is not None and not isinstance(loop.state.batches, EpochBatches | None):
            raise ValueError(
                "watch.over has a loader of its own: leave data= out of watch.state, or read watch.batches"
            )
        batches = EpochBatches(loader, epochs, set_epoch)
        batches.skip(start)
        loop.draws_from(batches)
        return stepping.over(loop, batches, partial(self.phase, "data_wait"), start)

    def step(self, step: int | None = None) -> AbstractContextManager[int]:
        """One step, for loops that cannot use `steps`: `with watch.step() as step: ...`; `close` at the end.

        Args:
            step: its number; if None, the one after the last. After a rollback the `with` returns the restored step,
                whatever was passed. Such a loop is stopped only if it asks `should_stop`. A loop that numbers its steps
                itself does not move its counter back, so it has no captures.
        """
        return stepping.SingleStep(self._loop, step)

    def begin(self, step: int | None = None) -> int:
        """Begin a step, where a `with` cannot stand around it; returns its number. See `step`."""
        return stepping.SingleStep(self._loop, step).__enter__()

    def end(self) -> None:
        """End the step that `begin` began; no effect if none runs."""
        if self._loop.in_step:
            self._loop.end()

    @property
    def should_stop(self) -> bool:
        """Whether the loop should end now, for loops that do not use `watch.steps`: read it between two steps.

        Orders are carried out here: a pause waits here, and a rollback is done when it returns. A script that asks
        declares that its job supports stop; after a stop no further step is recorded.
        """
        return self._loop.asked_to_stop()

    def leave(self) -> None:
        """End the loop while the process continues; it accepts orders again from the next `begin` on."""
        self._loop.exit.leave("end")

    def failed(self, kind: str, message: str) -> None:
        """An exception has ended the rank, as somebody else has seen it."""
        self._loop.exit.crashed(type(kind, (Exception,), {})(message), None)

    def pause(self, name: str = "eval") -> stepping.TrainingPause:
        """A part that is no training, between two steps or within one; a context manager and a decorator.

        It is a phase outside of the step's work; the step that it is in is not compared with others.
        """
        return stepping.TrainingPause(self._loop, self._meter, self._faults, name)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A named part of the step: data_wait, forward, backward, collective, optimizer, checkpoint_save, eval, ..."""
        try:
            phase = self._phases[name]
            return NOTHING if phase.since else phase
        except Exception:  # noqa: BLE001 - the boundary: a new name, or something that is no name
            return self._new_phase(name)

    def _new_phase(self, name: str) -> AbstractContextManager[None]:
        with self._faults:
            return self._meter.phase(name)
        return NOTHING

    def log(self, **values: Any) -> None:
        """Record values of this step: numbers, or tensors, without waiting for a device. NaN and Inf are values.

        Between two steps, as in a logging callback, they belong to the step that has ended. A tensor on an accelerator
        is recorded only within a step and after a call of `torch(...)`; otherwise it is dropped and counted.
        """
        self._values.log(values)

    def declare(self, what: str, detail: str = "") -> None:
        """Declare that training changes intentionally from this step on: its loss and its step time may change.

        Changes of a logged learning rate, batch size or token count (`lr`, `batch_size`, `tokens`) need no call.

        Args:
            what: the change in a word: "curriculum", "data mix", "sequence length".
            detail: further text for people who read it later.
        """
        with self._faults:
            self._meter.note("declared", {"what": str(what), "detail": str(detail)})

    def checkpoint_saved(
        self,
        step: int,
        location: str,
        *,
        tier: str = "local",
        seconds: float = 0.0,
        size_bytes: int = 0,
        shards: int = 0,
    ) -> None:
        """Register a checkpoint that the loop itself saved.

        Args:
            step: the step to go on from when it is loaded.
            location: where it is; passed to `on_rollback` and returned by `resume`.
            tier: local survives the processes, remote survives the hosts.
            seconds: how long training stood still for it.
            size_bytes: size of this rank's part.
            shards: how many ranks save a part of it and call this; 0: every rank.
        """
        with self._faults:
            fields = {"seconds": seconds, "bytes": size_bytes, "shards": shards}
            loop = self._loop
            loop.saved(loop.recorded(step, loop.next_step + loop.in_step), location, tier, fields)

    def checkpoint_loaded(self, checkpoint: Checkpoint, seconds: float = 0.0) -> None:
        """Record that the loop loaded a checkpoint, for instance the one from `resume`."""
        with self._faults:
            self._loop.loaded(checkpoint, seconds)

    def capture(self, step: int) -> Capture:
        """Copy the registered state at the boundary before `step`.

        Raises:
            ValueError: `state` was not called.
        """
        return self._registered().capture(step)

    def restore(self, capture: Capture) -> int:
        """Load a capture in place; return the step to go on from.

        Raises:
            ValueError: `state` was not called.
        """
        self._registered().restore(capture)
        if self._loop.probe is not None:
            self._loop.probe.after_restore()
        return capture.step

    def _registered(self) -> TrainingState:
        if self._loop.state is None:
            raise ValueError("nothing to capture or restore: call watch.state(...) first")
        return self._loop.state

    # ---- life --------------------------------------------------------------------------------------------------------

    @property
    def attempt(self) -> str:
        """LAUNCH.k of the step that runs now: k counts the rollbacks inside this process."""
        return f"{self.identity.launch}.{self._meter.k}"

    @property
    def errors(self) -> int:
        """Number of errors of the SDK, which training did not see."""
        return self._faults.count

    @property
    def last_error(self) -> Exception | None:
        """The newest error of the SDK, without its traceback; None without one."""
        return self._faults.last

    @property
    def recording(self) -> bool:
        """Whether there is a recorder file."""
        return self._recorder.path is not None

    def crashed(self, error: BaseException, trace: TracebackType | None) -> None:
        """Record the exception that ends this process."""
        self._loop.exit.crashed(error, trace)

    def say_notices(self, path: str, since_unix_ns: int) -> None:
        """Print the notices that the host's agent writes to this file from this time on in the training output."""
        self._loop.notices = NoticeReader(path, since_unix_ns, say)

    def at_exit(self) -> None:
        """Python shuts down: record what ends this process, unless that was recorded, and end the watch.

        The recorder's lock is kept until the process is gone, since only then is it known how the process ended.
        """
        self._loop.exit.process_ends(self._loop.in_step)
        self._end()

    def close(self) -> None:
        """End the watch and close the recorder file while the process goes on. Safe to call twice."""
        atexit.unregister(self.at_exit)
        self._end()
        with self._faults:
            self._recorder.close()

    def _end(self) -> None:
        with self._faults:
            if self._loop.probe is not None:
                self._loop.probe.close()
                self._loop.probe = None
            # A process that ends within a step has not left its loop in order: it must not be reported as finished.
            if not self._loop.in_step:
                if self._meter.mask:
                    self._meter.flush()
                self._loop.exit.leave("end")
            self._loop.exit.record()
            if self._loop.notices is not None:
                self._loop.notices.look()
                self._loop.notices = None
            if self.stacks is not None:
                self.stacks.close()
                self.stacks = None
