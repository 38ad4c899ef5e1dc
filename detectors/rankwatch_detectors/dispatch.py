"""The common part of all detectors: the dispatch of observations to methods, the current attempt, the newest time.

Only observations of the current attempt are judged; a new attempt closes all open episodes. Late rows of an older
attempt are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Final

import numpy as np

from rankwatch_detectors.base import (
    AttemptStart,
    Bools,
    DeviceCounters,
    Finding,
    Floats,
    Frame,
    Kind,
    Observation,
    Occurrence,
    Presence,
    Tick,
)
from rankwatch_detectors.episodes import Episodes
from rankwatch_detectors.state import Stateful
from rankwatch_detectors.statistics.peers import anyone, everyone, median

ATTEMPT_ENDED = "The attempt ended."
OTHER_CLOCK = "Ranks now report devices, so CPU time is no longer evaluated."
OWN_PACE = "Ranks go at their own pace: they are not compared."


STARTS: Final[frozenset[type[Observation]]] = frozenset({AttemptStart})
"""What a detector reads that has nothing to judge in an attempt."""
ROWS: Final[frozenset[type[Observation]]] = frozenset({Frame, Tick})
"""What says how ranks compare."""


class DispatchingDetector(Stateful):
    """Base of the detectors. Subclasses set `kind`, `name`, `version` and override the `_on_...` methods they need.

    `reads` says which they override, so a detector's `now_s` stands still while nothing comes that it reads.
    """

    kind: Kind
    name: str
    version: int
    STATE: ClassVar[str] = "attempt world_size now_s episodes"
    LEARNED_FOR_GOOD: ClassVar[tuple[str, ...]] = ()
    """Attributes that are kept while a job is idle, for its next launch."""

    COMPARES_RANKS: ClassVar[bool] = False
    """The detector compares ranks in the same step, and does nothing unless they are in lockstep. `lockstep` is then
    part of its state."""

    JUDGES_TIMES: ClassVar[bool] = False
    """The detector judges the times of hosts and devices, so it waits for frames that have both."""

    TAKES_LATE: ClassVar[bool] = False
    """The detector judges each rank's row by itself, so unless ranks are in lockstep it takes late rows too. `lockstep`
    is then part of its state."""

    _handled: ClassVar[frozenset[type[Observation]]] = frozenset()
    """The types of observations that it has a method for."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        base, methods = DispatchingDetector, set[type[Observation]]()
        if cls._on_frame is not base._on_frame:
            methods.add(Frame)
        if cls._on_tick is not base._on_tick:
            methods.add(Tick)
        if cls._on_occurrence is not base._on_occurrence:
            methods.add(Occurrence)
        if cls._on_counters is not base._on_counters:
            methods.add(DeviceCounters)
        cls._handled = STARTS | methods

    def __init__(self) -> None:
        self.lockstep = True
        self.attempt = ""
        self.world_size = 0
        self.now_s = 0.0
        self.episodes = Episodes(self.kind)

    def inherit(self, before: DispatchingDetector) -> None:
        """Copy from `before`, a detector of the same kind, only what it has learned of the job for good."""
        for name in self.LEARNED_FOR_GOOD:
            setattr(self, name, getattr(before, name))

    @property
    def reads(self) -> frozenset[type[Observation]]:
        """The types of observations that can change its judgement in this attempt."""
        return self._handled - ROWS if self.COMPARES_RANKS and not self.lockstep else self._handled

    def observe(self, observation: Observation) -> Sequence[Finding]:
        """Process the next observation; return what changed in this detector's judgement."""
        if isinstance(observation, Frame):
            if not self._is_current(observation):
                return ()
            if observation.time_s > self.now_s:
                self.now_s = observation.time_s
            return self._on_frame(observation)
        if isinstance(observation, Tick):
            self.now_s = max(self.now_s, observation.now_s)
            presence = observation.presence
            if presence is not None and (
                presence.attempt != self.attempt or presence.has_reported.size != self.world_size
            ):
                presence = None
            if self.COMPARES_RANKS and not self.lockstep:
                return ()
            return self._on_tick(presence)
        if isinstance(observation, AttemptStart):
            self.now_s = max(self.now_s, observation.time_s)
            return self._begin(observation)
        self.now_s = max(self.now_s, observation.time_s)
        if isinstance(observation, DeviceCounters):
            return self._on_counters(observation)
        return self._on_occurrence(observation)

    def _is_current(self, frame: Frame) -> bool:
        """Whether a frame is of the running attempt and for this detector."""
        if frame.attempt != self.attempt:
            return False
        if frame.ranks != self.world_size and frame.ranks:  # it is from before a topology change
            return False
        if self.COMPARES_RANKS and not self.lockstep:
            return False
        if frame.late and not self._takes_late():
            return False
        return not frame.awaits_times if self.JUDGES_TIMES else frame.family != "timed"

    def _takes_late(self) -> bool:
        return self.TAKES_LATE and not self.lockstep

    def _begin(self, start: AttemptStart) -> list[Finding]:
        findings: list[Finding] = []
        new_launch = start.launch != self.attempt.rpartition(".")[0]
        # With another world size rank numbers mean other ranks, even if the attempt's text is the same.
        new_attempt = start.attempt != self.attempt or start.topology.world_size != self.world_size
        if new_attempt:
            findings = self.episodes.close_all(self.now_s, ATTEMPT_ENDED)
        self.attempt = start.attempt
        self.world_size = start.topology.world_size
        findings.extend(self._on_attempt(start, new_attempt=new_attempt, new_launch=new_launch))
        self.lockstep = start.topology.lockstep
        if self.COMPARES_RANKS and not self.lockstep:
            for episodes in [held for held in vars(self).values() if isinstance(held, Episodes)]:
                findings += episodes.close_all(self.now_s, OWN_PACE)
        return findings

    def _on_attempt(self, start: AttemptStart, *, new_attempt: bool, new_launch: bool) -> Sequence[Finding]:  # noqa: ARG002
        return ()

    def _on_frame(self, frame: Frame) -> Sequence[Finding]:  # noqa: ARG002
        return ()

    def _on_tick(self, presence: Presence | None) -> Sequence[Finding]:  # noqa: ARG002
        return ()

    def _on_occurrence(self, occurrence: Occurrence) -> Sequence[Finding]:  # noqa: ARG002
        return ()

    def _on_counters(self, counters: DeviceCounters) -> Sequence[Finding]:  # noqa: ARG002
        return ()


def finite(frame: Frame, name: str) -> tuple[Floats, Bools] | None:
    """Values of one metric, and where they are present and finite; None if no rank has one."""
    if name not in frame.values:
        return None
    key, computed = f"finite {name}", frame.computed
    if key not in computed:
        computed[key] = _finite(frame, name)
    found: tuple[Floats, Bools] | None = computed[key]
    return found


def where_usable(found: tuple[Floats, Bools], other: float) -> Floats:
    """The values of a result of `finite`, with `other` in place of the unusable ones."""
    values, usable = found
    return values if everyone(usable) else np.where(usable, values, other)


def typical(frame: Frame, name: str) -> float | None:
    """Median over the ranks with a finite value; None if there is none."""
    if name not in frame.values:
        return None
    key, computed = f"typical {name}", frame.computed
    if key not in computed:
        computed[key] = _only(frame, name) if frame.ranks == 1 else _middle(frame, name)
    middle: float | None = computed[key]
    return middle


def _only(frame: Frame, name: str) -> float | None:
    """The value of a single rank."""
    value, present = frame.values[name].item(0), frame.present.get(name)
    return value if present is not None and present.item(0) and math.isfinite(value) else None


def _middle(frame: Frame, name: str) -> float | None:
    found = finite(frame, name)
    return None if found is None else median(found[0] if everyone(found[1]) else found[0][found[1]])


def _finite(frame: Frame, name: str) -> tuple[Floats, Bools] | None:
    values = frame.values[name]
    present = frame.present.get(name)
    if present is None:
        return None
    usable = present if frame.finite else present & np.isfinite(values)
    usable.flags.writeable = False
    return (values, usable) if anyone(usable) else None
