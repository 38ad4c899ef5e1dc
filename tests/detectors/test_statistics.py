"""What detectors compute with: how far a series wanders, sums of shifts, quantiles, the load of a replica."""

from __future__ import annotations

import math

import numpy as np
import pytest
from river import stats

from rankwatch_detectors.base import Floats, Frame, StepKind
from rankwatch_detectors.pace.load import LoadConfig, LoadModel
from rankwatch_detectors.statistics.best_level import BlockSpread
from rankwatch_detectors.statistics.peers import PeerGroups
from rankwatch_detectors.statistics.series import RollingQuantiles
from rankwatch_detectors.statistics.shift import MANY_RANKS, NO_RUN, ROWS_BEYOND_MIN, ShiftBank
from rankwatch_detectors.statistics.single import SeriesShift

NOISE = 0.02


def spread_of(level: Floats, seed: int = 1) -> float:
    """The spread that is seen when a level is read through noise of two percent."""
    blocks = BlockSpread()
    for value in level + NOISE * np.random.default_rng(seed).standard_normal(level.size):
        blocks.push(float(value))
    return blocks.spread


def wandering(rows: int, low: float, high: float, seed: int) -> Floats:
    """Every 100 to 500 rows up by an amount between two others, or back."""
    random, parts, up = np.random.default_rng(seed), [], False
    while sum(part.size for part in parts) < rows:
        parts.append(np.full(int(random.integers(100, 500)), random.uniform(low, high) if up else 0.0))
        up = not up
    return np.concatenate(parts)[:rows]


def test_the_levels_of_the_newest_rows_come_with_the_one_just_before_them() -> None:
    blocks = BlockSpread()
    for row in range(5 * 32 + 10):
        blocks.push(float(row // 32))
    assert blocks.newest(5) == [4.0]
    assert blocks.newest(10) == [4.0]
    assert blocks.newest(11) == [3.0]
    assert blocks.newest(10 + 64) == [2.0, 3.0, 4.0]
    assert blocks.newest(10 + 70) == [1.0, 3.0, 4.0]
    assert blocks.newest(10 + 5 * 32) == []


@pytest.mark.parametrize("seed", range(5))
def test_levels_that_come_and_go_are_as_wide_as_they_are_apart(seed: int) -> None:
    assert 0.02 < spread_of(wandering(6000, 0.05, 0.13, seed), seed) < 0.12


@pytest.mark.parametrize(
    "level",
    [
        pytest.param(np.zeros(6000), id="noise alone"),
        pytest.param(np.repeat([0.0, 0.3], [3000, 1500]), id="one shift for good"),
        pytest.param(np.repeat([0.0, 0.3, 0.0], [2000, 400, 2000]), id="one bout"),
        pytest.param(np.linspace(0.0, 2.0, 6000), id="a steady trend"),
        pytest.param(np.where(np.arange(6000) % 40 == 0, 3.0, 0.0), id="an evaluation every 40 rows"),
    ],
)
def test_what_happens_once_or_steadily_is_no_wandering(level: Floats) -> None:
    assert spread_of(level) < 0.006


def test_nothing_is_known_of_a_young_series() -> None:
    assert spread_of(wandering(190, 0.3, 0.5, 1)) == 0.0


LEVELS = (math.log(1.05), math.log(1.3), -math.log(1.1), -math.log(2.0))
CLIP_SIGMAS = 3.0
LIMIT = 18.0
ROWS_MIN = 5


class OneRank:
    """The same sums as a bank's, written down for one rank and one level."""

    def __init__(self, level: float) -> None:
        self.level = level
        self.end()

    def end(self) -> None:
        self.evidence, self.rows, self.moved, self.total, self.onset = 0.0, 0, 0, 0.0, NO_RUN

    def push(self, residual: float, sigma: float, judged: bool, step: int) -> None:
        if not judged:
            return
        if self.onset == NO_RUN:
            self.onset = step
        clipped = min(max(residual, -CLIP_SIGMAS * sigma), CLIP_SIGMAS * sigma)
        gain = (clipped - self.level / 2) * self.level / (sigma * sigma)
        self.evidence += min(gain, LIMIT / (ROWS_MIN + ROWS_BEYOND_MIN))
        self.rows += 1
        self.total += residual
        self.moved += math.copysign(1.0, self.level) * residual > abs(self.level) / 2
        if self.evidence <= 0:
            self.end()


@pytest.mark.parametrize("scatter", [0.005, 0.05, 0.3])
def test_a_bank_does_what_a_cusum_of_each_rank_and_level_does(scatter):
    random, ranks = np.random.default_rng(3), 12
    bank = ShiftBank(LEVELS, CLIP_SIGMAS, ROWS_MIN)
    bank.clear(ranks)
    single = [[OneRank(level) for _ in range(ranks)] for level in LEVELS]
    for step in range(200):
        residual = scatter * random.standard_normal(ranks) + np.where(np.arange(ranks) == 3, 0.04 * (step > 100), 0.0)
        sigma = np.maximum(scatter * random.uniform(0.8, 1.5, ranks), 0.01)
        judged = random.random(ranks) < (1.0 if step % 3 else 0.7)
        bank.push(residual, sigma, judged, step, LIMIT)
        for of_level in single:
            for rank, one in enumerate(of_level):
                one.push(float(residual[rank]), float(sigma[rank]), bool(judged[rank]), step)
        if step % 40 == 39:
            bank.clear_rank(5)
            for of_level in single:
                of_level[5].end()
        if step == 90:
            saved, bank = bank.snapshot(), ShiftBank(LEVELS, CLIP_SIGMAS, ROWS_MIN)
            bank.restore(saved)
        state = bank.snapshot()
        for name, wanted in (("_sums", "evidence"), ("_rows", "rows"), ("_moved", "moved"), ("_total", "total")):
            assert state[name] == pytest.approx(np.array([[getattr(o, wanted) for o in level] for level in single]))
        assert state["_onset"].tolist() == [[one.onset for one in level] for level in single]
        strongest = [max(level[rank].evidence for level in single) for rank in range(ranks)]
        assert bank.strongest() == pytest.approx(strongest)


def test_a_lasting_shift_crosses_with_its_onset_and_its_size():
    bank = ShiftBank(LEVELS, CLIP_SIGMAS, ROWS_MIN)
    bank.clear(4)
    for step in range(40):
        residual = np.array([0.0, 0.25 if step >= 20 else 0.0, 0.0, 0.0])
        bank.push(residual, np.full(4, 0.05), np.ones(4, dtype=bool), step, LIMIT)
    (crossing,) = bank.crossings(LIMIT)
    assert (crossing.rank, crossing.onset_step, crossing.rows) == (1, 20, 20)
    assert crossing.effect == pytest.approx(0.25)


@pytest.mark.parametrize("scatter", [0.005, 0.05, 0.3])
def test_the_cusums_of_one_series_are_those_of_a_bank(scatter: float) -> None:
    random, bank = np.random.default_rng(5), ShiftBank(LEVELS, CLIP_SIGMAS, ROWS_MIN)
    bank.clear(2)
    series = [SeriesShift(LEVELS, CLIP_SIGMAS, ROWS_MIN, one) for one in range(2)]
    crossed = 0
    for step in range(400):
        residual = scatter * random.standard_normal(2) + np.array([0.0, (0.1 + 2 * scatter) * (step % 80 > 40)])
        sigma = np.maximum(scatter * random.uniform(0.8, 1.5, 2), 0.01)
        bank.push(residual, sigma, np.ones(2, dtype=bool), step, LIMIT)
        for one, away, scale in zip(series, residual.tolist(), sigma.tolist(), strict=True):
            one.push(away, scale, step, LIMIT)
        assert [one.strongest for one in series] == bank.strongest().tolist()
        crossings = [crossing for one in series if (crossing := one.crossing(LIMIT)) is not None]
        assert crossings == bank.crossings(LIMIT)
        crossed += len(crossings)
        assert [number for number, one in enumerate(series) if one.take_near()] == bank.take_near()
        assert [one.run() for one in series if one.strongest] == [
            bank.run(rank) for rank in bank.strongest().nonzero()[0]
        ]
        if step % 100 == 99:
            bank.clear_rank(1)
            series[1].clear()
    assert crossed


@pytest.mark.parametrize("limit", [12.0, LIMIT, 26.0])
@pytest.mark.parametrize(("ranks", "rows"), [(1, 6), (MANY_RANKS - 1, 6), (MANY_RANKS, 7)])
def test_however_far_out_five_rows_say_nothing_and_the_sixth_does_or_of_very_many_ranks_the_seventh(limit, ranks, rows):
    bank = ShiftBank((0.15,), CLIP_SIGMAS, ROWS_MIN)
    bank.clear(ranks)
    reported = []
    for step in range(rows):
        residual = np.where(np.arange(ranks) == 0, 0.7, 0.0)
        bank.push(residual, np.full(ranks, 0.05), np.ones(ranks, dtype=bool), step, limit)
        reported.append([crossing.rank for crossing in bank.crossings(limit)])
    assert reported == [[]] * (rows - 1) + [[0]]


def test_quantiles_are_those_of_the_newest_window() -> None:
    values = np.random.default_rng(0).standard_normal(500)
    series = RollingQuantiles(101, (0.5,))
    for value in values:
        series.learn(float(value))
    assert series.get()[0] == pytest.approx(float(np.median(values[-101:])))


@pytest.mark.parametrize("points", [1, 2, 8, 32, 256])
def test_quantiles_are_to_the_last_bit_those_of_river(points: int) -> None:
    quantiles = (0.5, 0.95, 0.99)
    series, estimators = RollingQuantiles(points, quantiles), [stats.RollingQuantile(one, points) for one in quantiles]
    for value in np.random.default_rng(1).standard_normal(600).round(1).tolist():
        series.learn(value)
        for estimator in estimators:
            estimator.update(value)
        assert series.get() == tuple(estimator.get() for estimator in estimators)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    series = RollingQuantiles(8, (0.5,))
    series.learn(1.0)
    with pytest.raises(ValueError, match="finite"):
        series.learn(bad)
    assert series.get() == (1.0,)


REPLICAS, RANKS_EACH = 16, 4
REPLICA = np.arange(REPLICAS * RANKS_EACH) // RANKS_EACH
FRAME = Frame("steps", "l.0", 0, StepKind.TRAIN, 0.0, {}, {}, {})


def row(seed: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Residuals of one step: loads that differ by a tenth, and two hundredths of noise."""
    random = np.random.default_rng(seed)
    return 0.1 * random.standard_normal(REPLICAS)[REPLICA] + 0.02 * random.standard_normal(REPLICA.size)


def explained(model: LoadModel, residual: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    """Share of a step's variance that its loads explain."""
    usable = np.ones(residual.size, dtype=bool)
    left = model.unexplained(FRAME, residual, usable, PeerGroups(), np.full(residual.size, 0.02))
    return 1.0 - float(left.var() / residual.var())


@pytest.mark.parametrize(("replica", "known"), [(REPLICA, True), (REPLICA[::-1] // 2, False)], ids=["same", "others"])
def test_a_relaunch_with_the_same_replicas_knows_their_loads_from_its_first_step(replica, known):
    model = LoadModel(LoadConfig())
    model.regroup(REPLICA)
    for seed in range(30):
        share = explained(model, row(seed))
    assert share > 0.9
    model.regroup(replica)
    assert (explained(model, row(99)) > 0.9) == known
