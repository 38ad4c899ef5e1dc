"""The training loop as the watch sees it: the boundaries between steps, and what happens there.

At a boundary the last step is written, orders are carried out, captures are made, and the next step begins. Orders
reach the job's registered hooks, state and probe through this module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any, Final, NamedTuple

from rankwatch import layout
from rankwatch.directive import STOP, Follower, Rollback, end_process
from rankwatch.ending import ENDS_PROCESS, breaking, described
from rankwatch.faults import Faults
from rankwatch.layout import Directive
from rankwatch.meter import Probe, StepMeter
from rankwatch.notices import LOOK_EVERY_NS, NoticeReader
from rankwatch.recorder import Recorder
from rankwatch.state import MemoryTier, TrainingState

PLACES_MAX: Final = 64
"""Saves whose position in the data is remembered: a few bytes each, or the size of a loader's state."""
TELL_LOST_EVERY_S: Final = 60.0
"""Dropped records are reported at most this often, as the sum since the last report."""


class Checkpoint(NamedTuple):
    """A registered checkpoint."""

    id: str
    """TIER:ATTEMPT:STEP"""
    location: str
    """The location that the job's save returned."""
    step: int
    """The step to go on from, as registered with the save."""
    mode: str = "full"
    """What is restored: full (weights, optimizer, schedulers, random states, data, step), weights (the registered
    objects alone), or relaunch (new processes load it)."""


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
        self.in_step = False
        self.grace_s: float | None = None
        """The launcher's grace in seconds; recorded with the exception that ends the process."""
        self._left = ""
        self._broken_by: dict[str, Any] = {}
        self._launch = launch
        self._recorder = recorder
        self._meter = meter
        self._faults = faults
        self._now = now
        self._follower = Follower(recorder, launch, self, now=now, sleep=sleep, end_process=end_process)
        self._allowed = ["pause", "resume"]
        self._can: list[str] = []
        self._halved = ""
        self._drawn: int | None = None
        self._places: dict[str, tuple[int | None, Any]] = {}
        self._restored_at = -1
        self._edge_ns = 0
        self._edge_cpu_ns = 0
        self._told: dict[str, int] = {}
        self._next_told_ns = 0
        self.notices: NoticeReader | None = None
        """Prints the agent's notices in the training output; only on one rank of a host."""
        self._next_look_ns = 0
        recorder.on_switch_off.append(self._take_slot)
        self._take_slot()

    def _take_slot(self) -> None:
        self._slot = self._recorder.directive.words

    def allow(self, *actions: str) -> None:
        """Declare which actions the job supports, besides pause and resume."""
        self._allowed += [action for action in actions if action not in self._allowed]
        self.declare()

    def declare(self) -> None:
        """Record which actions the job supports by what it has registered so far."""
        can = list(self._allowed)
        if self.restore is not None:
            can.append("rollback_disk")
        if self.state is not None and self.memory.every:
            can += ["checkpoint"] * ("checkpoint" not in can)
            can += ["rollback_weights"] if self._by_half else ["rollback_memory", "rollback_weights"]
        if {"rollback_disk", "rollback_memory"} & set(can):
            can.append("rollback")
        if can != self._can:
            self._can = can
            self._recorder.declare({"can": can})

    def halve(self, reason: str) -> None:
        """Allow rollbacks to memory only in mode weights, because of `reason`: something of the script would stay."""
        if not self._halved:
            self._halved = reason
            self.declare()

    @property
    def _by_half(self) -> str:
        """Why a capture in memory cannot restore everything, but only the weights; "" if it can."""
        if self.state is None or self.state.batches is None:
            return "watch.state has no data="
        return self._halved

    # ---- boundaries --------------------------------------------------------------------------------------------------

    def begin(self, step: int, *, adjoining: bool = False) -> int:
        """Pass the boundary before `step`.

        Args:
            step: the step that would come next.
            adjoining: the last step ended right here, so that its reading of the clocks can be used again.

        Returns:
            The step that begins, another one after a rollback; STOP if the loop must end.
        """
        if self.in_step:
            self._meter.mask = 0  # an exception ended the last step: neither it nor its values are recorded
        try:
            if self._drawn is not None and self._drawn != self._batches_drawn():
                self.halve("batches are drawn before the step that uses them begins")
            self._drawn = None  # a step that an exception ends has drawn its batches within it
            follower = self._follower
            if self._slot[0] != follower.seen or step >= follower.hold_step:
                adjoining = False
                step = follower.obey(step)
                if step == STOP:
                    return STOP
            every = self.memory.every
            if every and step % every == 0:
                adjoining = False
                self._keep(step)
            if self.probe is not None:
                self._begin_probe(step)
            if adjoining:
                self._meter.begin(step, self._edge_ns, self._edge_cpu_ns)
            else:
                self._meter.choose_cpu_clock()
                self._meter.begin(step, self._now(), self._meter.cpu())
        except Exception as error:  # noqa: BLE001 - the boundary
            self._faults.caught(error)
        self.in_step = True
        return step

    def _begin_probe(self, step: int) -> None:
        """Start the probe's step. Called before the meter's, so that phases still open then belong to no step."""
        assert self.probe is not None
        try:
            self.probe.step_begin(step, self._meter.k)
        except Exception as error:  # noqa: BLE001 - the boundary
            self._faults.caught(error)

    def end(self) -> None:
        """End the step and write its record."""
        self.in_step = False
        meter = self._meter
        self.next_step = meter.step + 1
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
            if self._recorder.dropped and now_ns >= self._next_told_ns:
                self._tell_lost(now_ns)
            if self.notices is not None and now_ns >= self._next_look_ns:
                self._next_look_ns = now_ns + LOOK_EVERY_NS
                self.notices.look()
        except Exception as error:  # noqa: BLE001 - the boundary
            self._faults.caught(error)

    def _batches_drawn(self) -> int | None:
        state = self.state
        return None if state is None or state.batches is None else state.batches.position

    def enter(self) -> None:
        """The loop begins: the rank takes orders from now on."""
        self.tell_left()
        self._left = ""
        self._broken_by = {}
        self._recorder.words[layout.STATE] = layout.RUNNING

    def leave(self, reason: str) -> None:
        """The loop is over; `reason` is end, break or stop. No further orders are taken.

        A break may also be an exception that ends the process, which is known only in `process_ends` or `crashed`.
        """
        if not self._left:
            self._left = reason
            self._recorder.words[layout.STATE] = layout.LEFT
            if reason != "break":
                self.tell_left()

    def broken_off(self, holder: FrameType | None) -> None:
        """The loop in this frame is left before its end: remember why, in case that ends the process."""
        try:
            self._broken_by = breaking(holder)
        except Exception as error:  # noqa: BLE001 - the boundary
            self._faults.caught(error)

    def cut_short(self, error: BaseException, trace: TracebackType | None) -> None:
        """An exception leaves a step, which is then not recorded: remember it, in case it ends the process."""
        try:
            self._broken_by = described(error, trace)
        except Exception as ours:  # noqa: BLE001 - the boundary
            self._faults.caught(ours)

    def process_ends(self) -> None:
        """Python shuts down: note the exception that ended the loop, if no hook has noted it."""
        by, broken = self._broken_by, self.in_step and not self._left
        broken |= self._left == "break" and by.get("type") in ENDS_PROCESS
        if broken and by.get("type") and by.get("code") != 0:
            self._note_end(by)

    def crashed(self, error: BaseException, trace: TracebackType | None) -> None:
        """An exception ends the process. If it ended the loop as well, the loop does not count as left."""
        try:
            self._note_end(described(error, trace))
        except KeyboardInterrupt:
            # Ctrl-C arrives twice, from the terminal and from the launcher; the second must not lose the note.
            self._note_end(described(error, trace))
        except Exception as ours:  # noqa: BLE001 - the boundary
            self._faults.caught(ours)

    def tell_left(self) -> None:
        """Record once that the loop was left."""
        if self._left and self._left != "told":
            try:
                self._tell_lost(self._now())
                by = self._broken_by if self._left == "break" else {}
                self._meter.note("rank_left", {"reason": self._left, **by})
            except Exception as error:  # noqa: BLE001 - the boundary
                self._faults.caught(error)
            self._left = "told"

    def _note_end(self, by: dict[str, Any]) -> None:
        if self._left == "break":
            self._recorder.words[layout.STATE] = layout.RUNNING
        self._left = "told"
        left = self._recorder.words[layout.STATE] == layout.LEFT
        grace = {} if self.grace_s is None else {"grace_s": self.grace_s}
        self._meter.note("exception", {**by, "left": left, **grace})

    def _tell_lost(self, now_ns: int) -> None:
        for reason, count in list(self._recorder.dropped.items()):
            fresh = count - self._told.get(reason, 0)
            if fresh:
                self._meter.note("records_lost", {"reason": reason, "count": fresh})
                self._told[reason] = count
        self._next_told_ns = now_ns + int(TELL_LOST_EVERY_S * 1e9)

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

    def _gone(self, checkpoint: str, reason: str) -> None:
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
            self._gone(checkpoint, "newer captures replaced it")
        capture = self.state.capture(step)
        seconds = (self._now() - begun_ns) * 1e-9
        self.memory.add(self.saved(step, "", "memory", {"seconds": seconds, "bytes": capture.size_bytes}), capture)

    # ---- orders (rankwatch.directive.Actions) ------------------------------------------------------------------------

    def proven(self, checkpoint: str) -> None:
        """See `Actions.proven`."""
        self.memory.proven = checkpoint

    def refusal(self, directive: Directive) -> str:
        """See `Actions.refusal`."""
        ways = [action for action in self._can if action.startswith("rollback_")]
        if directive.action not in self._can and not (directive.action == "rollback" and ways):
            return f"this job does not support {directive.action}; it supports {', '.join(self._can)}"
        return self._no_way_back(directive) if directive.action == "rollback" else ""

    def _no_way_back(self, directive: Directive) -> str:
        checkpoint, mode = directive.checkpoint, directive.mode or "full"
        if not checkpoint.startswith("memory:"):
            if mode != "full":
                return f"{checkpoint} is on disk, but mode {mode} is only for captures in memory"
            if self.restore is None:
                return f"{checkpoint} is on disk, and the job has no on_rollback"
            if self.state is not None and self.state.batches is not None and checkpoint not in self._places:
                return f"this process did not save {checkpoint}, so the position of its data is unknown"
            return ""
        if checkpoint not in self.memory:
            self._gone(checkpoint, "it was requested and is not in memory")
            return f"{checkpoint} is not in memory any more"
        if mode == "full" and self._by_half:
            return f"{checkpoint} can restore only the weights (mode weights): {self._by_half}"
        return ""

    def checkpoint(self, step: int) -> str:
        """See `Actions.checkpoint`."""
        if self.save is None:
            self._keep(step)
            return self.memory.kept[-1]
        begun_ns = self._now()
        location = str(self.save(step) or "")
        seconds = (self._now() - begun_ns) * 1e-9
        tier = "remote" if "://" in location and not location.startswith("file://") else "local"
        self.saved(step, location, tier, {"seconds": seconds, "bytes": 0})
        return location

    def rollback(self, directive: Directive) -> Rollback:
        """See `Actions.rollback`."""
        if not self._meter.k < directive.k <= layout.K_MAX:
            raise ValueError(f"rollback to k {directive.k}, but this attempt has k {self._meter.k}")
        begun_ns = self._now()
        mode = directive.mode or "full"
        checkpoint = Checkpoint(directive.checkpoint, directive.location, directive.checkpoint_step, mode)
        if directive.checkpoint in self.memory and self.state is not None:
            capture = self.memory[directive.checkpoint]
            self.state.restore(capture, objects_only=mode == "weights")
            step = self._restored_at = capture.step
        elif self.restore is not None:
            step = int(self.restore(checkpoint))
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
