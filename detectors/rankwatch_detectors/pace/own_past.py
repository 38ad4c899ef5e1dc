"""Finds ranks that have become slower than they were, in a job whose ranks do not wait for each other.

Rollouts, parameter servers and evaluation workers take as long for a step as their work is, so no rank can be compared
with another. Each is judged against its own past (`own_blocks`), apart from what has become slower for most ranks at
the same time: that is one slowdown of the job. Where ranks march together, `straggler` and `slowdown` judge, and
nothing is done here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from rankwatch_detectors.base import AttemptStart, Finding, Floats, Frame, Ints, Kind, Occurrence, Severity, StepKind
from rankwatch_detectors.dispatch import ATTEMPT_ENDED, OTHER_CLOCK, DispatchingDetector, finite, where_usable
from rankwatch_detectors.episodes import Episodes
from rankwatch_detectors.pace.witness import cpu_seconds, own_seconds
from rankwatch_detectors.scope import WHOLE_JOB, IncidentScope
from rankwatch_detectors.statistics.median import median
from rankwatch_detectors.statistics.own_blocks import OwnBlocks, OwnBlocksConfig, SlowRank


@dataclass(frozen=True, slots=True)
class OwnPastConfig:
    """Settings of the judgement of each rank against its own past."""

    blocks: OwnBlocksConfig = field(default_factory=OwnBlocksConfig)
    sigmas: float = 5.5
    """Counts for one rank by itself. Means of normal noise would need four; durations have heavier tails."""
    skipped_rows: int = 2
    """First rows of each rank: compilation, caches and connections, not work."""
    clear_share: float = 0.4
    """It is over when two blocks together exceed what was usual by less than this share of what was reported."""
    brief_ratio: float = 1.5
    """Below it a slower rank or job is worth knowing as long as it may pass by itself ..."""
    brief_s: float = 900.0
    """... within a quarter of an hour."""


class OwnPastDetector(DispatchingDetector):
    """Scopes "rank:N" (kind straggler) and "job" (kind slowdown). Memory: 860 bytes for each rank."""

    kind: Kind = Kind.STRAGGLER
    TAKES_LATE = True
    STATE: ClassVar[tuple[str, ...]] = (
        *DispatchingDetector.STATE,
        "lockstep",
        "_accelerated",
        "_blocks",
        "_seen",
        "_effect",
        "_score",
        "_before",
        "_before_together",
        "_together",
    )

    def __init__(self, config: OwnPastConfig) -> None:
        super().__init__()
        self.name = "own_past"
        self.version = 2
        self._config = config
        self._blocks = OwnBlocks(config.blocks)
        self._accelerated = False
        self._together = Episodes(Kind.SLOWDOWN)
        """The slowdown of most ranks at once."""
        self._restart(0)

    def _restart(self, ranks: int) -> None:
        self._blocks.begin(ranks)
        self._seen: Ints = np.zeros(ranks, dtype=np.int64)
        self._effect: Floats = np.zeros(ranks)
        """By how much the newest blocks of each rank are slower, in logarithms ..."""
        self._score: Floats = np.zeros(ranks)
        """... and how many times what they usually differ by; 0 where they are not slower."""
        self._before: Floats = np.full(ranks, math.nan)
        """Logarithm of what was usual before a rank was reported as slower; NaN for the others ..."""
        self._before_together: Floats = np.full(ranks, math.nan)
        """... and before the job was; NaN for ranks that were not known then."""

    def _on_attempt(self, start: AttemptStart, *, new_attempt: bool, new_launch: bool) -> Sequence[Finding]:  # noqa: ARG002
        topology = start.topology
        other_clock = not new_attempt and topology.accelerated != self._accelerated
        self._accelerated = topology.accelerated
        if not (new_attempt or other_clock or topology.lockstep != self.lockstep):
            return ()
        why = ATTEMPT_ENDED if new_attempt else OTHER_CLOCK if other_clock else "Ranks march together."
        return self._begin_anew(why, 0 if topology.lockstep else topology.world_size)

    def _on_occurrence(self, occurrence: Occurrence) -> Sequence[Finding]:
        kinds = occurrence.fields.get("kinds", ())
        declared = occurrence.kind == "declared" and occurrence.attempt == self.attempt
        accepted = occurrence.kind == "accepted" and (Kind.STRAGGLER in kinds or Kind.SLOWDOWN in kinds)
        if self.lockstep or not (declared or accepted):
            return ()
        why = f"The job declared a change: {occurrence.fields.get('what')}." if declared else "The level was accepted."
        return self._begin_anew(why, self.world_size)

    def _begin_anew(self, why: str, ranks: int) -> list[Finding]:
        self._restart(ranks)
        return [*self.episodes.close_all(self.now_s, why), *self._together.close_all(self.now_s, why)]

    def _on_frame(self, frame: Frame) -> Sequence[Finding]:
        if self.lockstep or frame.family != "steps" or frame.kind is not StepKind.TRAIN:
            return ()
        seconds = self._seconds(frame)
        if seconds is None:
            return ()
        here = np.flatnonzero((seconds > 0) & (seconds < np.inf))
        self._seen[here] += 1
        here = here[self._seen[here] > self._config.skipped_rows]
        full = self._blocks.push(here, seconds[here], frame.step)
        return [finding for rank in full for finding in self._judge(rank, frame)]

    def _seconds(self, frame: Frame) -> Floats | None:
        """Each rank's own time in the row; where ranks share cores, their CPU time; NaN where not measured."""
        cpu = None if self._accelerated else cpu_seconds(frame)
        own = cpu if cpu is not None else own_seconds(frame)
        if own is not None:
            return own
        step_s = finite(frame, "step_time_s")
        return None if step_s is None else where_usable(step_s, np.nan)

    def _judge(self, rank: int, frame: Frame) -> list[Finding]:
        """Look at a rank whose block is full."""
        slower = self._blocks.slower(rank)
        self._effect[rank], self._score[rank] = (slower.effect, slower.score) if slower else (0.0, 0.0)
        findings = self._follow_together(rank, frame)
        scope = IncidentScope.of_rank(rank)
        if scope in self.episodes:
            return [*findings, *self._follow(rank, scope, frame)]
        if slower is None:
            return findings
        if WHOLE_JOB not in self._together and self._most_are_slower():
            return [*findings, *self._open_together(slower, frame)]
        if slower.score < self._config.sigmas:
            return findings
        alone = slower.effect - self._common()
        least = max(math.log(self._config.blocks.ratio_min), self._config.sigmas * slower.sigma)
        return [*findings, *(self._open(slower, frame) if alone >= least else ())]

    def _most_are_slower(self) -> bool:
        """Whether more than half of the ranks are: each of several needs to be less certain than one by itself."""
        most = max(int(np.count_nonzero(self._blocks.judged)) // 2 + 1, 2)
        return int(np.count_nonzero(self._score >= self._config.sigmas / math.sqrt(most))) >= most

    def _common(self) -> float:
        """By how much the job is slower: half of the ranks at least, by their newest rows. Logarithm, 0 at least."""
        ranks = np.flatnonzero(self._blocks.judged)
        excess = np.sort(self._blocks.newest(ranks) - self._blocks.usual(ranks))
        return max(0.0, float(excess[(excess.size - 1) // 2])) if excess.size else 0.0

    def _open(self, slower: SlowRank, frame: Frame) -> list[Finding]:
        self._before[slower.rank] = math.log(slower.usual_s)
        ratio = math.exp(slower.effect)
        return self.episodes.open(
            IncidentScope.of_rank(slower.rank),
            ranks=(slower.rank,),
            summary=f"Rank {slower.rank} takes {ratio:.2f} times as long for a step as it used to "
            f"({slower.usual_s:.3g} s), since about its step {slower.onset_step}.",
            cause="worker",
            **self._words(slower, frame, ranks=1),
        )

    def _open_together(self, slower: SlowRank, frame: Frame) -> list[Finding]:
        """Most ranks are slower: one slowdown, and the level that they have now is what is usual from here on."""
        ranks = np.flatnonzero(self._score)
        usual = self._blocks.usual(np.arange(self.world_size))
        usual_s = math.exp(median(usual[np.isfinite(usual)]))
        whole = replace(slower, effect=median(self._effect[ranks]), usual_s=usual_s)
        words = self._words(whole, frame, ranks=self.world_size)
        findings: list[Finding] = []
        for scope in self.episodes:
            if self.episodes.told(scope)["detected_time_s"] >= words["onset_time_s"]:
                why = "Most ranks have become slower, not this one alone."
                findings += self.episodes.close(scope, self._step_since(self.episodes, scope, frame), self.now_s, why)
                self._before[scope.number] = math.nan
        self._before_together = usual
        for rank in range(self.world_size):
            self._blocks.forget(rank, slower.blocks if self._score[rank] else 0)
        self._effect[:] = self._score[:] = 0.0
        findings += self._together.open(
            WHOLE_JOB,
            summary=f"Steps take {math.exp(whole.effect):.2f} times as long as they used to ({usual_s:.3g} s) on "
            f"{ranks.size} of {self.world_size} ranks, since about step {slower.onset_step}.",
            **words,
        )
        return findings

    def _words(self, slower: SlowRank, frame: Frame, *, ranks: int) -> dict[str, Any]:
        ratio = math.exp(slower.effect)
        lasted_s = (frame.step - slower.onset_step + 1) * slower.usual_s * ratio
        lasts = ratio >= self._config.brief_ratio or lasted_s >= self._config.brief_s
        return {
            "attempt": self.attempt,
            "severity": Severity.WARNING if lasts else Severity.INFO,
            "onset_step": slower.onset_step,
            "detected_step": frame.step,
            "onset_time_s": self.now_s - lasted_s,
            "detected_time_s": self.now_s,
            "score": slower.score,
            "confidence": 0.9,
            "evidence": {
                "compared_with": "its own past",
                "ratio": ratio,
                "rate": 1 / ratio,
                "usual_s": slower.usual_s,
                "seconds": slower.usual_s * ratio,
                "blocks": slower.blocks,
                "sigma": slower.sigma,
                "cost_gpu_hours_per_hour": ranks * (1 - 1 / ratio),
            },
        }

    def _follow(self, rank: int, scope: IncidentScope, frame: Frame) -> list[Finding]:
        """Watch a slow rank: as fast as before, or slow for good?"""
        excess = self._blocks.newest_two(rank) - self._before[rank]
        if excess >= self._share(self.episodes.told(scope)):
            return self._grown_old(self.episodes, scope, frame)
        self._before[rank] = math.nan
        summary = f"Rank {rank} is as fast as it used to be again."
        return self.episodes.close(scope, self._step_since(self.episodes, scope, frame), self.now_s, summary)

    def _follow_together(self, rank: int, frame: Frame) -> list[Finding]:
        """Watch the slowdown of most ranks: are they back at the level from before?"""
        if WHOLE_JOB not in self._together:
            return []
        before = self._before_together
        ranks = np.flatnonzero(np.isfinite(before))
        excess = np.sort(self._blocks.newest(ranks) - before[ranks])
        share = self._share(self._together.told(WHOLE_JOB))
        # A rank that was not known then, whose `before` is NaN, decides nothing by itself.
        slow_rank = bool(self._blocks.newest_two(rank) - before[rank] >= share)
        if slow_rank or excess[(excess.size - 1) // 2] >= share:
            return self._grown_old(self._together, WHOLE_JOB, frame)
        for each in range(self.world_size):
            self._blocks.forget(each, 1)
        step = self._step_since(self._together, WHOLE_JOB, frame)
        return self._together.close(WHOLE_JOB, step, self.now_s, "Steps take as long as before again.")

    def _share(self, told: Mapping[str, Any]) -> float:
        return self._config.clear_share * math.log(told["evidence"]["ratio"])

    def _grown_old(self, episodes: Episodes, scope: IncidentScope, frame: Frame) -> list[Finding]:
        """What has not passed by itself is more than worth knowing."""
        known = episodes.told(scope)
        if known["severity"] != Severity.INFO or self.now_s - known["onset_time_s"] < self._config.brief_s:
            return []
        now = {"detected_step": self._step_since(episodes, scope, frame), "detected_time_s": self.now_s}
        summary = f"{known['summary']} It has not passed by itself."
        return episodes.update(scope, severity=Severity.WARNING, summary=summary, **now)

    @staticmethod
    def _step_since(episodes: Episodes, scope: IncidentScope, frame: Frame) -> int:
        """The step of a row that tells of an episode: ranks count for themselves, and others may be far behind."""
        return max(frame.step, int(episodes.told(scope)["onset_step"]))
