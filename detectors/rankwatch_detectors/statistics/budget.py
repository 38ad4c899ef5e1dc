"""From a false-incident budget to a threshold.

A CUSUM over log-likelihood ratios that fires at h has a mean time between false firings of at least exp(h) rows
(Lorden, 1971). With `tests` of them side by side the expected number of false firings in n rows is at most
tests * n / exp(h); solved for h this is `threshold`. So the same budget holds for 8 and for 16,384 ranks.

Lorden's bound holds for any noise and is loose: with normal noise, a level of d sigmas has a mean time of about
2 / d² * exp(h + 1.166 d) rows (Siegmund, 1985), which is at least 5 exp(h) whatever d is (`ROWS_BETWEEN`).
"""

from __future__ import annotations

import math

WEEK_S = 7 * 24 * 3600.0
# A step below 1 ms means that the clock stands still (replay without times); it must not raise the threshold.
STEP_MIN_S = 1e-3
# A broken clock with steps of days must not lower it either.
STEP_MAX_S = 3600.0
# Evaluations and saves make a step tens of times as long, which is not the usual step time.
STEP_RATIO_MAX = 10.0
# Mean rows between false firings of one CUSUM as a multiple of exp(h): the least of 2 / d² * exp(1.166 d) over all d.
ROWS_BETWEEN = 5.0


def threshold(tests: int, step_s: float, budget: float) -> float:
    """Log-likelihood threshold at which `tests` parallel CUSUMs raise `budget` false firings per job-week.

    Args:
        tests: ranks times levels that are watched at once.
        step_s: usual seconds between rows.
        budget: false firings allowed per job-week, more than 0.

    >>> round(threshold(tests=4096, step_s=1.0, budget=1.0), 1)
    21.6
    """
    return math.log(max(tests, 1) * WEEK_S / min(max(step_s, STEP_MIN_S), STEP_MAX_S) / budget)


def usual_step_s(before_s: float, step_s: float, rows: int) -> float:
    """Running mean of seconds between rows, over about 64 of them.

    Args:
        before_s: the mean so far.
        step_s: the newest row's seconds, bounded, so that a jump of the clock changes the mean only a little.
        rows: number of rows so far, this one included.
    """
    bounded = min(max(step_s, STEP_MIN_S), STEP_MAX_S)
    if rows > 1:
        bounded = min(bounded, STEP_RATIO_MAX * before_s)
    return before_s + (bounded - before_s) / min(rows, 64)
