"""The history of a job: its checkpoint ledger, and its latest changes (attempts, orders, declarations). Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import msgspec

from rankwatch.locations import is_below
from rankwatch_detectors.base import Kind, Occurrence
from rankwatch_service.incidents.answers import save_text
from rankwatch_service.incidents.model import Incident, unix_ns
from rankwatch_service.job.topology_state import TopologyState
from rankwatch_service.names import launch_of
from rankwatch_service.policy.actions import Action
from rankwatch_service.policy.checkpoint_ledger import CheckpointTier, Ledger, LedgerEntry, Shard, Verdict
from rankwatch_service.policy.control_records import OrderPhase
from rankwatch_service.policy.traces import TraceAnswer, trace_answer

CHANGES_MAX: Final = 32
"""Newest changes kept."""

CONFIGURED_MAX: Final = 32
"""Newest changes of the configuration kept: what a script declares may come with each step."""

TEXT_MAX: Final = 200
"""Characters kept of an agent's report of a refused location, and of a change of the configuration."""

ROOTS_SHOWN: Final = 4
"""Checkpoint roots named in the reason why a location is refused."""

FAILED: Final = " of a checkpoint failed on rank "
"""Marks the change of a failed save or restore."""

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
    """The checkpoint ledger of one job, and its latest changes. `counts` counts by reason the events without effect."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.counts: Counter[str] = Counter()
        self._changes: deque[dict[str, Any]] = deque(maxlen=CHANGES_MAX)
        self._configured: deque[dict[str, Any]] = deque(maxlen=CONFIGURED_MAX)
        self._first_step: int | None = None

    @property
    def first_step(self) -> int | None:
        """The first step that the running attempt finished; None before it."""
        return self._first_step

    def begin(self, attempt: str, before: str, now_s: float) -> None:
        """Begin a new attempt.

        Args:
            attempt: the new one.
            before: the one that it follows; empty: none.
            now_s: stream time.
        """
        self._first_step = None
        again = f" after {before}" if before else ""
        self.note(f"attempt {attempt} began{again}", None, now_s)

    def _began_at(self, attempt: str, step: int) -> None:
        """Add the first step that a new attempt has finished to the change that it is."""
        for number, change in enumerate(self._changes):
            if change["step"] is None and change["what"].startswith(f"attempt {attempt} began"):
                self._changes[number] = change | {"step": step}

    def note(self, what: str, step: int | None, now_s: float) -> None:
        """Add a change."""
        self._changes.append({"what": what, "step": step, "unix_ns": unix_ns(now_s)})

    def configured(self, changes: Iterable[str], step: int | None, now_s: float) -> None:
        """Add changes of the configuration: of settings that people have changed, or that the script declares.

        Args:
            changes: what has changed.
            step: the newest finished step; -1 or None: none is known.
            now_s: stream time.
        """
        known = None if step == -1 else step
        for what in changes:
            self.note(what, known, now_s)
            self._configured.append({"what": what[:TEXT_MAX], "step": known, "unix_ns": unix_ns(now_s)})

    @property
    def configuration(self) -> tuple[dict[str, Any], ...]:
        """The newest changes of the configuration, oldest first: {what, step, unix_ns}."""
        return tuple(self._configured)

    def ordered(self, order: OrderPhase, now_s: float) -> None:
        """Add the phases of an order in which ranks act, or go on after a pause."""
        if order.phase in ("do", "kill"):
            what = f"{order.action} ({order.mode})" if order.mode else order.action
            if order.checkpoint_step >= 0:
                what += f" {'from' if order.action == Action.RELAUNCH else 'to'} step {order.checkpoint_step}"
            self.note(what, order.step if order.step >= 0 else None, now_s)
        elif order.phase == "go" and order.action == Action.PAUSE:
            self.note("went on after a pause", order.step, now_s)

    def before(self, onset_time_s: float, kind: str = "") -> list[dict[str, Any]]:
        """The changes of the last `CHANGES_S` before the onset, oldest first; without those that are the incident.

        Args:
            onset_time_s: of the incident.
            kind: of the incident.
        """
        low, high = unix_ns(onset_time_s - CHANGES_S), unix_ns(onset_time_s)
        is_failure = kind in (Kind.CHECKPOINT_FAILED, Kind.RESTORE_FAILED)
        latest = [one for one in self._changes if low <= one["unix_ns"] <= high]
        return [one for one in latest if not (is_failure and FAILED in one["what"])]

    def saved(self, occurrence: Occurrence, topology_state: TopologyState, running: str) -> list[LedgerEntry]:
        """Add the shard of a checkpoint that a rank reports.

        What has no effect is counted: an invalid report (`checkpoint_saved`), one that is not from a rank of the
        running launch (`checkpoint_rank`), and one whose location is outside of the checkpoint roots
        (`checkpoint_location`). The last also becomes a refused entry.

        Args:
            occurrence: the event.
            topology_state: the ranks of the running attempt, and what they declare.
            running: that attempt.

        Returns:
            The ledger entries that changed.
        """
        try:
            reported = msgspec.convert(dict(occurrence.fields), _Saved, strict=False)
            tier = CheckpointTier(reported.tier)
        except (msgspec.ValidationError, ValueError):
            self.counts["checkpoint_saved"] += 1
            return []
        if occurrence.step is None or not 0 <= reported.seconds < 1e9:
            self.counts["checkpoint_saved"] += 1
            return []
        rank = occurrence.rank
        if rank is None or not topology_state.has(rank) or launch_of(occurrence.attempt) != launch_of(running):
            self.counts["checkpoint_rank"] += 1
            return []
        shard = Shard(
            attempt=occurrence.attempt,
            step=occurrence.step,
            rank=rank,
            tier=tier,
            location="" if tier is CheckpointTier.MEMORY else reported.location,
            seconds=reported.seconds,
            bytes=max(reported.bytes, 0),
            at_unix_ns=unix_ns(occurrence.time_s),
        )
        if why := self._outside(shard, topology_state.checkpoint_roots):
            self.counts["checkpoint_location"] += 1
            return self.ledger.refused(shard, why)
        changed = self.ledger.saved(shard, topology_state.shards_expected(max(reported.shards, 0)))
        for entry in changed:
            if entry.verdict is Verdict.UNPROVEN and tier is not CheckpointTier.MEMORY:
                self.note(save_text(entry.id), entry.step, occurrence.time_s)
        return changed

    def add(self, occurrence: Occurrence) -> None:
        """Add the change that a rank declared, or what happened to a checkpoint.

        The rank has loaded it, could not save or load it, or its agent did not pass it on.
        """
        if occurrence.kind == "declared":
            how = "went on with" if occurrence.fields.get("kind") else "declared:"
            what = f"{how} {occurrence.fields.get('what')}"
            self.configured([what], occurrence.step, occurrence.time_s)
            return
        what = "checkpoint loaded"
        if occurrence.kind == "checkpoint_failed":
            what, error = (str(occurrence.fields.get(name, ""))[:TEXT_MAX] for name in ("what", "message"))
            what = f"{what}{FAILED}{occurrence.rank}: {error}"
        elif occurrence.kind == "location_refused":
            checkpoint, reason = (str(occurrence.fields.get(name, ""))[:TEXT_MAX] for name in ("checkpoint", "reason"))
            self.counts["location_refused"] += 1
            what = f"host {occurrence.host} does not load {checkpoint}: {reason}"
        self.note(what, occurrence.step, occurrence.time_s)

    def traced(self, job: str, occurrence: Occurrence) -> list[TraceAnswer]:
        """A rank's answer to a trace, if the event is one; recorded steps are a change."""
        answer = trace_answer(job, occurrence, unix_ns(occurrence.time_s))
        if answer is not None and answer.summary:
            self.note(f"rank {answer.rank} was traced", occurrence.step, occurrence.time_s)
        return [] if answer is None else [answer]

    def _outside(self, shard: Shard, roots: Collection[str]) -> str:
        """Why the location of a shard must not be loaded; "" if it may."""
        try:
            if is_below(shard.location, roots):
                return ""
        except ValueError as error:
            return f"its location cannot be used: {error}"
        reported = ", ".join(sorted(roots)[:ROOTS_SHOWN]) or "none is known yet"
        return f"its location is not below a checkpoint root of the job ({reported})"

    def gone(self, occurrence: Occurrence) -> list[LedgerEntry]:
        """Mark the checkpoint that a rank or an agent misses as gone, or a launch's captures if a process has ended.

        Returns:
            The ledger entries that changed; none for an invalid report, which is counted (`checkpoint_gone`).
        """
        if occurrence.kind == "process_exit":
            launch = launch_of(occurrence.attempt)
            return [] if occurrence.rank is None else self.ledger.process_ended(launch, occurrence.rank)
        reported = occurrence.fields.get("checkpoint"), occurrence.fields.get("reason", "")
        if not all(isinstance(text, str) for text in reported):
            self.counts["checkpoint_gone"] += 1
            return []
        checkpoint, reason = map(str, reported)
        who = f"host {occurrence.host}" if occurrence.rank is None else f"rank {occurrence.rank}"
        return self.ledger.lost(checkpoint, f"{who}: {reason}")

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
            self._began_at(attempt, step)
            changed += self.ledger.began(attempt, step)
        # Called for each frame: nothing is looked for while no entry can change.
        if any(entry.verdict is Verdict.UNPROVEN for entry in self.ledger.entries):
            corrupted_since = [
                step if part.onset_step is None else part.onset_step
                for incident in incidents
                for part in incident.parts
                if part.corrupts_weights and part.attempt == attempt
            ]
            changed += self.ledger.progressed(attempt, self._first_step, step, min(corrupted_since, default=None))
        return changed

    def mark_suspect(self, incident: Incident) -> list[LedgerEntry]:
        """Mark as suspect what was saved since the onset of a part that spoils weights; returns the changed entries."""
        changed = []
        for part in incident.parts:
            if part.corrupts_weights and part.onset_step is not None:
                reason = f"saved after the onset of incident {incident.id} ({part.kind})"
                changed += self.ledger.mark_suspect(part.attempt, part.onset_step, reason)
        return changed

    def state(self) -> dict[str, Any]:
        """Everything, as JSON types."""
        return {
            "entries": [asdict(entry) for entry in self.ledger.entries],
            "counts": dict(self.counts),
            "changes": list(self._changes),
            "configured": list(self._configured),
            "first_step": self._first_step,
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> JobHistory:
        """The history that gave this state."""
        history = cls()
        history.ledger = Ledger(entry_restored(saved) for saved in state["entries"])
        history.counts.update(state["counts"])
        history._changes.extend(state["changes"])
        history._configured.extend(state["configured"])
        history._first_step = state["first_step"]
        return history


def entry_restored(saved: Mapping[str, Any]) -> LedgerEntry:
    """A ledger entry from its fields as JSON types."""
    tier, verdict, shards = CheckpointTier(saved["tier"]), Verdict(saved["verdict"]), tuple(saved["shards"])
    return LedgerEntry(**{**saved, "tier": tier, "verdict": verdict, "shards": shards})
