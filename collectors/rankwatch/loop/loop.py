"""The training loop as the watch sees it: the boundaries between steps, and what happens there.

At a boundary the last step is written, orders are carried out, captures are made, and the next step begins. Orders
reach the job's registered hooks, state and probe through this module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from rankwatch import layout
from rankwatch.faults import Faults
from rankwatch.layout import Directive
from rankwatch.loop.checkpoint import Checkpoint, CheckpointFailures
from rankwatch.loop.directive import STOP, Follower, Rollback, end_process
from rankwatch.loop.loop_exit import LoopExit
from rankwatch.loop.state import MemoryTier, TrainingState
from rankwatch.loop.tracer import Tracer
from rankwatch.meter import StepMeter
from rankwatch.notices import LOOK_EVERY_NS, NoticeReader
from rankwatch.recorder import Recorder
from rankwatch.sink import Probe

PLACES_MAX: Final = 64
"""Saves whose position in the data is remembered: a few bytes each, or the size of a loader's state."""
TELL_LOST_EVERY_S: Final = 60.0
"""Dropped records are reported at most this often, as the sum since the last report."""


class Loop:
    """One rank's loop. Its methods catch all errors of the SDK; they wait only while an order holds the rank."""

    def __init__(
        self,
        launch: str,
        recorder: Recorder,
        meter: StepMeter,
        faults: Faults,
        *,
        now: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
        end_process: Callable[[], None] = end_process,
    ) -> None:
        self.probe: Probe | None = None
        self.state: TrainingState | None = None
        self.memory = MemoryTier(0, 1)
        self.save: Callable[[int], Any] | None = None
        self.restore: Callable[[Checkpoint], int] | None = None
        self.rolled_back: Checkpoint | None = None
        self.next_step = 0
        self.earlier = 0
        """Steps of earlier loops of this process: a later one counts from 0 again, and what is recorded goes on behind
        them. This is what is recorded less what the script counts."""
        self._first = -1
        """The first step of a later loop, as it is recorded."""
        self.in_step = False
        self.stopped = False
        """An order has ended this loop."""
        self._tracer = Tracer(recorder, meter, now)
        self.trace = self._tracer.order
        self.exit = LoopExit(
            recorder, meter, faults, lambda: self._report_lost(self._now()), self._cut_short, self._tracer.leave
        )
        self.failures = CheckpointFailures(meter, faults)
        self._launch = launch
        self._recorder = recorder
        self._meter = meter
        self._faults = faults
        self._now = now
        self._follower = Follower(recorder, launch, self, now=now, sleep=sleep, end_process=end_process)
        self._allowed = ["pause", "resume", "trace"]
        self._can: list[str] = []
        self._stays = ""
        self._every = 0
        """Steps between two captures; 0: none is made."""
        self._drawn: int | None = None
        self._places: dict[str, tuple[int | None, Any]] = {}
        self._restored_at = -1
        self._edge_ns = 0
        """The time at which the last step ended; 0 if the boundary took time since."""
        self._edge_cpu_ns = 0
        self._passed: tuple[int, ...] = ()
        """The step before which the boundary was passed already, and the step to go on from."""
        self._reported: dict[str, int] = {}
        self._next_reported_ns = 0
        self.notices: NoticeReader | None = None
        """Prints the agent's notices in the training output; only on one rank of a host."""
        self._next_look_ns = 0
        recorder.on_switch_off.append(self._take_slot)
        self._take_slot()

    def _take_slot(self) -> None:
        self._slot = self._recorder.directive.words

    def allow(self, *actions: str) -> None:
        """Declare which actions the job supports, besides pause, resume and trace."""
        self._allowed += [action for action in actions if action not in self._allowed]
        self.declare()

    def declare(self) -> None:
        """Record which actions the job supports by what it has registered so far."""
        can = list(self._allowed)
        if self.restore is not None:
            can.append("rollback_disk")
        self._every = 0 if self._would_stay else self.memory.every
        if self._every:
            can += ["checkpoint"] * ("checkpoint" not in can)
            can.append("rollback_memory")
        if {"rollback_disk", "rollback_memory"} & set(can):
            can.append("rollback")
        if can != self._can:
            self._can = can
            self._recorder.declare({"can": can})

    def without_memory(self, reason: str) -> None:
        """Make no more captures, because of `reason`: something of the script would stay where it is at a rollback."""
        if not self._stays:
            self._stays = reason
            self.declare()

    @property
    def _would_stay(self) -> str:
        """Why a capture in memory cannot restore everything; "" if it can."""
        if self.state is None or self.state.batches is None:
            return "watch.state has no data="
        return self._stays

    # ---- boundaries --------------------------------------------------------------------------------------------------

    def begin(self, step: int, *, adjoining: bool = False) -> int:
        """Pass the boundary before `step`.

        Args:
            step: the step that would come next.
            adjoining: the last step ended right here, so that its reading of the clocks can be used again.

        Returns:
            The step that begins, another one after a rollback; STOP if the loop must end.
        """
        if self.stopped:
            return STOP
        if self.in_step:
            self._meter.mask = 0  # an exception ended the last step: neither it nor its values are recorded
        try:
            passed, self._passed = self._passed, ()
            step = passed[1] if step in passed else self._pass(step)
            if step == STOP:
                return STOP
            if self.probe is not None:
                self._begin_probe(step)
            if adjoining and self._edge_ns:
                self._meter.begin(step, self._edge_ns, self._edge_cpu_ns)
            else:
                self._meter.choose_clocks()
                self._meter.begin(step, self._now(), self._meter.cpu())
        except Exception as error:  # noqa: BLE001 - the boundary
            self._faults.caught(error)
        self.in_step = True
        if self._tracer.active:
            self._tracer.step_begins(step)
        return step

    def asked_to_stop(self) -> bool:
        """Pass the boundary before the next step now, unless a step runs; returns whether the loop must end."""
        self.allow("stop")
        if not self.in_step and not self.stopped:
            try:
                step = self._pass(self.next_step)
                if step != STOP:
                    self._passed = self.next_step, step
                    self.next_step = step
            except Exception as error:  # noqa: BLE001 - the boundary
                self._faults.caught(error)
        return self.stopped

    def _pass(self, step: int) -> int:
        """Carry out the orders and make the capture that are due before `step`; returns the step to go on from."""
        if self._drawn is not None and self._drawn != self._batches_drawn():
            self.without_memory("batches are drawn before the step that uses them begins")
        self._drawn = None  # a step that an exception ends has drawn its batches within it
        follower = self._follower
        if self._slot[0] != follower.seen or step >= follower.hold_step:
            self._edge_ns = 0  # time may pass here
            step = follower.obey(step)
            if step == STOP:
                self.stopped = True
                self.exit.leave("stop")
                return STOP
        every = self._every
        if every and step % every == 0:
            self._edge_ns = 0
            with self._faults, self.failures.of("save", tier="memory"):
                self._keep(step)
        return step

    def _begin_probe(self, step: int) -> None:
        """Start the probe's step. Called before the meter's, so that open phases are not attributed to the step."""
        assert self.probe is not None
        try:
            self.probe.step_begin(step, self._meter.k)
        except Exception as error:  # noqa: BLE001 - the boundary
            self._faults.caught(error)

    def end(self) -> None:
        """End the step and write its record."""
        if self._tracer.active:
            self._tracer.step_ends()
        self.in_step = False
        meter = self._meter
        self.next_step = meter.step + 1
        if self.state is not None:
            self._drawn = self._batches_drawn()
        try:
            if self.probe is not None:
                self.probe.step_end(meter.step, meter.k)
        except Exception as error:  # noqa: BLE001 - the boundary
            self._faults.caught(error)
        try:
            self._edge_ns = now_ns = self._now()
            self._edge_cpu_ns = meter.cpu()
            meter.end(now_ns, self._edge_cpu_ns)
            if self._recorder.dropped and now_ns >= self._next_reported_ns:
                self._report_lost(now_ns)
            if self.notices is not None and now_ns >= self._next_look_ns:
                self._next_look_ns = now_ns + LOOK_EVERY_NS
                self.notices.look()
        except Exception as error:  # noqa: BLE001 - the boundary
            self._faults.caught(error)

    def _cut_short(self) -> None:
        """An exception ends the process: record what was not finite in the step that runs, which may be its cause."""
        if self.in_step:
            if self.probe is not None:
                self.probe.cut_short(self._meter.step, self._meter.k)
            self._meter.cut_short()

    def abandon(self) -> None:
        """Discard the step that has begun: there was no batch for it."""
        self.in_step = False
        self._tracer.interrupted("no batch")
        self._meter.abandon()

    def draws_from(self, batches: Any) -> None:
        """The loop draws its batches from here: part of what a full rollback moves back."""
        self.state = self.state or TrainingState({})
        self.state.batches, self._drawn = batches, None
        self.declare()

    def _batches_drawn(self) -> int | None:
        state = self.state
        return None if state is None or state.batches is None else state.batches.position

    def enter(self) -> None:
        """Begin the loop: the rank accepts orders from now on."""
        self.exit.enter()
        self.stopped = False
        self.declare()

    def number(self, step: int) -> int:
        """What is recorded for a step that the script counts as `step`: it goes on where the script counts anew."""
        recorded = step + self.earlier
        if recorded < self.next_step:
            if recorded < self.next_step - 1:  # else it is another batch of the same update
                self._first = self.next_step
            self.earlier = self.next_step - step
        return step + self.earlier

    def recorded(self, step: int, near: int) -> int:
        """What is recorded for the step of a script's checkpoint, which it numbers by this loop or by all loops."""
        return min(step, step + self.earlier, key=lambda one: abs(one - near))

    def _report_lost(self, now_ns: int) -> None:
        for reason, count in list(self._recorder.dropped.items()):
            fresh = count - self._reported.get(reason, 0)
            if fresh:
                self._meter.note("records_lost", {"reason": reason, "count": fresh})
                self._reported[reason] = count
        self._next_reported_ns = now_ns + int(TELL_LOST_EVERY_S * 1e9)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def saved(self, step: int, location: str, tier: str, fields: Mapping[str, Any]) -> str:
        """Register a checkpoint; return its id.

        Args:
            step: the step to go on from when it is loaded.
            location: where it is.
            tier: memory, local or remote.
            fields: seconds, bytes, shards (how many ranks save a part; 0 = every rank).
        """
        checkpoint = self._id(tier, step)
        if tier != "memory" and self.state is not None and self.state.batches is not None:
            self._places[checkpoint] = self.state.batches.position, self.state.batches.state()
            if len(self._places) > PLACES_MAX:
                del self._places[next(iter(self._places))]
        noted = {"checkpoint": checkpoint, "tier": tier, "location": location, "shards": 0, **fields}
        self._recorder.note("checkpoint_saved", noted, step, self._meter.k, self._now())
        return checkpoint

    def _id(self, tier: str, step: int) -> str:
        return f"{tier}:{self._launch}.{self._meter.k}:{step}"

    def gone(self, checkpoint: str, reason: str) -> None:
        """Record that a registered checkpoint does not exist any more."""
        fields = {"checkpoint": checkpoint, "reason": reason}
        self._recorder.note("checkpoint_gone", fields, self._meter.step, self._meter.k, self._now())

    def loaded(self, checkpoint: Checkpoint, seconds: float) -> None:
        """Record that a checkpoint was loaded."""
        fields = {"checkpoint": checkpoint.id, "seconds": seconds, "mode": checkpoint.mode}
        self._recorder.note("checkpoint_loaded", fields, checkpoint.step, self._meter.k, self._now())

    def _keep(self, step: int) -> None:
        if self.state is None or step == self._restored_at or self._id("memory", step) in self.memory:
            return  # the same state is in memory already: just restored from there, or captured by an order
        begun_ns = self._now()
        for checkpoint in self.memory.make_room():
            self.gone(checkpoint, "newer captures replaced it")
        capture = self.state.capture(step)
        seconds = (self._now() - begun_ns) * 1e-9
        self.memory.add(self.saved(step, "", "memory", {"seconds": seconds, "bytes": capture.size_bytes}), capture)

    # ---- orders (rankwatch.loop.directive.Actions) -------------------------------------------------------------------

    def proven(self, checkpoint: str) -> None:
        """See `Actions.proven`."""
        self.memory.proven = checkpoint

    def refusal(self, directive: Directive) -> str:
        """See `Actions.refusal`."""
        if directive.action not in self._can:
            return f"this job does not support {directive.action}; it supports {', '.join(self._can)}"
        return self._no_way_back(directive) if directive.action == "rollback" else ""

    def _no_way_back(self, directive: Directive) -> str:
        checkpoint = directive.checkpoint
        if directive.checkpoint_step < self._first:
            return f"{checkpoint} was saved before this loop began"
        if not checkpoint.startswith("memory:"):
            if self.restore is None:
                return f"{checkpoint} is on disk, and the job has no on_rollback"
            if self.state is not None and self.state.batches is not None and checkpoint not in self._places:
                return f"this process did not save {checkpoint}, so the position of its data is unknown"
            return ""
        if checkpoint not in self.memory:
            self.gone(checkpoint, "it was requested and is not in memory")
            return f"{checkpoint} is not in memory any more"
        why = self._would_stay
        return f"{checkpoint} cannot restore everything: {why}" if why else ""

    def checkpoint(self, step: int) -> str:
        """See `Actions.checkpoint`."""
        if self.save is None:
            with self.failures.of("save", tier="memory"):
                self._keep(step)
            return self.memory.kept[-1]
        begun_ns = self._now()
        with self.failures.of("save"):
            location = self.save(step - self.earlier)
        if location is None:
            return ""
        location = str(location)
        seconds = (self._now() - begun_ns) * 1e-9
        tier = "remote" if "://" in location and not location.startswith("file://") else "local"
        self.saved(step, location, tier, {"seconds": seconds, "bytes": 0})
        return location

    def rollback(self, directive: Directive) -> Rollback:
        """See `Actions.rollback`."""
        known = {"checkpoint": directive.checkpoint, "location": directive.location, "ordered": True}
        with self.failures.of("restore", **known):
            return self._go_back(directive)

    def _go_back(self, directive: Directive) -> Rollback:
        if not self._meter.k < directive.k <= layout.K_MAX:
            raise ValueError(f"rollback to k {directive.k}, but this attempt has k {self._meter.k}")
        self._tracer.fail("a rollback")
        begun_ns = self._now()
        checkpoint = Checkpoint(directive.checkpoint, directive.location, directive.checkpoint_step)
        if directive.checkpoint in self.memory and self.state is not None:
            capture = self.memory[directive.checkpoint]
            self.state.restore(capture)
            step = self._restored_at = capture.step
        elif self.restore is not None:
            step = self.recorded(int(self.restore(checkpoint)), checkpoint.step)
            if self.state is not None and self.state.batches is not None and checkpoint.id in self._places:
                self.state.batches.move_to(*self._places[checkpoint.id])
        else:
            raise ValueError(f"this process cannot load {directive.checkpoint}")
        self.memory.drop_after(step)
        self._meter.go_back(step, directive.k)
        fingerprint = self.probe.after_restore() if self.probe is not None else 0
        self.loaded(checkpoint, (self._now() - begun_ns) * 1e-9)
        self.rolled_back = checkpoint
        return Rollback(step, fingerprint)
