"""Finds ranks that have become slower than they were, in a job whose ranks do not wait for each other.

Rollouts, parameter servers and evaluation workers take as long for a step as their work is, so no rank can be compared
with another. Each is judged against its own past (`OwnBlocks`), apart from what has become slower for most ranks at
the same time: that is one slowdown of the job. Where ranks march together, `straggler` and `slowdown` judge, and
nothing is done here.

Durations of work that differs from row to row have heavy tails and come in runs, so neither one row nor the scatter
of rows says much. A block is the mean logarithm of some rows. The newest 2, 4, 8 or 16 blocks are compared with the
median of the earlier ones, and what they may exceed it by is learned from the rank itself: how far means over as many
earlier blocks lie from that median. So a trend, or bouts that come and go, widen what is expected by themselves.
Every block teaches, the slow ones too: medians stand them until there are many.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from rankwatch_detectors.base import (
    AttemptStart,
    Bools,
    Finding,
    Floats,
    Frame,
    Ints,
    Kind,
    Observation,
    Occurrence,
    Severity,
    StepKind,
)
from rankwatch_detectors.declared import change_in, why_anew
from rankwatch_detectors.dispatch import ATTEMPT_ENDED, OTHER_CLOCK, STARTS, DispatchingDetector, finite, where_usable
from rankwatch_detectors.episodes import Episodes
from rankwatch_detectors.pace.peer_test import cpu_seconds, own_seconds, wanted_seconds
from rankwatch_detectors.scope import WHOLE_JOB, IncidentScope
from rankwatch_detectors.state import Stateful
from rankwatch_detectors.statistics.peers import median
from rankwatch_detectors.words import duration, slower_than

WINDOWS = (2, 4, 8, 16)
"""Newest blocks that are judged together: a tripled time shows in two, a third more needs up to sixteen."""
# Variance of a median over that of a mean, of a normal distribution.
MEDIAN_VARIANCE = math.pi / 2


@dataclass(frozen=True, slots=True)
class OwnBlocksConfig:
    """What makes a block, and what makes newer ones slower."""

    rows: int = 16
    """Rows of a block, at least ..."""
    seconds: float = 15.0
    """... and what they took, at least: who is slow for some seconds has a neighbour, or a long piece of work."""
    kept: int = 64
    """Earlier blocks that are remembered besides the newest."""
    known_min: int = 8
    """Earlier blocks before anything is reported ..."""
    known_windows: int = 3
    """... and so many times the blocks that are judged."""
    ratio_min: float = 1.25
    sigmas: float = 2.5
    """Counts where most ranks are slower at once. A steady trend comes to 1.7 of its own spread."""
    row_ratio_max: float = 7.4
    """One row counts as no more than so many times the block before it."""
    sigma_floor: float = 0.02


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank whose newest blocks are slower than it was."""

    rank: int
    effect: float
    """Logarithm of the ratio to its usual time."""
    usual_s: float
    sigma: float
    """What means over so many blocks differ by."""
    blocks: int
    onset_step: int

    @property
    def score(self) -> float:
        """How many times what such means differ by."""
        return self.effect / self.sigma


class OwnBlocks(Stateful):
    """Blocks of R ranks that go at their own pace. Memory: 820 bytes for each rank."""

    STATE: ClassVar[str] = "_sum _rows _took_s _begun _levels _steps _known _sigma"

    def __init__(self, config: OwnBlocksConfig) -> None:
        self._config = config
        self.begin(0)

    def begin(self, ranks: int) -> None:
        """Know nothing of so many ranks."""
        kept = self._config.kept + WINDOWS[-1]
        self._sum: Floats = np.zeros(ranks)
        self._rows: Floats = np.zeros(ranks)
        self._took_s: Floats = np.zeros(ranks)
        """The block that each rank is filling, and the step in which it begins."""
        self._begun: Ints = np.zeros(ranks, dtype=np.int64)
        self._levels: Floats = np.full((ranks, kept), math.nan)
        """Full blocks, the newest last ..."""
        self._steps: Ints = np.zeros((ranks, WINDOWS[-1]), dtype=np.int64)
        """... and the steps in which the newest of them begin."""
        self._known: Ints = np.zeros(ranks, dtype=np.int64)
        self._sigma: Floats = np.full((len(WINDOWS), ranks), math.nan)
        """What means over windows of each length differ by; NaN until enough is known."""

    def forget(self, rank: int, blocks: int) -> None:
        """Keep only the newest blocks of a rank: what was before them is no longer what is usual."""
        self._known[rank] = min(int(self._known[rank]), blocks)
        self._sigma[:, rank] = math.nan

    def push(self, ranks: Ints, seconds: Floats, step: int) -> list[int]:
        """Add the rows of one frame.

        Args:
            ranks: who made the step.
            seconds: what it took each of them; positive and finite.
            step: its number.

        Returns:
            Ranks whose block is full.
        """
        config = self._config
        first = ranks[self._rows[ranks] == 0]
        self._begun[first] = step
        logs = np.log(seconds)
        before, reach = self._levels[ranks, -1], math.log(config.row_ratio_max)
        known = self._known[ranks] > 0
        logs[known] = np.clip(logs[known], before[known] - reach, before[known] + reach)
        self._sum[ranks] += logs
        self._rows[ranks] += 1
        self._took_s[ranks] += seconds
        full = ranks[(self._rows[ranks] >= config.rows) & (self._took_s[ranks] >= config.seconds)]
        for rank in full.tolist():
            self._close(rank)
        return [int(rank) for rank in full]

    def _close(self, rank: int) -> None:
        self._levels[rank, :-1] = self._levels[rank, 1:]
        self._levels[rank, -1] = self._sum[rank] / self._rows[rank]
        self._steps[rank, :-1] = self._steps[rank, 1:]
        self._steps[rank, -1] = self._begun[rank]
        self._known[rank] = min(self._known[rank] + 1, self._levels.shape[1])
        self._sum[rank] = self._rows[rank] = self._took_s[rank] = 0.0

    def slower(self, rank: int) -> SlowRank | None:
        """Whether a rank whose block is full is slower than it was, by the window that shows it best."""
        found = [slower for number, window in enumerate(WINDOWS) if (slower := self._slower(rank, number, window))]
        return max(found, key=lambda slower: slower.score, default=None)

    def _slower(self, rank: int, number: int, window: int) -> SlowRank | None:
        config = self._config
        earlier = int(min(self._known[rank] - window, config.kept))
        if earlier < max(config.known_min, config.known_windows * window):
            return None
        past = self._levels[rank, -window - earlier : -window]
        usual = median(past)
        means = np.convolve(past, np.full(window, 1 / window), "valid") - usual
        single = float(np.square(past - usual).mean()) / window
        self._sigma[number, rank] = own = math.sqrt(max(float(np.square(means).mean()), single))
        newest = np.sort(self._levels[rank, -window:]) - usual
        effect = float(newest.mean())
        # A quarter of the blocks may be as fast as before, no more: one long piece of work makes no slow rank.
        if effect < math.log(config.ratio_min) or newest[window // 4] < effect / 3:
            return None
        of_all = self._sigma[number]
        sigma = max(own, median(of_all[np.isfinite(of_all)]), config.sigma_floor)
        sigma *= math.sqrt(1 + MEDIAN_VARIANCE * window / earlier)
        if effect < config.sigmas * sigma:
            return None
        return SlowRank(rank, effect, math.exp(usual), sigma, window, int(self._steps[rank, -window]))

    @property
    def judged(self) -> Bools:
        """Ranks of which enough is known to say what is usual."""
        return self._known >= self._config.known_min

    def has_stayed(self, rank: int) -> bool:
        """Whether a rank's newest blocks, as many as make it known, have not become slower."""
        known = self._config.known_min
        if self._known[rank] < known:
            return False
        earlier, later = np.split(self._levels[rank, -known:], 2)
        return median(later) - median(earlier) < math.log(self._config.ratio_min)

    def usual(self, ranks: Ints) -> Floats:
        """The logarithm of what a step of each of these ranks usually takes; NaN where too little is known."""
        usual = np.full(ranks.size, math.nan)
        for index, rank in enumerate(ranks.tolist()):
            known = int(self._known[rank])
            if known >= self._config.known_min:
                usual[index] = median(self._levels[rank, -known:])
        return usual

    def newest(self, ranks: Ints) -> Floats:
        """The same of their newest rows: of the block that they are filling once it is half full, else of the last."""
        config = self._config
        half = (self._rows[ranks] * 2 >= config.rows) & (self._took_s[ranks] * 2 >= config.seconds)
        return np.where(half, self._sum[ranks] / np.maximum(self._rows[ranks], 1.0), self._levels[ranks, -1])

    def newest_two(self, rank: int) -> float:
        """The same of the newest two blocks of one rank."""
        return float(self._levels[rank, -2:].mean())


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
    STATE: ClassVar[str] = "lockstep _accelerated _blocks _seen _effect _score _before _before_together _together"

    def __init__(self, config: OwnPastConfig) -> None:
        super().__init__()
        self.name = "own_past"
        self.version = 5
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
        """The slowdown of the newest blocks of each rank, in logarithms ..."""
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

    @property
    def reads(self) -> frozenset[type[Observation]]:
        """Ranks in lockstep are judged together, by others."""
        return STARTS if self.lockstep else super().reads

    def _on_occurrence(self, occurrence: Occurrence) -> Sequence[Finding]:
        why = why_anew(occurrence, self.attempt, Kind.STRAGGLER, Kind.SLOWDOWN)
        if not why or self.lockstep:
            return ()
        change = change_in(occurrence, self.attempt)
        if change is None:
            return self._begin_anew(why, self.world_size)
        for rank in range(self.world_size):
            self._blocks.forget(rank, 0)
        self._effect[:] = self._score[:] = 0.0
        opened = ((episodes, scope) for episodes in (self.episodes, self._together) for scope in episodes)
        return [finding for episodes, scope in opened for finding in episodes.mark(scope, change.what, change.step)]

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
        return [finding for rank in full for finding in self._evaluate(rank, frame)]

    def _seconds(self, frame: Frame) -> Floats | None:
        """Each rank's own time in the row, without waits for a core or, where ranks share cores, its CPU time."""
        wanted = None if self._accelerated else wanted_seconds(frame)
        cpu = None if self._accelerated else cpu_seconds(frame)
        own = next((one for one in (wanted, cpu) if one is not None), own_seconds(frame))
        if own is not None:
            return own
        step_s = finite(frame, "step_time_s")
        return None if step_s is None else where_usable(step_s, np.nan)

    def _evaluate(self, rank: int, frame: Frame) -> list[Finding]:
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
        """The slowdown of the job, in which half of the ranks take part at least, by their newest rows. Logarithm, 0 at
        least.
        """
        ranks = np.flatnonzero(self._blocks.judged)
        excess = np.sort(self._blocks.newest(ranks) - self._blocks.usual(ranks))
        return max(0.0, float(excess[(excess.size - 1) // 2])) if excess.size else 0.0

    def _open(self, slower: SlowRank, frame: Frame) -> list[Finding]:
        self._before[slower.rank] = math.log(slower.usual_s)
        ratio = math.exp(slower.effect)
        return self.episodes.open(
            IncidentScope.of_rank(slower.rank),
            ranks=(slower.rank,),
            summary=f"Rank {slower.rank} is {slower_than(ratio, 'it was')} since about its step {slower.onset_step} "
            f"({duration(slower.usual_s * ratio)} a step, before {duration(slower.usual_s)}).",
            cause="worker",
            **self._words(slower, frame, ranks=1),
        )

    def _open_together(self, slower: SlowRank, frame: Frame) -> list[Finding]:
        """Most ranks are slower: one slowdown, and the level that they have now is what is usual from here on."""
        ranks = np.flatnonzero(self._score)
        usual = self._blocks.usual(np.arange(self.world_size))
        usual_s = math.exp(median(usual[np.isfinite(usual)]))
        whole = replace(slower, effect=median(self._effect[ranks]), usual_s=usual_s)
        words, ratio = self._words(whole, frame, ranks=self.world_size), math.exp(whole.effect)
        findings: list[Finding] = []
        for scope in self.episodes:
            if self.episodes.reported(scope)["detected_time_s"] >= words["onset_time_s"]:
                why = "Most ranks have become slower, not this one alone."
                findings += self.episodes.close(scope, self._step_since(self.episodes, scope, frame), self.now_s, why)
                self._before[scope.number] = math.nan
        self._before_together = usual
        for rank in range(self.world_size):
            self._blocks.forget(rank, slower.blocks if self._score[rank] else 0)
        self._effect[:] = self._score[:] = 0.0
        findings += self._together.open(
            WHOLE_JOB,
            summary=f"Steps of {ranks.size} of {self.world_size} ranks are {slower_than(ratio, 'before')} since about "
            f"step {slower.onset_step} ({duration(usual_s * ratio)}, before {duration(usual_s)}).",
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
        if excess >= self._share(self.episodes.reported(scope)):
            if "declared" in self.episodes.reported(scope)["evidence"] and self._blocks.has_stayed(rank):
                self._before[rank] = math.nan
                summary = f"Rank {rank} has stayed at a new level since a change was declared."
                step = self._step_since(self.episodes, scope, frame)
                return self.episodes.close(scope, step, self.now_s, summary)
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
        share = self._share(self._together.reported(WHOLE_JOB))
        # A rank that was not known then, whose `before` is NaN, decides nothing by itself.
        slow_rank = bool(self._blocks.newest_two(rank) - before[rank] >= share)
        if slow_rank or excess[(excess.size - 1) // 2] >= share:
            if "declared" in self._together.reported(WHOLE_JOB)["evidence"] and self._blocks.has_stayed(rank):
                step = self._step_since(self._together, WHOLE_JOB, frame)
                summary = "Steps have stayed at a new level since a change was declared."
                return self._together.close(WHOLE_JOB, step, self.now_s, summary)
            return self._grown_old(self._together, WHOLE_JOB, frame)
        for each in range(self.world_size):
            self._blocks.forget(each, 1)
        step = self._step_since(self._together, WHOLE_JOB, frame)
        return self._together.close(WHOLE_JOB, step, self.now_s, "Steps take as long as before again.")

    def _share(self, reported: Mapping[str, Any]) -> float:
        return self._config.clear_share * math.log(reported["evidence"]["ratio"])

    def _grown_old(self, episodes: Episodes, scope: IncidentScope, frame: Frame) -> list[Finding]:
        """What has not passed by itself is more than worth knowing."""
        known = episodes.reported(scope)
        if known["severity"] != Severity.INFO or self.now_s - known["onset_time_s"] < self._config.brief_s:
            return []
        now = {"detected_step": self._step_since(episodes, scope, frame), "detected_time_s": self.now_s}
        summary = f"{known['summary']} It has not passed by itself."
        return episodes.update(scope, severity=Severity.WARNING, summary=summary, **now)

    @staticmethod
    def _step_since(episodes: Episodes, scope: IncidentScope, frame: Frame) -> int:
        """The step of a row that reports an episode: ranks count by themselves, and others may be far behind."""
        return max(frame.step, int(episodes.reported(scope)["onset_step"]))
