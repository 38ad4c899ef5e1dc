"""Runs detectors over observations and reads their findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rankwatch_detectors.base import Change, Detector, Finding, Kind, Observation
from rankwatch_detectors.catalogue import detectors
from rankwatch_service.job.detection import TimedFrames
from rankwatch_service.stream.saved import pack, unpack


def evaluate(observations: Iterable[Observation], bank: Sequence[Detector] | None = None) -> list[Finding]:
    """All findings of the whole catalogue (or of `bank`) in the order in which they were reported."""
    bank = detectors() if bank is None else bank
    timed = TimedFrames()
    return [
        finding
        for observation in observations
        for one in timed.observe(observation)
        for detector in bank
        for finding in detector.observe(one)
    ]


def opened(findings: Iterable[Finding], kind: Kind | None = None) -> list[Finding]:
    """The findings that opened an episode, of one kind or of all."""
    return [f for f in findings if f.change is Change.OPEN and (kind is None or f.kind is kind)]


def closed(findings: Iterable[Finding], kind: Kind | None = None) -> list[Finding]:
    """The findings that closed an episode, of one kind or of all."""
    return [f for f in findings if f.change is Change.CLOSE and (kind is None or f.kind is kind)]


def restored_all_along(make: Callable[[], Detector], observations: Iterable[Observation], every: int) -> list[Finding]:
    """The findings of a detector, equal to those of one that is restored from bytes every so many observations."""
    whole, detector = make(), make()
    findings: list[Finding] = []
    for number, observation in enumerate(observations):
        if number % every == 0:
            state, detector = unpack(pack(detector.snapshot())), make()
            detector.restore(state)
        found = whole.observe(observation)
        assert detector.observe(observation) == found, number
        findings += found
    assert pack(detector.snapshot()) == pack(whole.snapshot())
    return findings
