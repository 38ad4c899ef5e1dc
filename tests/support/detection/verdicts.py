"""Runs detectors over observations and reads their findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rankwatch import wire
from rankwatch_detectors.base import AttemptStart, Change, Detector, Finding, Kind, Observation, Topology
from rankwatch_detectors.catalogue import detectors
from rankwatch_detectors.pace.slowdown import SlowdownConfig, SlowdownDetector
from rankwatch_detectors.pace.straggler import StragglerConfig, StragglerDetector
from rankwatch_service.job.admission import BundleAccepted, CellQuota
from rankwatch_service.job.detection import TimedFrames
from rankwatch_service.job.effects import Effects
from rankwatch_service.job.job import JobStream
from rankwatch_service.policy.settings_in_force import SettingsInForce
from rankwatch_service.store.rows import incident_row
from rankwatch_service.stream.saved import pack, unpack
from tests.support.values.batches import bundle
from tests.support.values.presences import ATTEMPT, frame


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


def findings(ranks: Sequence[Sequence[Mapping[str, float]]], topology: Topology) -> list[Finding]:
    """Judge the rows of each rank. What hosts measure is equal, as in synchronous training."""
    observations: list[Observation] = [AttemptStart(ATTEMPT, topology, 0.0)]
    for step, rows in enumerate(zip(*ranks, strict=True)):
        hosts = {"step_time_s": [0.05] * len(rows), "busy_s": [0.045] * len(rows)}
        names = sorted({name for row in rows for name in row if name.startswith("device_")})
        devices = {name: [row.get(name, np.nan) for row in rows] for name in names}
        observations.append(frame(step, hosts | devices, time_s=0.05 * step))
    return opened(evaluate(observations, [StragglerDetector(StragglerConfig()), SlowdownDetector(SlowdownConfig())]))


TICK_S = 1.0


def judged(batches: Sequence[wire.Batch], after_s: float = 90.0) -> list[dict[str, Any]]:
    """The incidents of one job, oldest first, as they are `after_s` after the last batch; each was taken when sent."""
    effects = Effects()
    job = JobStream(batches[0].job, detectors, lambda job, incident: {}, SettingsInForce())
    now_s = batches[0].sent_unix_ns * 1e-9
    for batch in batches:
        while now_s + TICK_S <= batch.sent_unix_ns * 1e-9:
            now_s += TICK_S
            job.tick(now_s, 0.0, effects)
        assert job.admit(bundle(batch), CellQuota(batch.job, 0), now_s, effects) == BundleAccepted()
    for _ in range(int(after_s / TICK_S)):
        now_s += TICK_S
        job.tick(now_s, 0.0, effects)
    assert not effects.failures
    incidents: dict[str, dict[str, Any]] = {}
    for transition in effects.transitions:
        incidents[transition.incident.id] = incident_row(transition.incident)
    return list(incidents.values())
