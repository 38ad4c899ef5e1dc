"""The detection pipeline of one job: observations in, updates of incidents out. Pure.

Each detector judges the frames that closed together before the next detector does: a frame of few ranks is judged in
less time than it takes to load the code of all detectors. What they find is then told frame by frame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from rankwatch_detectors.base import AttemptStart, Detector, Frame, Observation, Tick
from rankwatch_service.incidents.correlator import Correlator
from rankwatch_service.incidents.transition import Update
from rankwatch_service.job.assembler import Assembler
from rankwatch_service.job.detector_bank import DetectorAnswer, DetectorBank, Failure
from rankwatch_service.job.timed_frames import TimedFrames
from rankwatch_service.job.topology_state import TopologyState

MakeDetectors = Callable[[], Sequence[Detector]]

FRAMES_TOGETHER_MAX: Final = 32
"""Frames judged together; with 32, loading the code takes little of the time."""

RANKS_TOGETHER_MAX: Final = 4_096
"""Ranks in frames that are judged together: a fast cache holds their values."""


class DetectionPipeline:
    """The detectors and the correlator of one job."""

    def __init__(self, job: str, make_detectors: MakeDetectors) -> None:
        self.correlator = Correlator(job)
        self._bank = DetectorBank(make_detectors)
        self._timed = TimedFrames()

    def observe(self, observation: Observation, topology_state: TopologyState) -> tuple[list[Update], list[Failure]]:
        """Take the next observation; returns the updates of incidents, and the failures of detectors."""
        (answer,) = self._judge([observation])
        return self.tell(observation, answer, topology_state)

    def answers(
        self, observations: Iterable[Observation], assembler: Assembler
    ) -> Iterator[tuple[Observation, DetectorAnswer]]:
        """Judge observations, some of them together, and give each with its answer for `tell`, in order.

        While the caller handles an observation, the assembler is in the state that belongs to it.
        """
        together: list[Observation] = []
        paces: list[tuple[int, float | None]] = []
        for observation in observations:
            together.append(observation)
            paces.append(assembler.pace)
            if assembler.frames_follow and _has_room(together):
                continue
            for one, answer, assembler.pace in zip(together, self._judge(together), paces, strict=True):
                yield one, answer
            together, paces = [], []

    def _judge(self, observations: Sequence[Observation]) -> list[DetectorAnswer]:
        """The findings and failures of each observation; several are frames of one attempt."""
        completed = [list(self._timed.observe(observation)) for observation in observations]
        judged = iter(self._bank.judge([one for ones in completed for one in ones]))
        return [sum((next(judged) for _ in ones), start=DetectorAnswer()) for ones in completed]

    def tell(
        self, observation: Observation, answer: DetectorAnswer, topology_state: TopologyState
    ) -> tuple[list[Update], list[Failure]]:
        """Pass on what detectors found in an observation; returns as `observe`."""
        findings, failures = answer.findings, answer.failures
        if isinstance(observation, AttemptStart):
            self.correlator.begin(observation.attempt)
        told = self.correlator.judge(findings, topology_state) if findings else []
        if isinstance(observation, Frame) and observation.family == "steps" and not observation.late:
            told += self.correlator.progress(observation.attempt, observation.step, observation.time_s)
        if isinstance(observation, Tick):
            told += self.correlator.settle(observation.now_s)
        return told, failures

    def rest(self) -> None:
        """Replace the detectors by new ones, which inherit what is always true of the job. Incidents stay."""
        self._bank.rest()
        self._timed = TimedFrames()

    def state(self) -> dict[str, Any]:
        """Everything that decides the future: JSON types, bytes and arrays. Copy it before the next call."""
        return {"bank": self._bank.state(), "timed": self._timed.state(), "correlator": self.correlator.state()}

    def restore(self, state: Mapping[str, Any], start: AttemptStart | None) -> list[str]:
        """Restore what `state` gave.

        Args:
            state: what `state` gave.
            start: the start of the running attempt, for detectors without a snapshot; None if there is none.

        Returns:
            Names of detectors without a snapshot: they are new, or of another version.
        """
        without_snapshot = self._bank.restore(state["bank"], start)
        if "timed" in state:  # snapshots of earlier versions have none
            self._timed.restore(state["timed"])
        self.correlator.restore(state["correlator"])
        return without_snapshot


def _has_room(together: Sequence[Observation]) -> bool:
    """Whether another frame may be judged together with these, of as many ranks."""
    newest = together[-1]
    ranks = newest.ranks if isinstance(newest, Frame) else RANKS_TOGETHER_MAX
    return len(together) < FRAMES_TOGETHER_MAX and (len(together) + 1) * ranks <= RANKS_TOGETHER_MAX
