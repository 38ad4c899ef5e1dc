"""Tells that a process is gone which had not left its loop, and which one went first.

The ranks that end within half a minute after the first are consequences: a lost peer breaks their collectives, and
launchers end the rest. Processes that end because an order told them to are expected. A process whose exit nobody
could read is told all the same, a little later, from its progress block.
"""

from __future__ import annotations

import math
import signal as signals
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rankwatch_detectors.base import AttemptStart, Bools, Finding, Kind, Occurrence, Presence, Severity
from rankwatch_detectors.dispatch import DispatchingDetector, which
from rankwatch_detectors.episodes import EPISODES_MAX

# What the ranks left behind say, with gloo, NCCL, sockets and the process group's store.
CONNECTION_ERRORS = (
    "connection closed", "connection reset", "connection refused", "broken pipe", "disterror", "distnetworkerror",
    "distbackenderror", "nccl", "gloo", "timed out", "timeout", "socket", "remote process", "peer", "store",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RankLostConfig:
    """Settings of the rank_lost detector. An exit is exact evidence, so there is nothing to calibrate."""

    consequence_s: float = 30.0
    """Ranks that end so soon after the first are its consequences."""
    exit_unread_s: float = 3.0
    """How long to wait for an exit's code before telling it without."""


class RankLostDetector(DispatchingDetector):
    """One episode for each first mover, scope "rank:N". Memory: one entry for each rank that ended."""

    kind: Kind = Kind.RANK_LOST
    STATE: ClassVar[tuple[str, ...]] = (*DispatchingDetector.STATE, "_gone", "_expected", "_first", "_unread")

    def __init__(self, config: RankLostConfig) -> None:
        super().__init__()
        self.name = "rank_lost"
        self.version = 1
        self._config = config
        self._forget()

    def _forget(self) -> None:
        self._gone: Bools = np.zeros(self.world_size, dtype=np.bool_)
        """Ranks whose end has been dealt with."""
        self._expected = False
        """An order ends the processes."""
        self._first: dict[str, Any] = {}
        """The newest first mover: its scope, when it ended, how plainly it ended by itself."""
        self._unread: dict[str, float] = {}

    def _on_attempt(self, start: AttemptStart, *, new_attempt: bool, new_launch: bool) -> Sequence[Finding]:  # noqa: ARG002
        if new_attempt:
            self._forget()
        return ()

    def _on_occurrence(self, occurrence: Occurrence) -> Sequence[Finding]:
        if occurrence.attempt.rpartition(".")[0] != self.attempt.rpartition(".")[0]:
            return ()
        fields = occurrence.fields
        if occurrence.kind == "order" and (fields.get("phase") == "kill" or fields.get("action") == "stop"):
            self._expected = True
        rank = occurrence.rank
        if rank is None or not 0 <= rank < self._gone.size or self._gone[rank]:
            return ()
        if occurrence.kind == "rank_left":
            self._gone[rank] = True
        if occurrence.kind == "process_exit":
            return self._ended(rank, occurrence)
        return ()

    def _on_tick(self, presence: Presence | None) -> Sequence[Finding]:
        if presence is None or "exited" not in presence.state:
            return ()
        findings: list[Finding] = []
        for rank in np.flatnonzero(which(presence.state, "exited") & presence.heard & ~self._gone).tolist():
            since = self._unread.setdefault(str(rank), self.now_s)
            if self.now_s - since >= self._config.exit_unread_s:
                unknown = {"code": None, "signal": None, "how": "unknown", "error": ""}
                step = int(presence.step[rank])
                occurrence = Occurrence("process_exit", self.attempt, "", self.now_s, rank, step, unknown)
                findings.extend(self._ended(rank, occurrence))
        return findings

    def _ended(self, rank: int, occurrence: Occurrence) -> list[Finding]:
        self._gone[rank] = True
        self._unread.pop(str(rank), None)
        if self._expected:
            return []
        exit_ = _exit(occurrence)
        if self._first and self.now_s - self._first["time_s"] <= self._config.consequence_s:
            return self._follow(rank, exit_, occurrence)
        scope = f"rank:{rank}"
        self._first = {"scope": scope, "time_s": self.now_s, "plain": _plainness(exit_), "count": 0}
        clean = exit_["code"] == 0
        return self.episodes.open(
            scope,
            attempt=self.attempt,
            severity=Severity.WARNING if clean else Severity.CRITICAL,
            ranks=(rank,),
            onset_step=occurrence.step,
            detected_step=occurrence.step,
            onset_time_s=occurrence.time_s,
            detected_time_s=self.now_s,
            score=math.inf,
            confidence=1.0,
            summary=_sentence(exit_, clean=clean),
            evidence={**exit_, "also_ended": [], "also_ended_count": 0},
        )

    def _follow(self, rank: int, exit_: dict[str, Any], occurrence: Occurrence) -> list[Finding]:
        """A later end: a consequence, unless it is the plainer cause and only came in later."""
        scope = self._first["scope"]
        if scope not in self.episodes:
            return []
        told = self.episodes.told(scope)["evidence"]
        self._first["count"] += 1
        first = {name: told[name] for name in exit_}
        changes: dict[str, Any] = {}
        if _plainness(exit_) > self._first["plain"]:
            self._first["plain"] = _plainness(exit_)
            changes = {"ranks": (rank,), "summary": _sentence(exit_, clean=False), "onset_step": occurrence.step}
            first, exit_ = exit_, first
        also = [*told["also_ended"], exit_][:EPISODES_MAX]
        evidence = {**first, "also_ended": also, "also_ended_count": self._first["count"]}
        if not changes and self._first["count"] not in (1, self.world_size - 1):
            # The list grows quietly; it is told with its first entry, when all ranks are gone, and when it matters.
            self.episodes.note(scope, evidence)
            return []
        return self.episodes.update(scope, detected_time_s=self.now_s, evidence=evidence, **changes)


def _exit(occurrence: Occurrence) -> dict[str, Any]:
    fields = occurrence.fields
    return {
        "rank": occurrence.rank,
        "host": occurrence.host,
        "code": fields.get("code"),
        "signal": fields.get("signal"),
        "how": str(fields.get("how", "unknown")),
        "error": str(fields.get("error") or "")[:500],
    }


def _plainness(exit_: dict[str, Any]) -> int:
    """How plainly a process ended by itself and not because of others: a crash most, a broken connection least."""
    if exit_["signal"] is not None:
        return 1 if exit_["signal"] == signals.SIGTERM else 3
    error = exit_["error"].lower()
    if any(words in error for words in CONNECTION_ERRORS):
        return 0
    return 2 if error else 1


def _sentence(exit_: dict[str, Any], *, clean: bool) -> str:
    where = f"Rank {exit_['rank']}" + (f" on {exit_['host']}" if exit_["host"] else "")
    if clean:
        return f"{where} ended with exit code 0 without leaving its training loop."
    if exit_["signal"] is not None:
        return f"{where} was ended by {_signal_name(exit_['signal'])}."
    reason = f": {exit_['error'].splitlines()[0]}" if exit_["error"] else ""
    code = "an exit code nobody could read" if exit_["code"] is None else f"exit code {exit_['code']}"
    return f"{where} ended with {code}{reason}."


def _signal_name(number: int) -> str:
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"
