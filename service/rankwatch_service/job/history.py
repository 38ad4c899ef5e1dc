"""The history of a job: its checkpoint ledger, and its latest changes (attempts, orders, declarations). Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import msgspec

from rankwatch_detectors.base import Occurrence
from rankwatch_service.incidents.model import Incident, unix_ns
from rankwatch_service.policy.checkpoint_ledger import CheckpointTier, Ledger, LedgerEntry, Shard, Verdict

CHANGES_MAX: Final = 32
"""Newest changes kept."""

CHANGES_S: Final = 600.0
"""How long before the onset of an incident a change is listed with it."""


class _Saved(msgspec.Struct):
    """Fields of the event `checkpoint_saved`."""

    tier: str = "local"
    location: str = ""
    seconds: float = 0.0
    bytes: int = 0
    shards: int = 0


class JobHistory:
    """The checkpoint ledger of one job, and its latest changes. `counts` counts invalid events by kind."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.counts: Counter[str] = Counter()
        self._changes: deque[dict[str, Any]] = deque(maxlen=CHANGES_MAX)
        self._first_step: int | None = None

    @property
    def first_step(self) -> int | None:
        """The first step that the running attempt finished; None before it."""
        return self._first_step

    def begin(self, attempt: str, now_s: float) -> None:
        """Begin a new attempt."""
        self._first_step = None
        self.note(f"attempt {attempt} began", None, now_s)

    def note(self, what: str, step: int | None, now_s: float) -> None:
        """Add a change."""
        self._changes.append({"what": what, "step": step, "unix_ns": unix_ns(now_s)})

    def before(self, onset_time_s: float) -> list[dict[str, Any]]:
        """The changes of the last `CHANGES_S` before the onset, oldest first."""
        low, high = unix_ns(onset_time_s - CHANGES_S), unix_ns(onset_time_s)
        return [change for change in self._changes if low <= change["unix_ns"] <= high]

    def saved(self, occurrence: Occurrence, world_size: int) -> list[LedgerEntry]:
        """Add the shard of a checkpoint that a rank reports; an invalid report is counted (`checkpoint_saved`).

        Returns:
            The ledger entries that changed.
        """
        try:
            told = msgspec.convert(dict(occurrence.fields), _Saved, strict=False)
            tier = CheckpointTier(told.tier)
        except (msgspec.ValidationError, ValueError):
            self.counts["checkpoint_saved"] += 1
            return []
        if occurrence.step is None or occurrence.rank is None or not 0 <= told.seconds < 1e9:
            self.counts["checkpoint_saved"] += 1
            return []
        shard = Shard(
            attempt=occurrence.attempt,
            step=occurrence.step,
            rank=occurrence.rank,
            tier=tier,
            location=told.location,
            shards=max(told.shards, 0),
            seconds=told.seconds,
            bytes=max(told.bytes, 0),
            at_unix_ns=unix_ns(occurrence.time_s),
        )
        changed = self.ledger.saved(shard, world_size)
        for entry in changed:
            if entry.verdict is Verdict.UNPROVEN and tier is not CheckpointTier.MEMORY:
                self.note(f"checkpoint {entry.id} saved", entry.step, occurrence.time_s)
        return changed

    def gone(self, occurrence: Occurrence) -> list[LedgerEntry]:
        """Mark the capture that a rank has lost as gone, or all of its launch's if its process has ended.

        Returns:
            The ledger entries that changed; none for an invalid report, which is counted (`checkpoint_gone`).
        """
        if occurrence.kind == "process_exit":
            launch = occurrence.attempt.rpartition(".")[0]
            return [] if occurrence.rank is None else self.ledger.process_ended(launch, occurrence.rank)
        told = occurrence.fields.get("checkpoint"), occurrence.fields.get("reason", "")
        if not all(isinstance(text, str) for text in told):
            self.counts["checkpoint_gone"] += 1
            return []
        checkpoint, reason = map(str, told)
        return self.ledger.lost(checkpoint, f"rank {occurrence.rank}: {reason}")

    def progressed(self, attempt: str, step: int, incidents: Sequence[Incident]) -> list[LedgerEntry]:
        """Record that all ranks have finished a step; returns the ledger entries whose verdict changed.

        Args:
            attempt: the running one.
            step: the finished step.
            incidents: the open ones. Steps from the onset of a part that spoils weights on prove no checkpoint.
        """
        changed = []
        if self._first_step is None:
            self._first_step = step
            changed += self.ledger.began(attempt, step)
        # Called for each frame: nothing is looked for while no entry can change.
        if any(entry.verdict is Verdict.UNPROVEN for entry in self.ledger.entries):
            doubts = [
                step if part.onset_step is None else part.onset_step
                for incident in incidents
                for part in incident.parts
                if part.spoils_weights and part.attempt == attempt
            ]
            changed += self.ledger.progressed(attempt, self._first_step, step, min(doubts, default=None))
        return changed

    def doubt(self, incident: Incident) -> list[LedgerEntry]:
        """Mark as suspect what was saved since the onset of a part that spoils weights; returns the changed entries."""
        changed = []
        for part in incident.parts:
            if part.spoils_weights and part.onset_step is not None:
                reason = f"saved after the onset of incident {incident.id} ({part.kind})"
                changed += self.ledger.doubt(part.attempt, part.onset_step, reason)
        return changed

    def state(self) -> dict[str, Any]:
        """Everything, as JSON types."""
        return {
            "entries": [asdict(entry) for entry in self.ledger.entries],
            "counts": dict(self.counts),
            "changes": list(self._changes),
            "first_step": self._first_step,
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> JobHistory:
        """The history that gave this state."""
        history = cls()
        history.ledger = Ledger(entry_restored(saved) for saved in state["entries"])
        history.counts.update(state["counts"])
        history._changes.extend(state["changes"])
        history._first_step = state["first_step"]
        return history


def entry_restored(saved: Mapping[str, Any]) -> LedgerEntry:
    """A ledger entry from its fields as JSON types."""
    tier, verdict, shards = CheckpointTier(saved["tier"]), Verdict(saved["verdict"]), tuple(saved["shards"])
    return LedgerEntry(**{**saved, "tier": tier, "verdict": verdict, "shards": shards})
