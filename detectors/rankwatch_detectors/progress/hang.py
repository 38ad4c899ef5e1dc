"""Finds a job that makes no progress, and the rank that did not arrive.

It reads progress blocks and ticks, and the rows of steps until these tell how long a step takes. Within a step the
deadline is learned from the job (`ProgressTimeout`): a standstill is reported early as information, and becomes
critical when it is longer than in healthy jobs. Where all ranks are outside of a step, or do work of their own in one,
nobody waits for anybody: loops evaluate, save and read there, so the deadline is longer. Where all wait in a
collective, nobody will come, wherever they are. Phases that are long by nature (first step, compile, eval,
checkpoint_save) have their own deadlines, learned from their earlier durations. Ranks that an order holds, silent
hosts, and what ranks do after training are not evidence of a hang.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import numpy as np

from rankwatch_detectors.base import (
    GRAVITY,
    UNREPORTED,
    AttemptStart,
    Bools,
    Finding,
    Floats,
    Frame,
    Kind,
    Occurrence,
    Presence,
    Severity,
    StepKind,
)
from rankwatch_detectors.dispatch import DispatchingDetector, typical
from rankwatch_detectors.episodes import since
from rankwatch_detectors.progress.arrival import (
    COLLECTIVE,
    DATA,
    ENDING,
    OWN,
    SILENT,
    Missing,
    has_not_begun,
    leading_ranks,
    stopped_ranks,
    waiting_ranks,
    who_is_missing,
)
from rankwatch_detectors.progress.progress_timeout import (
    PAUSE,
    PAUSE_APART,
    PAUSE_INSIDE,
    HangConfig,
    Limits,
    ProgressTimeout,
)
from rankwatch_detectors.scope import WHOLE_JOB
from rankwatch_detectors.statistics.peers import anyone, everyone, median
from rankwatch_detectors.words import listed

NAMED_MAX = 4
"""Ranks that a sentence names."""
FIRST_STEP = "first step"
FIRST_AFTER_ROLLBACK = "first step after a rollback"
RUNNING = "running"


@dataclass(frozen=True, slots=True)
class Standstill:
    """A job that has stood still beyond its deadline."""

    stuck: Bools
    age_s: float
    limits: Limits
    paused: bool
    """All ranks in the earliest step are outside of it."""
    together: str
    """What all ranks do, if it is known and the same: `COLLECTIVE` or `OWN`."""


class HangDetector(DispatchingDetector):
    """One episode at a time, scope "job". Memory: 64 bytes for each rank and a window of readings."""

    kind: Kind = Kind.HANG
    COMPARES_RANKS: ClassVar[bool] = True
    STATE: ClassVar[str] = (
        "lockstep _timeout _newest _newest_s _attempt_s _moved _rows _cold_until _orders _was _way_s _way_at_s "
        "_phase_was _rested _paused_s _inside_s _apart _stopped _stopped_at_s _hosts _leads _accelerated"
    )

    LEARNED_FOR_GOOD: ClassVar[tuple[str, ...]] = ("_timeout",)

    def __init__(self, config: HangConfig) -> None:
        super().__init__()
        self.name = "hang"
        self.version = 12
        self._config = config
        self._timeout = ProgressTimeout(config)
        self._orders: list[str] = []
        self._hosts: list[str] = []
        self._leads: Bools = np.zeros(0, dtype=np.bool_)
        self._accelerated = False
        self._restart(0)

    def _restart(self, ranks: int) -> None:
        self._newest: int | None = None
        self._newest_s = 0.0
        self._attempt_s = self.now_s
        self._moved = False
        self._rows = 0
        """Training steps of this attempt whose rows have come."""
        self._cold_until = 0
        """Steps before this one may be slower than those of earlier attempts."""
        self._was: Floats = np.full((4, ranks), math.nan)
        """By rank, when the newest step was first seen: CPU seconds, stream time of the reading, its step, and when it
        entered that step by its host's clock."""
        self._way_s: Floats = np.full(ranks, math.nan)
        """The least difference between stream time and its host's clock: clock offset plus transport, by rank."""
        self._way_at_s = self.now_s
        self._rested: Floats = np.zeros((3, ranks))
        """By rank: its step, seconds that it was outside of the work of that step before it went on with it, and how
        long it has been outside now."""
        self._stands()

    def _stands(self) -> None:
        """Reset what is observed between two signs of progress."""
        self._phase_was: dict[str, float] = {}
        self._paused_s = 0.0
        """Seconds for which all ranks in the earliest step were outside of it."""
        self._inside_s = 0.0
        """Seconds for which all ranks did work of their own within a step."""
        self._apart = False
        """Other ranks waited for them meanwhile."""
        self._stopped = False
        """A rank was stopped by a signal."""
        self._stopped_at_s: float | None = None
        """Since when a rank has been stopped at every tick; None if none is."""

    def _on_attempt(self, start: AttemptStart, *, new_attempt: bool, new_launch: bool) -> Sequence[Finding]:
        self._hosts, self._accelerated = list(start.topology.host), start.topology.accelerated
        self._leads = leading_ranks(start.topology)
        if new_attempt:
            self._restart(start.topology.world_size)
        if new_launch:
            self._orders = []
        return ()

    def _on_frame(self, frame: Frame) -> Sequence[Finding]:
        if (self._rows > 1 and self._timeout.knows_by_progress) or frame.kind is not StepKind.TRAIN:
            return ()
        took_s = typical(frame, "step_time_s")
        if took_s is not None and took_s > 0:
            if self._rows:
                self._timeout.learn_row(took_s)
            self._rows += 1
        return ()

    def _on_occurrence(self, occurrence: Occurrence) -> Sequence[Finding]:
        if occurrence.kind == "order":
            order, phase = str(occurrence.fields.get("order", "")), occurrence.fields.get("phase")
            if order in self._orders:
                self._orders.remove(order)
            # Between hold and go the order itself stops the ranks.
            if phase in ("hold", "do"):
                self._orders.append(order)
        return ()

    def _on_tick(self, presence: Presence | None) -> Sequence[Finding]:
        if presence is None or not anyone(presence.has_reported):
            return ()
        presence, proper = self._proper(presence)
        fresh = presence.has_reported & (self.now_s - presence.received_s <= self._config.received_within_s) & proper
        fresh &= self._in_time(presence, presence.has_reported & proper, fresh)
        running = fresh & presence.where("state", RUNNING)
        if not anyone(running):
            return self._close(TRAINING_IS_OVER) if len(self.episodes) and _all_left(presence) else ()
        progressed = self._read(presence, running)
        if progressed and len(self.episodes):
            return self._close(f"The job makes progress again: step {self._newest}.")
        if progressed and self.now_s - self._newest_s < self._config.least_s:
            return ()
        if self._excused(presence):
            return ()
        if _is_over(presence, running):
            return self._close(TRAINING_IS_OVER) if len(self.episodes) else ()
        still = self._standstill(presence, running)
        if still is None:
            return self._close_done()
        missing = who_is_missing(presence, still.stuck, running, self._was[:2], self._config.block_s)
        if not len(self.episodes):
            return self._open(presence, still, missing)
        return self._go_on(presence, still, missing)

    def _proper(self, presence: Presence) -> tuple[Presence, Bools]:
        """The presence with ages limited to the attempt's age, and the ranks whose blocks have finite numbers."""
        ages = np.array([presence.step_age_s, presence.phase_age_s, presence.outside_s])
        proper: Bools = np.logical_and.reduce(np.isfinite(ages)) & np.isfinite(presence.sent_s)
        if not everyone(proper):
            ages = np.where(proper, ages, 0.0)
        step_age_s, phase_age_s = np.minimum(np.maximum(ages[:2], 0.0), self.now_s - self._attempt_s)
        outside_s = np.minimum(np.maximum(ages[2], -1.0), step_age_s)
        return replace(presence, step_age_s=step_age_s, phase_age_s=phase_age_s, outside_s=outside_s), proper

    def _in_time(self, presence: Presence, known: Bools, fresh: Bools) -> Bools:
        """Ranks whose blocks arrive without delay, compared with their usual delay and with the fastest rank."""
        delay_s = np.where(known, presence.received_s - presence.sent_s, math.nan)
        usual_s = self._way_s + self._config.way_forgets * (self.now_s - self._way_at_s)
        jumped = delay_s - usual_s > self._config.clock_jump_s
        self._way_s, self._way_at_s = np.where(jumped, delay_s, np.fmin(usual_s, delay_s)), self.now_s
        late_s = delay_s - self._way_s
        soonest_s = late_s[fresh].min() if anyone(fresh) else 0.0
        return np.asarray(late_s - soonest_s <= self._config.received_within_s)

    def _excused(self, presence: Presence) -> bool:
        """Whether ranks stand still by order, or because a process is gone, which rank_lost reports."""
        return bool(self._orders) or not presence.reported("state").isdisjoint(("held", "exited"))

    # ---- progress --------------------------------------------------------------------------------------------------

    def _read(self, presence: Presence, running: Bools) -> bool:
        """Learn from one reading; True if the job's newest step has advanced."""
        newest = int(presence.step[running].max())
        if self._newest is not None and newest <= self._newest:
            self._see(presence, running)
            return False
        # Blocks arrive once a second but contain the step's age, so its start is known more exactly than to a tick.
        ahead = running & (presence.step == newest)
        was, self._was = self._was, _where_each_is(presence)
        entered_s = float((presence.received_s - presence.step_age_s)[ahead].min())
        if self._newest is not None:
            if not self._moved:
                self._remember(self._first_step()[0], self.now_s - self._attempt_s)
                self._cold_until = newest + self._config.cold_steps if self._timeout.knows_steps else newest
            elif not self._standing():
                self._learn_steps(self._was - was, ahead, entered_s - self._newest_s)
                self._timeout.learn_pause(self._paused_s, PAUSE_APART if self._apart else PAUSE)
                self._timeout.learn_pause(self._inside_s, PAUSE_INSIDE)
            self._moved = True
        for name, lasted_s in self._phase_was.items():
            self._remember(name, lasted_s)
        progressed = self._newest is not None
        self._newest, self._newest_s = newest, entered_s
        self._stands()
        self._see(presence, running)
        return progressed

    def _learn_steps(self, since: Floats, ahead: Bools, apart_s: float) -> None:
        """Learn step times by the ranks' own clocks, since delayed blocks arrive all at once.

        `apart_s`: seconds by stream time, used if these clocks stand still.
        """
        known = ahead & np.isfinite(since[2])
        if anyone(known):
            took = since[3, known]
            took_s = median(took) if not anyone(np.isnan(took)) else math.nan
            took_s = took_s if took_s > 0 else apart_s
            self._timeout.learn_steps(max(took_s - self._paused_s, 0.0), max(int(median(since[2, known])), 1))

    def _remember(self, name: str, lasted_s: float) -> None:
        if not len(self.episodes):
            self._timeout.learn(name, lasted_s)

    def _first_step(self) -> tuple[str, float]:
        """Name and unlearned deadline of the first step of this attempt."""
        if self.attempt.endswith(".0"):
            return FIRST_STEP, self._config.first_step_s
        return FIRST_AFTER_ROLLBACK, self._config.rollback_s

    def _standing(self) -> bool:
        """Whether the time since the newest step was due to a long phase, an order or a signal, and is not learned."""
        return bool(self._phase_was) or bool(self._orders) or self._stopped

    def _see(self, presence: Presence, running: Bools) -> None:
        """Observe what ranks do between two signs of progress."""
        step, rested_s, was_s = self._rested
        outside_s = np.where(running, np.maximum(presence.outside_s, 0.0), was_s)
        rested_s = np.where(step == presence.step, rested_s + np.where(outside_s < was_s, was_s, 0.0), 0.0)
        self._rested = np.array([presence.step, rested_s, outside_s])
        for name, _ in self._config.long_phases:
            if name in presence.reported("phase"):
                inside = running & presence.where("phase", name)
                if anyone(inside):
                    lasted = float(presence.phase_age_s[inside].max())
                    self._phase_was[name] = max(self._phase_was.get(name, 0.0), lasted)
        is_stopped = anyone(running & stopped_ranks(presence))
        self._stopped |= is_stopped
        if not is_stopped:
            self._stopped_at_s = None
        elif self._stopped_at_s is None:
            self._stopped_at_s = self.now_s
        behind, paused = self._behind(presence, running)
        if not paused and self._together(presence, running) == OWN:
            self._inside_s = max(self._inside_s, float(presence.step_age_s[running].max()))
        if paused:
            self._paused_s = max(self._paused_s, float(presence.outside_s[behind].max()))
            self._apart |= _apart(presence, running, behind)

    def _behind(self, presence: Presence, running: Bools) -> tuple[Bools, bool]:
        """The ranks in the earliest step, and whether all of them are outside of it, not stopped by a signal, and not
        ending while others wait.

        If some of them have not begun that step and others have, the former.
        """
        behind = running & (presence.step == presence.step[running].min())
        outside = (presence.outside_s >= 0) & ~stopped_ranks(presence)
        if anyone(ending := running & presence.where("doing", ENDING)) and anyone(waiting_ranks(presence, running)):
            outside &= ~ending
        if anyone(outside[behind]):
            not_begun = behind & outside & has_not_begun(presence)
            behind = not_begun if anyone(not_begun) else behind
        return behind, everyone(outside[behind])

    def _together(self, presence: Presence, running: Bools) -> str:
        """`COLLECTIVE` if all running ranks wait in collectives, `OWN` if all do work of their own, `DATA` if some wait
        for others, and these for their data, else "".
        """
        if int(running.sum()) > 1 and everyone(presence.where("doing", COLLECTIVE)[running]):
            return COLLECTIVE
        for_data = presence.where("phase", "data_wait")
        if self.world_size == 1:
            return OWN if everyone(for_data | presence.where("phase", "")) else ""
        # A host that waits for its device may do so busily, and the device for its peers.
        own = presence.where("doing", OWN) & ~(self._accelerated & presence.where("os_state", "R"))
        for_data |= presence.where("doing", DATA)
        if everyone((own | for_data)[running]):
            return OWN
        waiting = waiting_ranks(presence, running)
        apart = running & ~waiting
        return DATA if anyone(waiting) and anyone(apart) and everyone(for_data[apart]) else ""

    # ---- standing still --------------------------------------------------------------------------------------------

    def _standstill(self, presence: Presence, running: Bools) -> Standstill | None:
        behind, paused = self._behind(presence, running)
        together = self._together(presence, running)
        limits = self._limits(presence, running, behind, together, paused=paused)
        lag_s = self.now_s - presence.received_s
        # What a rank did between two steps is no part of the work that it has begun since.
        in_step_s = presence.step_age_s - np.where(presence.outside_s < 0, self._rested[1], 0.0)
        step_age_s = in_step_s + lag_s
        sent_s, standing = (presence.outside_s, behind) if paused else (in_step_s, running)
        stuck = standing & (sent_s + lag_s >= limits.sent_s)
        # A rank that has begun a step since then is not waiting.
        others = running & ~stuck
        since_s = float(step_age_s[others].min()) if anyone(others) else math.inf
        # Progress since the last block is not visible, so the age within the block itself must nearly reach the limit.
        stuck &= sent_s >= limits.sent_s - self._config.block_s
        if since_s < limits.sent_s or not anyone(stuck):
            return None
        age_s = min(float((sent_s + lag_s)[stuck].max()), since_s)
        return Standstill(stuck, age_s, limits, paused, together)

    def _limits(self, presence: Presence, running: Bools, behind: Bools, together: str, *, paused: bool) -> Limits:
        """How long this standstill may last; the phase with the longest deadline on any rank decides for all."""
        # What is usual need not be known: a stopped rank makes no progress, and the others wait for it.
        stopped = self._stopped_at_s is not None and self.now_s - self._stopped_at_s >= self._config.stopped_s
        moved = self._moved or (self._rows > 1 and self._timeout.knows_usual_step)
        named_s = [] if moved or stopped else [self._timeout.named(*self._first_step())]
        phases = [phase for phase in self._config.long_phases if phase[0] in self._phase_was]
        named_s += [self._timeout.named(*phase) for phase in phases]
        cold = self._newest is not None and self._newest < self._cold_until
        reported = presence.reported("phase")
        limits = self._timeout.in_step(log=UNREPORTED in reported, cold=cold, first=self._first_step()[0])
        if paused and reported.isdisjoint(name for name, _ in phases) and together != COLLECTIVE:
            apart = _apart(presence, running, behind)
            leading = anyone(self._leads[behind])
            limits = self._timeout.pause_apart(limits, leading=leading) if apart else self._timeout.pause()
        elif together == OWN:
            limits = self._timeout.pause_inside(limits)
        elif together == DATA:
            limits = self._timeout.for_data(limits)
        if stopped:
            limits = limits.not_after(self._config.stopped_s)
        return limits.but_not_before(max(named_s, default=0.0))

    def _close_done(self) -> Sequence[Finding]:
        """Close the episode if the step's work is done and its ranks are now outside of it."""
        if not len(self.episodes) or not self._paused_s or self.episodes.reported(WHOLE_JOB)["evidence"]["outside"]:
            return ()
        return self._close(f"The work of step {self._newest} is done.")

    def _close(self, summary: str) -> list[Finding]:
        stood = {"age_s": self.now_s - self.episodes.reported(WHOLE_JOB)["onset_time_s"]}
        return self.episodes.close(WHOLE_JOB, self._newest, self.now_s, summary, stood)

    def _open(self, presence: Presence, still: Standstill, missing: Missing) -> list[Finding]:
        step = int(presence.step[still.stuck].min())
        return self.episodes.open(
            WHOLE_JOB,
            attempt=self.attempt,
            severity=still.limits.severity(still.age_s),
            ranks=missing.ranks,
            onset_step=step,
            detected_step=step,
            onset_time_s=self.now_s - still.age_s,
            detected_time_s=self.now_s,
            score=still.age_s / max(still.limits.sent_s / 3, 1e-3),
            confidence=missing.confidence,
            summary=self._summary(step, self.now_s - still.age_s, still, missing),
            evidence=self._evidence(still, missing),
        )

    def _go_on(self, presence: Presence, still: Standstill, missing: Missing) -> Sequence[Finding]:
        """Report a higher severity, or ranks that could not be named before: they used CPU while others waited, or what
        others were named for is no longer so: they report again, or have come to the step of all.
        """
        reported = self.episodes.reported(WHOLE_JOB)
        severity = max(still.limits.severity(still.age_s), Severity(reported["severity"]), key=GRAVITY.index)
        graver = severity != reported["severity"]
        before = reported["evidence"]
        refuted = before["decided_by"] == SILENT != missing.decided_by
        refuted |= any(presence.step[one["rank"]] > one["step"] for one in before["missing"])
        named = bool(missing.ranks) and (refuted or not reported["ranks"])
        if not graver and not named:
            return ()
        if not missing.ranks:
            missing = _as_reported(reported)
        return self.episodes.update(
            WHOLE_JOB,
            severity=severity,
            ranks=missing.ranks,
            confidence=missing.confidence,
            detected_time_s=self.now_s,
            summary=self._summary(reported["onset_step"], reported["onset_time_s"], still, missing),
            evidence=self._evidence(still, missing),
        )

    def _evidence(self, still: Standstill, missing: Missing) -> Mapping[str, Any]:
        return {
            "age_s": still.age_s,
            "deadline_s": still.limits.sent_s,
            "critical_after_s": still.limits.critical_s,
            "outside": still.paused,
            "usual_step_s": self._timeout.usual_step_s() if self._timeout.knows_steps else None,
            "decided_by": missing.decided_by,
            "missing": missing.described,
            "waiting": missing.waiting,
        }

    def _summary(self, step: int, onset_time_s: float, still: Standstill, missing: Missing) -> str:
        where = f"between two steps, after step {step}," if still.paused else f"in step {step}"
        return f"Training stands still {where} {since(onset_time_s)}{self._verdict(still, missing)}."

    def _verdict(self, still: Standstill, missing: Missing) -> str:
        """Name the waiting and the missing ranks, as the end of a sentence."""
        if still.paused and still.together != COLLECTIVE and (self.world_size == 1 or not missing.ranks):
            return ": an evaluation, a save, or a hang outside of the step"
        if self.world_size == 1:
            return ""
        if missing.ranks:
            hosts, several = {self._hosts[rank] for rank in missing.ranks}, len(missing.ranks) > 1
            who = f"rank{'s' * several} {listed(missing.ranks, NAMED_MAX)}"
            who += f" on {hosts.pop()}" if len(hosts) == 1 and all(hosts) else ""
            return f"; the others wait for {who} ({missing.decided_by.replace('it ', 'each ', int(several))})"
        if still.together == COLLECTIVE:
            return f"; all {self.world_size} ranks wait in a collective"
        if still.together == OWN:
            return "; no rank waits for another: each does work of its own, or waits for data"
        return NOBODY


NOBODY: Final = "; no rank stands out"
"""The end of a summary that names nobody; where stacks show who stands apart, they say so instead."""


def _where_each_is(presence: Presence) -> Floats:
    """CPU seconds, time of the reading, step, and when it was entered by the host's clock; NaN where not known."""
    rows = np.array([presence.cpu_s, presence.received_s, presence.step, presence.sent_s - presence.step_age_s])
    return np.where(presence.has_reported & np.isfinite(rows), rows, math.nan)


def _as_reported(reported: Mapping[str, Any]) -> Missing:
    """The missing ranks of the newest finding."""
    evidence = reported["evidence"]
    ranks, confidence = tuple(reported["ranks"]), reported["confidence"]
    return Missing(ranks, evidence["decided_by"], confidence, evidence["missing"], evidence["waiting"])


TRAINING_IS_OVER = "Training is over: ranks have left their loops after the same step."


def _all_left(presence: Presence) -> bool:
    return everyone(presence.where("state", "left")[presence.has_reported])


def _is_over(presence: Presence, running: Bools) -> bool:
    """Whether ranks have left their loops and the others are done with the same step, or all that are left are ending:
    what these do is no training.
    """
    if everyone(presence.where("doing", ENDING)[running]):
        return True
    left = presence.has_reported & presence.where("state", "left")
    if not anyone(left) or not everyone((presence.outside_s >= 0)[running]):
        return False
    return bool(presence.step[left].max() >= presence.step[running].max())


def _apart(presence: Presence, running: Bools, behind: Bools) -> bool:
    """Whether others wait for the ranks behind: in a later step, or in a collective that not all of these are in."""
    waiting = presence.where("phase", "collective") & behind
    return anyone(running & ~behind) or (anyone(waiting) and not everyone(waiting[behind]))
