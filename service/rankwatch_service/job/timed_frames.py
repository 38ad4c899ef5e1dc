"""Joins what devices measure of a step, which arrives some steps late, with the rest of the step. Pure.

Detectors that judge times need both: the phases of the host and the times of the device. In jobs whose devices measure
steps they get them together, as a frame of the family "timed"; a frame of the family "steps" then says that it will
come (`Frame.awaits_times`). Detectors that judge anything else are not kept waiting.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from rankwatch_detectors.base import AttemptStart, Bools, Frame, Observation, StepKind

HELD_MAX: Final = 64
"""Steps that wait for their device times: what ranks have in flight (8 steps) and agents have not sent (a second). Of
16,384 ranks 64 steps take 96 MB."""
HELD_CELLS_MAX: Final = 12 * 1024 * 1024
"""Values that wait, 9 bytes each: the oldest steps of jobs with very many ranks or phases are judged no more."""
EXPECTED_STEPS: Final = 128
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
        """In step order; device times are added as they come."""
        self._without = EXPECTED_STEPS
        """Steps since the newest timed frame."""
        self._newest = -1
        """The newest step."""

    def observe(self, observation: Observation) -> Iterator[Observation]:
        """Pass an observation on, and after it the frames that it completes."""
        if isinstance(observation, AttemptStart):
            self._begin(observation)
        if not isinstance(observation, Frame) or not self._lockstep:
            yield observation
        elif observation.family == "steps":
            yield observation if observation.late else self._hold(observation)
        else:
            yield observation
            if _MARK in observation.values:
                yield from self._add(observation)

    def _begin(self, start: AttemptStart) -> None:
        if start.attempt != self._attempt:
            self._held, self._without, self._newest = {}, EXPECTED_STEPS, -1
        self._attempt, self._lockstep = start.attempt, start.topology.lockstep
        for step in [step for step, frame in self._held.items() if _ranks(frame) != start.topology.world_size]:
            del self._held[step]

    def _hold(self, frame: Frame) -> Frame:
        self._without += 1
        self._newest = frame.step
        if self._without > EXPECTED_STEPS:
            self._held.clear()
            return frame
        self._held[frame.step] = _slim(frame)
        while len(self._held) > HELD_MAX or _cells(self._held.values()) > HELD_CELLS_MAX:
            del self._held[min(self._held)]
        return dataclasses.replace(frame, awaits_times=True)

    def _add(self, late: Frame) -> Iterator[Frame]:
        """Add device times to their step, and give out what is complete, in step order.

        A frame that came in time has all that ranks are known to report. Of others, as where a rank's values come in
        several messages, more may follow, until they do for a later step.
        """
        if late.step not in self._held:
            # None are expected so far, unless they come too late for any step to wait for them.
            if self._without >= EXPECTED_STEPS and late.step > self._newest - HELD_MAX:
                self._without = 0
            return
        held = self._held[late.step] = _joined(self._held[late.step], late)
        whole = not late.late or bool(np.all(held.present[_MARK] | ~_reported(held)))
        for step in [step for step in sorted(self._held) if step < late.step or (whole and step == late.step)]:
            frame = self._held.pop(step)
            if frame.family == "timed":
                self._without = 0
                yield frame

    def state(self) -> dict[str, Any]:
        """Everything that decides the future: JSON types and arrays. Copy it before the next call."""
        held = [
            {
                "family": frame.family,
                "step": frame.step,
                "kind": frame.kind.value,
                "time_s": frame.time_s,
                "finite": frame.finite,
                "values": dict(frame.values),
                "present": dict(frame.present),
            }
            for frame in self._held.values()
        ]
        return {
            "attempt": self._attempt,
            "lockstep": self._lockstep,
            "without": self._without,
            "newest": self._newest,
            "held": held,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` gave."""
        self._attempt, self._lockstep = state["attempt"], state["lockstep"]
        self._without, self._newest = state["without"], state["newest"]
        frames: Sequence[Mapping[str, Any]] = state["held"]
        self._held = {
            one["step"]: Frame(
                self._attempt,
                one["family"],
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
    values, present = dict(held.values), dict(held.present)
    for name in [name for name in late.values if name in _OF_DEVICES]:
        if name in values:
            values[name] = np.where(late.present[name], late.values[name], values[name])
            present[name] = present[name] | late.present[name]
        else:
            values[name], present[name] = late.values[name], late.present[name]
    return dataclasses.replace(
        held,
        family="timed",
        time_s=max(held.time_s, late.time_s),
        values=values,
        present=present,
        finite=held.finite and late.finite,
    )


def _reported(frame: Frame) -> Bools:
    """The ranks whose row of the step has come."""
    rows = [here for name, here in frame.present.items() if name not in _OF_DEVICES]
    return np.logical_or.reduce(rows) if rows else np.zeros(_ranks(frame), dtype=np.bool_)


def _cells(frames: Iterable[Frame]) -> int:
    return sum(len(frame.values) * _ranks(frame) for frame in frames)


def _ranks(frame: Frame) -> int:
    return next((int(here.size) for here in frame.present.values()), 0)
