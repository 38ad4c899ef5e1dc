"""Joins what devices measure of a step, which arrives some steps late, with the rest of the step. Pure.

Detectors that judge times need both: the phases of the host and the times of the device. In jobs whose devices measure
steps they get them together, as a frame of the family "timed"; a frame of the family "steps" then says that it will
come (`Frame.awaits_times`). Detectors that judge anything else are not kept waiting.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rankwatch_detectors.base import AttemptStart, Frame, Observation, StepKind

HELD_MAX: Final = 16
"""Steps that wait for their device times; ranks keep 8 steps in flight. Of 16,384 ranks 16 steps take 24 MB."""
EXPECTED_STEPS: Final = 64
"""After so many steps without device times none are expected any more, and steps are judged by their host's times."""

_MARK: Final = "device_step_s"
_OF_DEVICES: Final = frozenset({_MARK, "device_busy_s", "device_wait_s"})
_OF_HOSTS: Final = frozenset({"step_time_s", "busy_s", "busy_cpu_s", "wait_s", "tokens", "tokens_squared"})


class TimedFrames:
    """The steps of one job that wait for their device times."""

    def __init__(self) -> None:
        self._attempt = ""
        self._lockstep = True
        self._held: dict[int, Frame] = {}
        self._without = EXPECTED_STEPS
        """Steps since the newest device times."""

    def observe(self, observation: Observation) -> Iterator[Observation]:
        """Pass an observation on, and after it the frame that it completes."""
        if isinstance(observation, AttemptStart):
            self._begin(observation)
        if not isinstance(observation, Frame) or observation.late or not self._lockstep:
            yield observation
        elif observation.family == "steps":
            yield self._hold(observation)
        else:
            yield observation
            if _MARK in observation.values and (held := self._take(observation.step)) is not None:
                yield _joined(held, observation)

    def _begin(self, start: AttemptStart) -> None:
        if start.attempt != self._attempt:
            self._held, self._without = {}, EXPECTED_STEPS
        self._attempt, self._lockstep = start.attempt, start.topology.lockstep
        for step in [step for step, frame in self._held.items() if _ranks(frame) != start.topology.world_size]:
            del self._held[step]

    def _hold(self, frame: Frame) -> Frame:
        self._without += 1
        if self._without > EXPECTED_STEPS:
            self._held.clear()
            return frame
        self._held[frame.step] = _slim(frame)
        if len(self._held) > HELD_MAX:
            del self._held[min(self._held)]
        return dataclasses.replace(frame, awaits_times=True)

    def _take(self, step: int) -> Frame | None:
        self._without = 0
        held = self._held.pop(step, None)
        for earlier in [one for one in self._held if one < step]:
            del self._held[earlier]  # values come in the order of steps, so these will have none
        return held

    def state(self) -> dict[str, Any]:
        """Everything that decides the future: JSON types and arrays. Copy it before the next call."""
        held = [
            {
                "step": frame.step,
                "kind": frame.kind.value,
                "time_s": frame.time_s,
                "finite": frame.finite,
                "values": dict(frame.values),
                "present": dict(frame.present),
            }
            for frame in self._held.values()
        ]
        return {"attempt": self._attempt, "lockstep": self._lockstep, "without": self._without, "held": held}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` gave."""
        self._attempt, self._lockstep, self._without = state["attempt"], state["lockstep"], state["without"]
        frames: Sequence[Mapping[str, Any]] = state["held"]
        self._held = {
            one["step"]: Frame(
                self._attempt,
                "steps",
                one["step"],
                StepKind(one["kind"]),
                one["time_s"],
                one["values"],
                one["present"],
                finite=one["finite"],
            )
            for one in frames
        }


def _slim(frame: Frame) -> Frame:
    """The part of a frame that detectors of times need."""
    names = [name for name in frame.values if name in _OF_HOSTS or name.startswith("phase.")]
    values = {name: frame.values[name] for name in names}
    present = {name: frame.present[name] for name in names}
    return dataclasses.replace(frame, values=values, present=present, exact={})


def _joined(held: Frame, late: Frame) -> Frame:
    names = [name for name in late.values if name in _OF_DEVICES]
    return dataclasses.replace(
        held,
        family="timed",
        time_s=max(held.time_s, late.time_s),
        values={**held.values, **{name: late.values[name] for name in names}},
        present={**held.present, **{name: late.present[name] for name in names}},
        finite=held.finite and late.finite,
    )


def _ranks(frame: Frame) -> int:
    return next((int(here.size) for here in frame.present.values()), 0)
