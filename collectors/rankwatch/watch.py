"""What a training script uses: `rankwatch.start(...)` and the watch it returns.

After `start` nothing here raises into the training loop, waits, or grows: what goes wrong is counted, the last error is
kept and logged at most once a minute. Setup that makes no sense raises ValueError. Exceptions are an ordered hold,
and the end of the process when a rollback was begun and nobody said go.
"""

from __future__ import annotations

import atexit
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar

from rankwatch import layout, stepping
from rankwatch.console import say
from rankwatch.directive import end_process
from rankwatch.faults import Faults
from rankwatch.identity import RankIdentity
from rankwatch.loop import Checkpoint, Loop
from rankwatch.meter import NOTHING, StepMeter
from rankwatch.notices import NoticeReader
from rankwatch.recorder import Recorder
from rankwatch.stacks import StackFile
from rankwatch.state import Capture, MemoryTier, TrainingState

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


class Watch:
    """One rank's watch. For the training thread. Made by `rankwatch.start`.

    `errors` and `last_error` tell what went wrong inside without training seeing it.
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
        self._placed = placed
        self._torch_parts: dict[str, Any] = {}
        self._recorder = recorder
        self._faults = Faults(recorder, now)
        self._meter = StepMeter(recorder, now=now, cpu=cpu)
        self._loop = Loop(
            identity.launch, recorder, self._meter, self._faults, now=now, sleep=sleep, end_process=end_process
        )
        self._phases = self._meter.phases
        self._floats = recorder.floats
        self._plain: dict[str, tuple[int, int]] = {}
        self.stacks: StackFile | None = None

    # ---- setup -------------------------------------------------------------------------------------------------------

    def torch(self, model: Any, optimizer: Any, **parts: Any) -> None:
        """Measure what torch can tell: gradient norms, non-finite gradients, fingerprints, waits, device values.

        A further call adds to what is watched; what it says of `parts` then holds for all. Once the arguments are known
        to be models and optimizers nothing raises. One line in the output of rank 0 says what is watched.

        Args:
            model: the module that is trained, as the loop calls it (a DDP wrapper included), or a list or dict of them.
            optimizer: its optimizer, or a list or dict of them, in whatever wrapper a framework has put around it.
            parts: see `rankwatch.torch_probe.TorchProbe`; each part can be left out.

        Raises:
            TypeError: something that is no model, or no optimizer.
            ValueError: arguments that contradict each other.
        """
        from rankwatch.torch_probe import TorchProbe  # noqa: PLC0415 - torch only for those who ask for it

        own = {name: parts.pop(name) for name in ("scaler", "replicated") if name in parts}
        parts = self._torch_parts | parts
        earlier = self._loop.probe
        handed = earlier.handed if isinstance(earlier, TorchProbe) else ()
        probe = TorchProbe(self._meter, model, optimizer, placed=self._placed, earlier=handed, **own, **parts)
        if earlier is not None:
            earlier.close()
        self._loop.probe, self._torch_parts = probe, parts

    def state(self, *, data: Any = None, keep: int = 0, every: int = 100, **objects: Any) -> None:
        """Register what a rollback must restore.

        Args:
            data: a callable that builds an iterator of batches at a position (batches already drawn), or an iterable
                with `state_dict` and `load_state_dict`. Read the batches from `batches`, within their step. Without
                it a rollback to memory would take back the weights alone, which is done only where mode `weights` is
                asked for.
            keep: captures kept in host memory, each a whole copy of the registered state; 0 = none. From 2 on, one of
                the places is reserved for the newest capture that proved good.
            every: steps between two captures. A capture is proven by 20 clean steps after it and some 2 s: take more
                than that, or it has been replaced before anybody knows that it is good.
            objects: model, optimizer, scheduler, scaler, ...: anything with `state_dict` and `load_state_dict`.

        Raises:
            ValueError: something that keeps no state, or numbers out of range.
        """
        loop = self._loop
        loop.memory = MemoryTier(keep, every)
        if keep == 1 and self.identity.rank == 0:
            say(f"keep=1: every {every} steps the only capture is replaced, after a fault too; keep=2 reserves a place")
        loop.state = TrainingState(objects, data)
        loop.declare()

    @property
    def batches(self) -> Iterator[Any]:
        """The batches of `state(data=...)`: one iterator, at the right position also after a rollback in full."""
        state = self._loop.state
        if state is None or state.batches is None:
            raise ValueError("watch.batches needs watch.state(data=...)")
        return state.batches

    def on_checkpoint(self, save: _Hook) -> _Hook:
        """Decorator: `save(step)` saves the state at the boundary before `step` and returns where it went.

        A place with a scheme (`s3://...`) is taken to survive the host.
        """
        self._loop.save = save
        self._loop.allow("checkpoint")
        return save

    def on_rollback(self, restore: _Hook) -> _Hook:
        """Decorator: `restore(checkpoint)` loads a `Checkpoint` from disk and returns the step to go on from.

        It takes back everything that belongs to that step: also where the data is, and what the script counts.
        """
        self._loop.restore = restore
        self._loop.declare()
        return restore

    @property
    def rolled_back(self) -> Checkpoint | None:
        """What training went back to last inside this process, and in which mode; None as long as it has not."""
        return self._loop.rolled_back

    def allow(self, *actions: str) -> None:
        """Declare what else this job can be told, for instance `relaunch` by a launcher of its own."""
        self._loop.allow(*actions)

    def tell_grace(self, seconds: float) -> None:
        """Declare how long the launcher waits between asking the ranks to end and killing them."""
        self._loop.grace_s = seconds
        self._recorder.declare({"grace_s": seconds})

    @property
    def resume(self) -> Checkpoint | None:
        """The newest good checkpoint for a relaunch, as the service advises; None without advice.

        With several hosts let rank 0 read it and broadcast it, so that all begin at the same one.
        """
        if self._directory is None:
            return None
        try:
            with open(layout.resume_path(self._directory, self.identity.job)) as file:
                advice = json.load(file)
            if advice["job"] != self.identity.job or not advice["checkpoint"]:
                return None
            return Checkpoint(str(advice["checkpoint"]), str(advice["location"]), int(advice["step"]), "relaunch")
        except FileNotFoundError:
            return None
        except Exception as error:  # noqa: BLE001 - the boundary: a bad file is no advice
            self._faults.caught(error)
            return None

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def steps(self, max_steps: int, start: int = 0) -> Iterator[int]:
        """Yield the steps from `start` to `max_steps` - 1; orders are obeyed between them.

        After a rollback it goes on from the restored step; a stop ends it. Leaving the loop, in whatever way, tells
        that this rank takes no further orders.
        """
        return stepping.steps(self._loop, max_steps, start)

    def step(self, step: int | None = None) -> AbstractContextManager[int]:
        """One step, for loops that cannot use `steps`: `with watch.step() as step: ...`; then `close` at the end.

        Args:
            step: its number; else the one after the last. After a rollback the number that comes out is the restored
                one, whatever was asked for. Such a loop cannot be told to stop, and one that numbers all its steps
                itself goes on counting from where it is: a rollback to memory takes back its weights alone.
        """
        return stepping.SingleStep(self._loop, step)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A named part of the step: data_wait, forward, backward, collective, optimizer, checkpoint_save, eval, ..."""
        try:
            phase = self._phases[name]
            return NOTHING if phase.since else phase
        except Exception:  # noqa: BLE001 - the boundary: a new name, or something that is no name
            return self._new_phase(name)

    def _new_phase(self, name: str) -> AbstractContextManager[None]:
        try:
            return self._meter.phase(name)
        except Exception as error:  # noqa: BLE001 - the boundary
            self._faults.caught(error)
            return NOTHING

    def log(self, **values: Any) -> None:
        """Record values of this step: numbers, or tensors, which are never waited for. NaN and Inf are values.

        Between two steps, as in a logging callback, they belong to the step that has ended. A tensor on an accelerator
        is recorded only within a step, after `torch(...)` was called; else it is dropped and counted.
        """
        floats, known, mask = self._floats, self._plain, 0
        for name, value in values.items():
            if value.__class__ is float and name in known:
                index, bit = known[name]
                floats[index] = value
                mask |= bit
            else:
                self._log_other(name, value)
        self._meter.mask |= mask

    def _log_other(self, name: str, value: Any) -> None:
        try:
            if hasattr(value, "detach"):
                self._log_tensor(name, value)
                return
            index = self._meter.metric(name)
            if self._recorder.is_exact(index):
                self._meter.put_exact(name, int(value))
                return
            self._meter.put(index, float(value))
            if index >= 0:
                self._plain[name] = index, 1 << index
        except Exception as error:  # noqa: BLE001 - the boundary
            self._faults.caught(error)

    def _log_tensor(self, name: str, value: Any) -> None:
        # The probe hands values over at the end of a step: what came between two steps would be forgotten.
        if self._loop.probe is not None and self._loop.in_step:
            self._loop.probe.log(name, value)
        elif value.device.type == "cpu":
            self._meter.put(self._meter.metric(name), float(value.detach()))
        else:
            self._recorder.drop("device_values")  # reading it would wait for the device; watch.torch(...) does not

    def declare(self, what: str, detail: str = "") -> None:
        """Tell that training changes on purpose from this step on: its loss and its step time may go elsewhere.

        A learning rate, a batch size or tokens that are logged (`lr`, `batch_size`, `tokens`) tell so by themselves.

        Args:
            what: the change in a word: "curriculum", "data mix", "sequence length".
            detail: whatever helps who reads it later.
        """
        try:
            self._meter.note("declared", {"what": str(what), "detail": str(detail)})
        except Exception as error:  # noqa: BLE001 - the boundary
            self._faults.caught(error)

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
        """Register a checkpoint that the loop saved by itself.

        Args:
            step: the step to go on from when it is loaded.
            location: what `on_rollback` and `resume` will be given.
            tier: local survives the processes, remote survives the hosts.
            seconds: how long training stood still for it.
            size_bytes: of this rank's part.
            shards: how many ranks save a part of it and call this; 0 = every rank.
        """
        try:
            fields = {"seconds": seconds, "bytes": size_bytes, "shards": shards}
            self._loop.saved(step, location, tier, fields)
        except Exception as error:  # noqa: BLE001 - the boundary
            self._faults.caught(error)

    def checkpoint_loaded(self, checkpoint: Checkpoint, seconds: float = 0.0) -> None:
        """Tell that the loop loaded a checkpoint, for instance the one that `resume` advised."""
        try:
            self._loop.loaded(checkpoint, seconds)
        except Exception as error:  # noqa: BLE001 - the boundary
            self._faults.caught(error)

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
        """Errors of ours that training did not see."""
        return self._faults.count

    @property
    def last_error(self) -> Exception | None:
        """The newest of them."""
        return self._faults.last

    @property
    def recording(self) -> bool:
        """Whether there is a recorder file."""
        return self._recorder.path is not None

    def crashed(self, error: BaseException, trace: TracebackType | None) -> None:
        """Note the exception that ends this process; the loop was not left then."""
        self._loop.crashed(error, trace)

    def say_notices(self, path: str) -> None:
        """Say in the training output what the agent of this host has to say; it leaves that in this file."""
        self._loop.notices = NoticeReader(path, say)

    def at_exit(self) -> None:
        """Python shuts down: tell what ends this process where nobody has yet, and end the watch.

        The recorder's lock goes with the process, which may take its time to end: only then is it known how it did.
        """
        self._loop.process_ends()
        self._end()

    def close(self) -> None:
        """End the watch and let the recorder file go, though the process goes on. Safe to call twice."""
        atexit.unregister(self.at_exit)
        self._end()
        try:
            self._recorder.close()
        except Exception as error:  # noqa: BLE001 - the boundary
            self._faults.caught(error)

    def _end(self) -> None:
        try:
            if self._loop.probe is not None:
                self._loop.probe.close()
                self._loop.probe = None
            # A process that ends in the middle of a step has not left its loop: something made it end.
            if not self._loop.in_step:
                if self._meter.mask:
                    self._meter.flush()
                self._loop.leave("end")
            self._loop.tell_left()
            if self._loop.notices is not None:
                self._loop.notices.look()
                self._loop.notices = None
            if self.stacks is not None:
                self.stacks.close()
                self.stacks = None
        except Exception as error:  # noqa: BLE001 - the boundary
            self._faults.caught(error)
