"""The usual level of a few series of a job, and CUSUMs of one: `baseline` and `shift` without ranks and their peers.

Each series is judged against its own past alone. For one or two numbers a row, Python's own are several times faster
than arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Final

from rankwatch_detectors.statistics.baseline import (
    CHI_SQUARE_MEDIAN,
    OWN_VARIANCE_RATIO,
    WARM_SCATTER_ROWS,
    Baseline,
    BaselineConfig,
    BlockRatio,
)
from rankwatch_detectors.statistics.peers import median
from rankwatch_detectors.statistics.shift import NO_RUN, Crossing, TestedLevels


class SeriesBlocks(BlockRatio):
    """The correlation of noise within blocks of some series."""

    STATE: ClassVar[str] = "_sums _row"

    def __init__(self, rows: int, series: int) -> None:
        super().__init__(rows)
        self._series = series
        self.begin()

    def begin(self) -> None:
        """Begin a block; what was measured is kept."""
        self._sums = [0.0] * self._series
        self._row = 0

    def add(self, noise: Sequence[float], normal: Sequence[bool], variance: float) -> None:
        """Add one row; see `BlockCorrelation.add`."""
        self._sums = [before + one for before, one in zip(self._sums, noise, strict=True)]
        self._row += 1
        if self._row < self._rows:
            return
        squares = [total * total for total, counts in zip(self._sums, normal, strict=True) if counts]
        if squares:
            self._learn(sum(squares) / len(squares), len(squares), variance)
        self.begin()


class SeriesBaseline(Baseline):
    """Usual level, scatter and noise correlation of some series, whose scatter is alike."""

    STATE: ClassVar[str] = "offset rows variance _pooled _pool_rows _short_blocks _long_blocks"
    offset: list[float]
    rows: list[float]
    _short_blocks: SeriesBlocks
    _long_blocks: SeriesBlocks

    def __init__(self, config: BaselineConfig, series: int) -> None:
        self._config = config
        self._series = series
        self._short_blocks, self._long_blocks = (SeriesBlocks(rows, series) for rows in config.block_rows)
        self._pooled = config.sigma_start**2
        self._pool_rows = 0
        self.forget()

    def forget(self) -> None:
        """Learn the levels anew; what is known of the noise is kept."""
        self.offset = [0.0] * self._series
        self.rows = [0.0] * self._series
        self.variance = [self._config.sigma_start**2] * self._series
        self._short_blocks.begin()
        self._long_blocks.begin()

    def residual(self, logs: Sequence[float]) -> list[float]:
        """How far each series is above its usual level."""
        return [log - usual for log, usual in zip(logs, self.offset, strict=True)]

    def sigma(self) -> list[float]:
        """Scatter of one row of each series, widened for correlated noise and for baselines that are still short."""
        config, pooled, ratio = self._config, self._pooled, self._short_blocks.ratio
        return [
            max(
                math.sqrt(
                    (config.warm_rows / max(rows, 1.0) + 1.0)
                    * ((own if own > OWN_VARIANCE_RATIO * pooled else pooled) * ratio)
                ),
                config.sigma_floor,
            )
            for rows, own in zip(self.rows, self.variance, strict=True)
        ]

    def ready(self) -> list[bool]:
        """Series that have been seen often enough to be judged."""
        return [rows >= self._config.warm_rows for rows in self.rows]

    def learn(self, residual: Sequence[float], normal: Sequence[bool]) -> None:
        """Learn one row, from the series that are normal; call after deciding."""
        config = self._config
        reach = config.clip_sigmas * math.sqrt(max(self._pooled, config.sigma_floor**2))
        noise, settled = [0.0] * self._series, [False] * self._series
        for one, away in enumerate(residual):
            if normal[one]:
                self.rows[one] += 1.0
            clipped = min(max(away, -reach), reach)
            warm = self.rows[one] <= config.warm_rows
            if warm:  # in the first rows a residual is the level itself, so it is not clipped at the noise
                self.variance[one] = self._pooled
            if normal[one]:
                self.offset[one] += 1.0 / min(self.rows[one], config.offset_rows) * (away if warm else clipped)
                if not warm:
                    noise[one], settled[one] = clipped, True
        if any(settled):
            self._learn_scatter(noise, settled)
        elif any(learns and rows > WARM_SCATTER_ROWS for learns, rows in zip(normal, self.rows, strict=True)):
            self._pool_rows += 1
            squares = [away * away for away, learns in zip(residual, normal, strict=True) if learns]
            self._pooled += (median(squares) / CHI_SQUARE_MEDIAN - self._pooled) / self._pool_rows

    def _learn_scatter(self, noise: Sequence[float], settled: Sequence[bool]) -> None:
        config = self._config
        self._pool_rows += 1
        squares, known = 0.0, 0
        for one, clipped in enumerate(noise):
            if settled[one]:
                square = clipped * clipped
                squares, known = squares + square, known + 1
                self.variance[one] += (square - self.variance[one]) * (1.0 / config.scatter_rows)
        self._pooled += 1.0 / min(self._pool_rows, config.scatter_rows) * (squares / known - self._pooled)
        variance = max(self._pooled, config.sigma_floor**2 / 16)
        self._short_blocks.add(noise, settled, variance)
        self._long_blocks.add(noise, settled, variance)


SUM, ROWS, MOVED, TOTAL, ONSET = range(5)
"""What a run has added up, as in `ShiftBank`, and the step in which it began."""
NOTHING: Final = (0.0, 0.0, 0.0, 0.0, NO_RUN)


class SeriesShift(TestedLevels):
    """CUSUMs of L levels over one series; the rank of a `Crossing` is the number of the series."""

    STATE: ClassVar[str] = "_runs"

    def __init__(self, levels: tuple[float, ...], clip_sigmas: float, rows_min: int, series: int) -> None:
        super().__init__(levels, clip_sigmas, rows_min)
        self._series = series
        self._of_levels = [(level, level / 2, math.copysign(1.0, level)) for level in levels]
        self.clear()

    def clear(self) -> None:
        """Forget all evidence."""
        self._runs = [list(NOTHING) for _ in self.tested]
        self._near = False
        """Whether the evidence was beyond half of the threshold in the newest row, until that is taken."""

    @property
    def strongest(self) -> float:
        """The highest evidence over the levels."""
        return max([run[SUM] for run in self._runs])

    def push(self, residual: float, sigma: float, step: int, threshold: float) -> None:
        """Add one row."""
        reach = max(self.clip_sigmas * sigma, self._reach_min)
        clipped, square, most = min(max(residual, -reach), reach), sigma * sigma, threshold / self.rows_needed
        for (level, half, sign), run in zip(self._of_levels, self._runs, strict=True):
            before = run[SUM]
            gain = min((clipped - half) * level / square, most)
            if before + gain <= 0.0:
                if before:
                    run[:] = NOTHING
                continue
            if not before:
                run[ONSET] = float(step)
            run[SUM] = before + gain
            run[ROWS] += 1.0
            run[MOVED] += residual * sign > half * sign
            run[TOTAL] += residual

    def crossing(self, threshold: float) -> Crossing | None:
        """The run whose evidence is beyond `threshold`, if any."""
        strongest = self.strongest
        self._near = strongest >= threshold / 2
        if strongest < threshold:
            return None
        # Among the levels with strong evidence, the shortest run includes the fewest usual rows at its start.
        run = min((run for run in self._runs if run[SUM] >= threshold / 2), key=lambda run: run[ROWS])
        if run[MOVED] < self._rows_min:
            return None
        return Crossing(self._series, run[TOTAL] / run[ROWS], int(run[ONSET]), int(run[ROWS]), strongest)

    def take_near(self) -> bool:
        """Whether the evidence is near the threshold, once for each row."""
        near, self._near = self._near, False
        return near

    def run(self) -> Crossing:
        """The run with the highest evidence, which need not be beyond any threshold."""
        run = max(self._runs, key=lambda run: run[SUM])
        rows = int(run[ROWS])
        return Crossing(self._series, run[TOTAL] / max(rows, 1), int(run[ONSET]), rows, run[SUM])
