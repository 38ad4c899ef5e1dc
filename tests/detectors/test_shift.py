import math

import numpy as np
import pytest

from rankwatch_detectors.statistics.shift import MANY_RANKS, NO_RUN, ROWS_BEYOND_MIN, ShiftBank

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


@pytest.mark.parametrize("limit", [12.0, LIMIT, 26.0])
@pytest.mark.parametrize(("ranks", "rows"), [(1, 6), (MANY_RANKS - 1, 6), (MANY_RANKS, 7)])
def test_however_far_out_five_rows_say_nothing_and_the_sixth_does_or_of_very_many_ranks_the_seventh(limit, ranks, rows):
    bank = ShiftBank((0.15,), CLIP_SIGMAS, ROWS_MIN)
    bank.clear(ranks)
    told = []
    for step in range(rows):
        residual = np.where(np.arange(ranks) == 0, 0.7, 0.0)
        bank.push(residual, np.full(ranks, 0.05), np.ones(ranks, dtype=bool), step, limit)
        told.append([crossing.rank for crossing in bank.crossings(limit)])
    assert told == [[]] * (rows - 1) + [[0]]
