"""A job of four ranks with scripted observations, and a detector with scripted findings."""

import itertools
from collections.abc import Sequence
from typing import Any

from rankwatch import wire
from rankwatch_detectors.base import Change, Finding, Kind, Observation, Occurrence, Severity
from rankwatch_service.job.admission import BundleAccepted, CellQuota
from rankwatch_service.job.effects import Effects
from rankwatch_service.job.job import JobStream
from rankwatch_service.policy.policy import Policy, PolicyLimits, Rule
from rankwatch_service.policy.settings_in_force import SettingsInForce
from rankwatch_service.stream.saved import pack, unpack
from tests.support.values.batches import batch, bundle, table
from tests.support.values.incidents import finding


class Scripted:
    """Finds what a note event tells it to find."""

    name = "scripted"
    version = 1
    reads = frozenset({Occurrence})

    def __init__(self) -> None:
        self.notes = 0

    def observe(self, observation: Observation) -> Sequence[Finding]:
        if not isinstance(observation, Occurrence) or observation.kind != "note":
            return []
        self.notes += 1
        if observation.fields.get("fail"):
            raise Panic("out of sigmas")
        said = observation.fields
        return [
            finding(
                Kind(said["kind"]),
                Change(said.get("change", "open")),
                said.get("scope", "job"),
                attempt=observation.attempt,
                ranks=tuple(said.get("ranks", ())),
                onset_step=said.get("onset_step", 100),
                onset_time_s=observation.time_s,
                detected_time_s=observation.time_s,
                severity=Severity(said.get("severity", "critical")),
            )
        ]

    def inherit(self, before: Any) -> None: ...

    def snapshot(self) -> dict[str, Any]:
        return {"notes": self.notes}

    def restore(self, state) -> None:
        self.notes = state["notes"]


class Panic(BaseException):
    pass


class World:
    """A job of two hosts with two ranks each, with scripted observations."""

    def __init__(
        self,
        *rules: Rule,
        can=("pause", "checkpoint", "rollback", "rollback_memory", "rollback_disk", "relaunch"),
        roots=("/saved",),
        detector=Scripted,
        **limits,
    ) -> None:
        self.seq = itertools.count()
        self.effects = Effects()
        settings = SettingsInForce()
        settings.policy = Policy(rules, PolicyLimits(**limits))
        self._detector = detector
        self.job = self._new(settings)
        self.now_s = 1_000.0
        infos = tuple(
            wire.RankInfo(
                rank,
                4,
                rank % 2,
                f"node-{rank // 2}",
                f"GPU-{rank}",
                can=can,
                checkpoint_roots=roots,
                checkpoint_shards=1,
            )
            for rank in range(4)
        )
        self.send(ranks=infos)

    def _new(self, settings: SettingsInForce) -> JobStream:
        return JobStream("gpt", lambda: [self._detector()], lambda job, incident: {"incident": incident}, settings)

    def restart(self) -> None:
        """Go on from a snapshot, in another process."""
        job = self._new(SettingsInForce())
        job.restore(unpack(pack(self.job.state())))
        self.job = job

    def send(self, attempt="l.0", **fields) -> None:
        sent = bundle(batch(next(self.seq), attempt=attempt, **fields))
        assert self.job.admit(sent, CellQuota("gpt", 0), self.now_s, self.effects) == BundleAccepted()

    def train(self, *steps: int, attempt="l.0") -> None:
        for step in steps:
            self.send(attempt, steps=table([step] * 4, [0, 1, 2, 3], loss=[2.0] * 4, step_time_s=[0.5] * 4))

    def find(self, kind: str, attempt="l.0", **fields) -> None:
        event = wire.Event("note", 1, None, 1, {"kind": kind} | fields)
        self.send(attempt, events=(event,))

    def save(self, step: int, attempt="l.0", tier="memory", **fields) -> None:
        reported = {"tier": tier, "location": "/saved/x", "seconds": 1.0, "bytes": 10, "shards": 1} | fields
        self.send(attempt, events=(wire.Event("checkpoint_saved", 1, 0, step, reported),))

    def tick(self, seconds: float = 1.0) -> None:
        self.now_s += seconds
        self.job.tick(self.now_s, 0.0, self.effects)

    def reported(self) -> list[str]:
        return [str(transition.what) for transition in self.effects.transitions]

    def verdicts(self) -> dict[str, str]:
        return {entry.id: str(entry.verdict) for _, entry in self.effects.checkpoints}
