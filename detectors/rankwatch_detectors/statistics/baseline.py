"""Each rank's usual offset from its peers, and its scatter around it.

The input is the logarithm of a positive quantity. A rank's own offset is subtracted before the peers' median is taken,
so that silicon that is 2 % slower is not a finding, and one rank's change does not move the others. Offsets, scatter
and the autocorrelation of the noise are learned from calm rows only, from values clipped at three sigmas.

What means over a run of rows differed by in the past says how far chance alone has carried as long a run before. That
needs no model of the noise, and holds for noise that lasts, however long: a disturbance that is as long as
the run counts in full.

Block correlation is by how much longer than independent noise that of ranks lasts. The mean of n independent rows has
an n-th of a row's variance. Where a disturbance lasts for many rows, as a host that is hot for a minute, it has more;
the ratio of both is by how much a sum over a run of rows must be trusted less.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import numpy as np

from rankwatch_detectors.base import Bools, Floats, Ints
from rankwatch_detectors.state import Stateful
from rankwatch_detectors.statistics.peers import PeerGroups, anyone, everyone, median
from rankwatch_detectors.statistics.shift import Crossing

RUNS_MIN = 8
"""So many runs one after the other must have been kept before their means are known."""


class RunHistory(Stateful):
    """The newest residuals of U units. Memory: 8 bytes for each kept row and unit."""

    STATE: ClassVar[str] = "_kept _next"

    def __init__(self, rows: int) -> None:
        """Keep so many rows."""
        self._rows = rows
        self.begin(np.zeros(0, dtype=np.int64))

    def begin(self, came_from: Ints) -> None:
        """Set the units: the index of each among those before, or -1 if it is new."""
        before = getattr(self, "_kept", np.zeros((self._rows, 0)))
        kept = np.full((self._rows, came_from.size), np.nan)
        known = came_from >= 0
        if before.shape[1]:
            kept[:, known] = before[:, came_from[known]]
        self._kept: Floats = kept
        self._next = getattr(self, "_next", 0)

    def push(self, residual: Floats, usable: Bools) -> None:
        """Add a row."""
        self._kept[self._next] = residual if everyone(usable) else np.where(usable, residual, np.nan)
        self._next = (self._next + 1) % self._rows

    def spread(self, unit: int, rows: int) -> float:
        """Root mean square of means over so many neighbouring rows, before the newest of as many.

        It is that of all units together, or of this one if that is more. Of longer runs than are known it is that of
        the longest that are, which is no less. It is widened for what lasts longer than the rows that are kept, the
        more the fewer they are. Infinite as long as nothing is known.
        """
        past = np.roll(self._kept, -self._next, axis=0)[:-rows]
        past_rows = int(np.count_nonzero(np.isfinite(past[:, unit])))
        window = min(rows, past_rows // RUNS_MIN)
        if not window:
            return math.inf
        means = np.lib.stride_tricks.sliding_window_view(past, window, axis=0).mean(axis=2)
        known = np.isfinite(means)
        if not anyone(known[:, unit]):
            return math.inf
        squares = np.where(known, means, 0.0) ** 2
        of_all = float(squares.sum()) / np.count_nonzero(known)
        own = float(squares[:, unit].sum()) / np.count_nonzero(known[:, unit])
        return math.sqrt(max(of_all, own) * (1 + self._rows / past_rows))


# Weight of what was known before, in blocks of single ranks: few ranks change it slowly, many at once.
PRIOR_BLOCKS = 32.0


class BlockRatio(Stateful):
    """Base of the correlation of noise within blocks of one length."""

    STATE: ClassVar[str] = "ratio"

    def __init__(self, rows: int) -> None:
        """Build it for blocks of so many rows."""
        self._rows = rows
        # Until blocks are measured: 1.5 times the variance of independent rows, as in step times of shared hosts.
        self.ratio = 1.5
        """Variance of a block's sum over that of as many independent rows: 1 to `rows`."""

    def _learn(self, mean_square: float, count: int, variance: float) -> None:
        """Learn from so many sums over a block."""
        measured = mean_square / self._rows / variance
        # 1: independent rows; `rows`: all rows of a block move together. Values beyond are chance.
        bounded = min(max(measured, 1.0), float(self._rows))
        self.ratio += (bounded - self.ratio) * count / (count + PRIOR_BLOCKS)


class BlockCorrelation(BlockRatio):
    """The correlation of noise within blocks of all ranks. Memory: 8 bytes for each rank."""

    STATE: ClassVar[str] = "_sum _row"

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.begin(0)

    def begin(self, ranks: int) -> None:
        """Begin a block of so many ranks; what was measured is kept."""
        self._sum: Floats = np.zeros(ranks)
        self._row = 0

    def add(self, noise: Floats, normal: Bools, variance: float) -> None:
        """Add one row.

        Args:
            noise: each rank's deviation; 0 for ranks that are not calm.
            normal: ranks that count if the block ends with this row.
            variance: of a row.
        """
        self._sum += noise
        self._row += 1
        if self._row < self._rows:
            return
        count = int(np.count_nonzero(normal))
        if count:
            self._learn(float((self._sum[normal] ** 2).mean()), count, variance)
        self._sum[:] = 0.0
        self._row = 0


# The median of the square of a standard normal.
CHI_SQUARE_MEDIAN = 0.4549
OWN_VARIANCE_RATIO = 1.5
# Rows between measurements of the spread of offsets.
SPREAD_ROWS = 16
# Third moment of the noise, in sigmas, from which slow rows are clearly more common than fast ones. That of 8 ranks is
# measured to 0.13.
SKEW_MAX = 0.5
# Variance of a sum over a block of rows, as a multiple of that of independent rows, from which noise is known to last.
LASTING_RATIO = 1.25
# The first two rows of a rank only determine its offset.
WARM_SCATTER_ROWS = 2


class Proof(Enum):
    """Result of verifying a crossing."""

    GIVEN = "given"
    OPEN = "open"
    """More rows may prove it."""
    FAILED = "failed"
    """The shift is too small, or within the error of a young baseline: the baseline learns it."""


@dataclass(frozen=True, slots=True)
class BaselineConfig:
    """How a baseline learns. Times are in rows, quantities in natural logarithms of the value."""

    warm_rows: int = 8
    """Rows before a rank is judged: enough for a mean with a third of the row's noise."""
    offset_rows: int = 128
    """Rows over which an offset is averaged: long compared with a fault that builds up, short with a day's drift."""
    scatter_rows: int = 64
    block_rows: tuple[int, int] = (16, 64)
    """Noise of neighbouring steps is correlated; means over blocks of so many rows show by how much."""
    clip_sigmas: float = 3.0
    sigma_start: float = 0.05
    sigma_floor: float = 0.01
    """Timers and schedulers jitter by 1 %; a smaller measured scatter is chance."""
    offset_max: float = math.log(1.1)
    """Largest standing offset that silicon explains: five sigmas of a spread of 2 %. The rest stays visible as an
    excess, by which a rank that is slow from its first step is found."""
    warm_reach: float = 0.3
    """Largest change of an offset by one of the first rows: a new rank may be slow in a single row by chance."""
    kept_rows: int = 0
    """Newest rows by which a run is judged, besides what is known of the noise: it must exceed what means over as many
    rows have differed by. 0: noise does not last for longer than blocks show."""


class Baseline(Stateful):
    """Base of what is usual: whether a run that crossed a threshold exceeds the error with which that is known."""

    _config: BaselineConfig
    _short_blocks: BlockRatio
    _long_blocks: BlockRatio
    offset: Floats | list[float]
    rows: Floats | list[float]

    @abstractmethod
    def sigma(self) -> Floats | list[float]:
        """Scatter of one row of each rank."""

    def pinned(self, rank: int) -> bool:  # noqa: ARG002
        """Whether the offset is held at the limit of what silicon explains: the rank's true offset is larger."""
        return False

    def uncertainty(self, rank: int, limit: float, rows: int | None = None) -> float:
        """How far the means before and after an onset may differ by chance, with probability exp(-limit).

        Args:
            rank: the rank.
            limit: log-likelihood ratio.
            rows: length of the run that is compared with the baseline; None: infinitely long.
        """
        before = min(max(float(self.rows[rank]), 1.0), 2.0 * self._config.offset_rows)
        # An offset held at its bound has no error of estimation: it is the limit of what silicon explains.
        shares = 0.0 if self.pinned(rank) else self._lasting(before) / before
        shares += self._lasting(rows) / rows if rows else 0.0
        return math.sqrt(2.0 * limit * shares) * float(self.sigma()[rank])

    def _lasting(self, rows: float) -> float:
        """The widening of a mean over so many rows by lasting noise, beyond what `sigma` contains."""
        short, long = self._short_blocks.ratio, self._long_blocks.ratio
        return float(np.interp(rows, self._config.block_rows, (1.0, max(long / short, 1.0))))

    def verify(self, crossing: Crossing, limit: float, effect_min: float) -> Proof:
        """Second stage after a CUSUM: whether the shift is large enough and exceeds the baseline's own error."""
        effect = abs(crossing.effect)
        if effect >= max(effect_min, self.uncertainty(crossing.rank, limit, crossing.rows)):
            return Proof.GIVEN
        # Only a shift more than one standard error below the least effect is certainly too small.
        error = self.uncertainty(crossing.rank, 0.5, crossing.rows)
        hopeless = effect < max(effect_min - error, self.uncertainty(crossing.rank, limit))
        return Proof.FAILED if hopeless or crossing.rows > 2 * self._config.offset_rows else Proof.OPEN

    def absorb(self, rank: int, effect: float, rows: int) -> None:
        """Learn a run that was excluded from learning and was not proven: its rows count like earlier ones."""
        before = min(float(self.rows[rank]), float(self._config.offset_rows))
        self.offset[rank] += effect * rows / (rows + before)
        self.rows[rank] += rows


class PeerBaseline(Baseline):
    """Offsets, scatter and noise correlation of all ranks; 48 bytes for each rank."""

    STATE: ClassVar[str] = (
        "groups offset rows variance level standing _pooled _pool_rows _skew _bias _spread _short_blocks _long_blocks "
        "_history"
    )

    offset: Floats
    rows: Floats
    _short_blocks: BlockCorrelation
    _long_blocks: BlockCorrelation

    def __init__(self, config: BaselineConfig) -> None:
        """Begin without ranks."""
        self._config = config
        self._short_blocks, self._long_blocks = (BlockCorrelation(rows) for rows in config.block_rows)
        self._history = RunHistory(config.kept_rows)
        self.groups = PeerGroups()
        self._resize(0)
        self._pooled = config.sigma_start**2
        self._pool_rows = 0
        self._skew = 1.0
        """Third moment of clipped residuals in pooled sigmas; noise is taken for skewed until enough rows are known."""
        self._bias = 0.0
        self._spread = 0.0

    @property
    def is_plain(self) -> bool:
        """Whether noise is known to be independent from row to row, with slow rows as common as equally fast ones."""
        lasting = max(self._short_blocks.ratio, self._long_blocks.ratio)
        return self._skew <= SKEW_MAX and lasting <= LASTING_RATIO

    def _resize(self, ranks: int) -> None:
        self.offset: Floats = np.zeros(ranks)
        self.rows: Floats = np.zeros(ranks)
        self.variance: Floats = np.full(ranks, self._config.sigma_start**2)
        self.level: Floats = np.zeros(ranks)
        """The rank's own usual logarithm, not compared with peers."""
        self.standing: Floats = np.zeros(ranks)
        """Accepted offset that silicon does not explain, of a rank that was never seen at another speed; else 0."""
        self._short_blocks.begin(ranks)
        self._long_blocks.begin(ranks)
        self._any_warms = True
        """Whether any rank may be in its first rows."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """As every `Stateful`."""
        super().restore(state)
        self._any_warms = True

    def regroup(self, groups: Ints, came_from: Ints) -> None:
        """Set the topology.

        Args:
            groups: peer group of each rank.
            came_from: each rank's index under the previous topology, or -1 if its unit is new.
        """
        known = came_from >= 0
        before = np.where(known, came_from, 0)
        kept: Mapping[str, Floats] = {
            name: getattr(self, name) for name in ("offset", "rows", "variance", "level", "standing")
        }
        self._resize(groups.size)
        for name, values in kept.items():
            if values.size:
                setattr(self, name, np.where(known, values[before], getattr(self, name)))
        self.groups.regroup(groups)
        self._history.begin(came_from)

    def residual(self, logs: Floats, usable: Bools) -> Floats:
        """How far each rank is above its usual offset from its peers in this row; 0 where not usable."""
        own = logs - self.offset
        around = own - self.groups.location(own, usable) - self._bias
        return around if everyone(usable) else np.where(usable, around, 0.0)

    def sigma(self) -> Floats:
        """Scatter of one row of each rank, widened for correlated noise and for baselines that are still short."""
        # Over 64 rows of heavy-tailed noise a rank's own variance is off by a quarter, so only a clearly larger one
        # replaces the pooled variance.
        own_decides = self.variance > OWN_VARIANCE_RATIO * self._pooled
        variance: Floats = self._config.warm_rows / (np.maximum(self.rows, 1.0) if self._any_warms else self.rows)
        variance += 1.0
        decisive = np.where(own_decides, self.variance, self._pooled) if anyone(own_decides) else self._pooled
        variance *= decisive * self._short_blocks.ratio
        np.sqrt(variance, out=variance)
        return np.maximum(variance, self._config.sigma_floor, out=variance)

    def ready(self) -> Bools:
        """Ranks that have been seen often enough to be judged."""
        return self.rows >= self._config.warm_rows

    def uncertainty(self, rank: int, limit: float, rows: int | None = None) -> float:
        """How far the means before and after an onset may differ by chance: no less than they did in kept rows."""
        uncertainty = super().uncertainty(rank, limit, rows)
        if rows and self._config.kept_rows:
            uncertainty = max(uncertainty, math.sqrt(2.0 * limit) * self._history.spread(rank, rows))
        return uncertainty

    def pinned(self, rank: int) -> bool:
        """Whether the offset is held at the limit of what silicon explains: the rank's true offset is larger."""
        return bool(self.groups.proper[rank]) and abs(float(self.offset[rank] - self.standing[rank])) >= self._bound

    def absorb(self, rank: int, effect: float, rows: int) -> None:
        """As every `Baseline`; the offset stays within what silicon explains."""
        super().absorb(rank, effect, rows)
        self._bound_offsets()

    def accept(self, rank: int, effect: float, rows: int) -> None:
        """Make a shift beyond silicon part of the rank's offset, since it holds from the first rows on."""
        self.offset[rank] += effect
        self.standing[rank] = self.offset[rank]
        self.rows[rank] += rows

    def forget(self, rank: int) -> None:
        """Forget the rank's offset and scatter, and learn them anew."""
        self.offset[rank] = self.standing[rank] = self.rows[rank] = 0.0
        self.variance[rank] = self._pooled
        self._any_warms = True

    def outliers(self, ratio_min: float) -> Ints:
        """Ranks whose offset exceeds this ratio, and by two sigmas the largest expected from the spread of silicon."""
        among = max(int(np.count_nonzero(self.groups.proper)), 2)
        limit = max(math.log(ratio_min), (2.0 + math.sqrt(2.0 * math.log(among))) * self._spread)
        beyond = self.groups.proper & (self.offset > limit) & (self.standing == 0.0)
        return np.flatnonzero(beyond).astype(np.int64)

    def learn(self, logs: Floats, residual: Floats, normal: Bools, scattered: Bools) -> None:
        """Learn one row; call after deciding.

        Args:
            logs: the row.
            residual: the result of `residual` for this row.
            normal: ranks whose own offset and scatter are learned.
            scattered: ranks from which the common scatter is learned. Leaving out suspicious ranks would cut off the
                tails, so that rare but usual rows would look more and more suspicious.
        """
        config = self._config
        if config.kept_rows:
            self._history.push(residual, scattered)
        taught: Floats | float = 1.0 if everyone(normal) else normal.astype(np.float64)
        self.rows += taught
        gain: Floats = np.minimum(np.maximum(self.rows, 1.0) if self._any_warms else self.rows, config.offset_rows)
        np.divide(taught, gain, out=gain)
        reach = config.clip_sigmas * math.sqrt(max(self._pooled, config.sigma_floor**2))
        step = clipped = np.minimum(np.maximum(residual, -reach), reach)
        settled = normal
        if self._any_warms:
            warm = self.rows <= config.warm_rows
            self._any_warms = anyone(warm)
        if self._any_warms:
            settled = normal & ~warm
            # In the first rows a residual is the offset itself, so it must not be clipped at the noise.
            near = np.where(self.groups.proper, np.clip(residual, -config.warm_reach, config.warm_reach), residual)
            step = np.where(warm, near, clipped)
            # A new rank is assumed to scatter like the others.
            self.variance = np.where(warm, self._pooled, self.variance)
        self.offset += gain * step
        gain *= logs - self.level
        self.level += gain
        self._bound_offsets()
        if anyone(settled):
            self._learn_scatter(clipped, settled, scattered if settled is normal else scattered & ~warm)
        elif anyone(normal & (self.rows > WARM_SCATTER_ROWS)):
            # No rank can be excluded as abnormal yet, so the scale uses the median, which is robust to a slow rank.
            self._pool_rows += 1
            middle = median(residual[normal] ** 2) / CHI_SQUARE_MEDIAN
            self._pooled += (middle - self._pooled) / self._pool_rows

    def _bound_offsets(self) -> None:
        if self._pool_rows % SPREAD_ROWS == 0:
            proper = self.groups.proper
            self._spread = 1.4826 * median(np.abs(self.offset[proper])) if anyone(proper) else 0.0
        bound = self._bound
        if np.maximum.reduce(np.abs(self.offset), initial=0.0) <= bound:
            return
        bounded = np.minimum(np.maximum(self.offset, self.standing - bound), self.standing + bound)
        np.copyto(self.offset, bounded, where=self.groups.proper)

    @property
    def _bound(self) -> float:
        """The largest standing offset that silicon explains here."""
        return max(self._config.offset_max, 4.0 * self._spread)

    def _learn_scatter(self, clipped: Floats, normal: Bools, scattered: Bools) -> None:
        config = self._config
        squares = clipped * clipped
        self._pool_rows += 1
        gain = 1.0 / min(self._pool_rows, config.scatter_rows)
        if everyone(scattered):
            self._pool(gain, squares, clipped)
        else:
            self._pool(gain, squares[scattered], clipped[scattered])
        change: Floats = squares
        change -= self.variance
        if everyone(normal):
            change *= 1.0 / config.scatter_rows
        else:
            change *= normal / config.scatter_rows
            clipped = np.where(normal, clipped, 0.0)
        self.variance += change
        variance = max(self._pooled, config.sigma_floor**2 / 16)
        self._short_blocks.add(clipped, normal, variance)
        self._long_blocks.add(clipped, normal, variance)

    def _pool(self, gain: float, squares: Floats, clipped: Floats) -> None:
        self._pooled += gain * (float(np.add.reduce(squares)) / squares.size - self._pooled)
        third = float(np.add.reduce(squares * clipped)) / squares.size
        skew = third / max(self._pooled, self._config.sigma_floor**2) ** 1.5
        self._skew += (skew - self._skew) / self._config.scatter_rows
        self._bias += gain * (float(np.add.reduce(clipped)) / clipped.size)
