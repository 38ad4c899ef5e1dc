"""Finds replicas whose parameters are no longer bit-equal, and ranks whose local gradients depart from their peers'.

Fingerprints of data-parallel replicas must agree. With three or more, the majority is right and the others are named;
with two it is unknown which one is wrong. Of a sharded model the slices are compared that several ranks hold. Local
gradient norms differ from rank to rank with the data; only a lasting change of a rank's usual offset from its peers
counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from rankwatch_detectors.base import AttemptStart, Finding, Floats, Frame, Ints, Kind, Observation, Severity, StepKind
from rankwatch_detectors.dispatch import STARTS, DispatchingDetector, finite, typical, where_usable
from rankwatch_detectors.pace.load import LoadConfig
from rankwatch_detectors.pace.peer_test import PeerTest, PeerTestConfig
from rankwatch_detectors.scope import WHOLE_JOB, IncidentScope
from rankwatch_detectors.statistics.baseline import BaselineConfig
from rankwatch_detectors.statistics.shift import Crossing
from rankwatch_detectors.words import compared, listed

MAJORITY_MIN = 3


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """Fingerprints of one frame. Arrays have one entry for each fingerprint."""

    rank: Ints
    group: Ints
    """Fingerprints of one group must be equal."""
    prints: Ints
    complete: bool
    """Whether all fingerprints that can be compared are there."""

    def unequal(self) -> Ints:
        """The groups whose fingerprints differ."""
        first = np.zeros(int(self.group.max()) + 1, dtype=np.int64)
        first[self.group] = self.prints
        return np.unique(self.group[self.prints != first[self.group]])

    def of(self, group: int) -> tuple[Ints, Ints]:
        """The ranks of a group, and their fingerprints."""
        members = np.flatnonzero(self.group == group)
        return self.rank[members], self.prints[members]


class FingerprintDetector(DispatchingDetector):
    """Scope "rank:N" for a differing replica, "job" if there is no majority. Memory: 8 bytes for a rank and slice."""

    kind: Kind = Kind.CORRUPTION
    STATE: ClassVar[str] = "_replicated _group _slices _equal_step _equal_s"

    def __init__(self) -> None:
        super().__init__()
        self.name = "corruption"
        self.version = 5
        self._replicated = False
        self._group: Ints = np.zeros(0, dtype=np.int64)
        self._slices: Ints = np.zeros((0, 0), dtype=np.int64)
        """[n, rank]: which bits the n-th slice of a rank must have; -1: no other rank is known to have the same."""
        self._equal_step: int | None = None
        """Newest step of this attempt in which all replicas agreed ..."""
        self._equal_s: float | None = None
        """... and its time."""

    def _on_attempt(self, start: AttemptStart, *, new_attempt: bool, new_launch: bool) -> Sequence[Finding]:  # noqa: ARG002
        self._replicated = start.topology.replicated
        self._group = start.topology.peer_group
        self._slices = np.array(start.topology.slices, dtype=np.int64).reshape(-1, start.topology.world_size)
        if new_attempt:
            self._equal_step = self._equal_s = None
        return ()

    def _on_frame(self, frame: Frame) -> Sequence[Finding]:
        compared = self._compared(frame) if frame.exact else None
        if compared is None:
            return ()
        suspects = compared.unequal()
        if suspects.size:
            return self._report(frame, compared, suspects)
        if compared.complete:
            self._equal_step, self._equal_s = frame.step, self.now_s
            summary = f"All replicas are equal again in step {frame.step}."
            return [f for scope in self.episodes for f in self.episodes.close(scope, frame.step, self.now_s, summary)]
        return ()

    def _compared(self, frame: Frame) -> Fingerprints | None:
        """The fingerprints of this frame that others must equal; None if there are none."""
        sources = [("fingerprint", self._group)] if self._replicated else []
        sources += [(f"fingerprint.{number}", group) for number, group in enumerate(self._slices)]
        if not any(name in frame.exact for name, _ in sources):
            return None
        ranks, groups, prints = [], [], []
        complete, first = True, 0
        for name, group in sources:
            found = frame.exact.get(name)
            wanted = group >= 0
            here = wanted if found is None else wanted & frame.present[name]
            complete &= found is not None and bool((here == wanted).all())
            if found is not None:
                ranks.append(np.flatnonzero(here))
                groups.append(group[here] + first)
                prints.append(found[here])
            if name == "fingerprint":
                first = int(group.max(initial=-1)) + 1
        rank, group_of = np.concatenate(ranks), np.concatenate(groups)
        return Fingerprints(rank, group_of, np.concatenate(prints), complete=complete) if rank.size else None

    def _report(self, frame: Frame, compared: Fingerprints, suspects: Ints) -> list[Finding]:
        findings: list[Finding] = []
        for group in suspects.tolist():
            members, prints = compared.of(group)
            values, counts = np.unique(prints, return_counts=True)
            most = int(counts.max())
            if members.size >= MAJORITY_MIN and 2 * most > members.size:
                right = values[int(counts.argmax())]
                for rank in members[prints != right].tolist():
                    findings.extend(
                        self._open(IncidentScope.of_rank(rank), (int(rank),), frame, prints, members, certain=True)
                    )
            else:
                ranks = tuple(int(rank) for rank in members[:64])
                findings.extend(self._open(WHOLE_JOB, ranks, frame, prints, members, certain=False))
        return findings

    def _open(
        self, scope: IncidentScope, ranks: tuple[int, ...], frame: Frame, prints: Ints, members: Ints, *, certain: bool
    ) -> list[Finding]:
        if scope in self.episodes:
            return []
        # The onset is just after the last agreement: any checkpoint saved since then may be corrupted.
        onset = frame.step if self._equal_step is None else self._equal_step + 1
        others = np.setdiff1d(members, np.asarray(ranks)) if certain else members
        reported = {int(rank): f"{int(bits) & (2**64 - 1):016x}" for rank, bits in zip(members, prints, strict=True)}
        agree = int(np.unique(prints, return_counts=True)[1].max())
        return self.episodes.open(
            scope,
            attempt=self.attempt,
            severity=Severity.CRITICAL,
            ranks=ranks,
            onset_step=onset,
            detected_step=frame.step,
            onset_time_s=self.now_s if self._equal_s is None else self._equal_s,
            detected_time_s=self.now_s,
            score=math.inf,
            confidence=1.0 if certain else 0.7,
            summary=_wrong_weights(ranks, self._since(frame.step), agree if certain else 0, members.size - 1),
            evidence={
                "fingerprints": {str(rank): reported[rank] for rank in ranks[:8]},
                "replicas": {str(rank): reported[rank] for rank in others[:8].tolist()},
                "replicas_compared": int(members.size),
                "equal_step": self._equal_step,
            },
            cause="worker" if certain else "",
        )

    def _since(self, step: int) -> str:
        """Since when weights differ, as far as is known."""
        if self._equal_step is None:
            return f"since step {step} or before"
        first = self._equal_step + 1
        return f"since step {step}" if first == step else f"since a step between {first} and {step}"


def _wrong_weights(ranks: Sequence[int], since: str, agree: int, replicas: int) -> str:
    """The summary.

    Args:
        ranks: whose weights are wrong; where that is not certain, all that differ.
        since: when it began.
        agree: replicas that agree with each other; 0: no majority shows who is wrong.
        replicas: of the rank, besides itself.
    """
    if agree:
        which = f"its {agree} replicas" if agree == replicas else f"{agree} of its {replicas} replicas"
        return f"The weights of rank {ranks[0]} are wrong {since}: {which} agree with each other, not with it."
    few = listed(ranks, 8)
    return f"The weights of replicas on ranks {few} differ {since}, and no majority shows which of them are wrong."


@dataclass(frozen=True, slots=True)
class LocalNormConfig:
    """Settings of the local gradient norm detector."""

    budget: float = 0.5
    """False incidents per job-week; the other half of the kind's budget is unused, since fingerprints are exact."""
    peer_test: PeerTestConfig = field(
        # A third larger, or a quarter smaller: data alone does not change one rank by so much for many steps.
        default_factory=lambda: PeerTestConfig(ratios=(1.35, 2.0, 1 / 1.35, 0.5), ratio_min=1.25)
    )
    baseline: BaselineConfig = field(
        default_factory=lambda: BaselineConfig(
            warm_rows=32, sigma_start=0.3, sigma_floor=0.03, offset_max=math.log(3.0)
        )
    )
    load: LoadConfig = field(default_factory=LoadConfig)
    clear_share: float = 0.4
    clear_rows: int = 16


class LocalNormDetector(DispatchingDetector):
    """Finds ranks whose gradient norm before the reduction departs from their peers'; scope "rank:N"."""

    kind: Kind = Kind.CORRUPTION
    STATE: ClassVar[str] = "_peer_test _peers _state _last_step"

    def __init__(self, config: LocalNormConfig) -> None:
        super().__init__()
        self.name = "local_grad_norm"
        self.version = 10
        self._config = config
        self._peer_test = PeerTest(config.peer_test, config.baseline, config.load, config.budget)
        self._peers: Ints = np.zeros(0, dtype=np.int64)
        self._state: dict[str, list[float]] = {}
        """Reported excess, smoothed excess, calm rows, by open scope."""
        self._last_step = -1

    def _on_attempt(self, start: AttemptStart, *, new_attempt: bool, new_launch: bool) -> Sequence[Finding]:
        ranks, peers, before = start.topology.world_size, start.topology.peer_group, self._peers
        self._peers = peers
        if not new_attempt and not np.array_equal(peers, before):  # ranks have declared their places after the start
            self._peer_test.begin(start.topology, np.arange(ranks, dtype=np.int64))
        if new_attempt:
            # The norm of a rank's gradients belongs to its data, so a new launch starts without any history.
            known = not new_launch and self._peer_test.baseline.rows.size == ranks
            came_from = np.arange(ranks, dtype=np.int64) if known else np.full(ranks, -1, dtype=np.int64)
            self._peer_test.begin(start.topology, came_from)
            self._state = {}
            self._last_step = -1
        return ()

    @property
    def reads(self) -> frozenset[type[Observation]]:
        """A single rank has no peers."""
        return super().reads if self.world_size > 1 else STARTS

    def _on_frame(self, frame: Frame) -> Sequence[Finding]:
        found = finite(frame, "local_grad_norm")
        if found is None or frame.kind is not StepKind.TRAIN or frame.step <= self._last_step or self.world_size == 1:
            return ()
        self._last_step = frame.step
        values = where_usable(found, np.nan)
        step_s = typical(frame, "step_time_s")
        residual, crossings = self._peer_test.evaluate(values, frame, step_s, self.now_s, self._named())
        findings = []
        for scope in self.episodes:
            rank = scope.number
            state = self._state[str(scope)]
            state[1] += (float(residual[rank]) - state[1]) / self._config.clear_rows
            state[2] = state[2] + 1 if abs(state[1]) < self._config.clear_share * abs(state[0]) else 0
            if state[2] >= self._config.clear_rows:
                summary = f"The gradients of rank {rank} have their usual size again in step {frame.step}."
                findings.extend(self.episodes.close(scope, frame.step, self.now_s, summary))
                del self._state[str(scope)]
        for crossing in crossings:
            findings.extend(self._open(crossing, values, frame))
            self._peer_test.bank.clear_rank(crossing.rank)
        self._peer_test.learn(self._named())
        return findings

    def _named(self) -> list[int]:
        """Ranks with an open episode."""
        return [scope.number for scope in self.episodes]

    def _open(self, crossing: Crossing, values: Floats, frame: Frame) -> list[Finding]:
        rank, ratio = crossing.rank, math.exp(crossing.effect)
        scope = IncidentScope.of_rank(rank)
        peers = self._peer_test.peers_of(rank)
        findings = self.episodes.open(
            scope,
            attempt=self.attempt,
            severity=Severity.INFO,
            ranks=(rank,),
            onset_step=crossing.onset_step,
            detected_step=frame.step,
            onset_time_s=self.now_s - crossing.rows * self._peer_test.step_s,
            detected_time_s=self.now_s,
            score=abs(crossing.effect) / float(self._peer_test.sigma[rank]) * math.sqrt(crossing.rows),
            confidence=0.6,
            summary=(
                f"The gradients of rank {rank} are {compared(ratio)} their usual size since step "
                f"{crossing.onset_step}, while those of its peers are not."
            ),
            evidence={
                "ratio": ratio,
                "local_grad_norm": float(values[rank]),
                "peers_local_grad_norm": float(np.nanmedian(values[peers])) if peers else None,
                "peers_compared": len(peers),
                "rows": crossing.rows,
                "log_likelihood_ratio": crossing.evidence,
            },
            cause="worker",
        )
        if findings:
            self._state[str(scope)] = [crossing.effect, crossing.effect, 0.0]
        return findings
