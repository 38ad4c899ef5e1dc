"""The smallest shift that a bank of CUSUMs finds within a number of rows."""

from __future__ import annotations

from collections.abc import Sequence

from rankwatch_detectors.statistics.shift import ROWS_NEEDED


def least_shift(
    levels: Sequence[float], sigma: float, clip_sigmas: float, threshold: float, rows: float
) -> float | None:
    """The smallest constant shift whose expected evidence reaches the threshold in this many rows.

    A row that is shifted by s adds L (s - L / 2) / sigma² to the evidence of level L, with s cut at `clip_sigmas`
    sigmas and the sum of a row at 1 / `ROWS_NEEDED` of the threshold.

    Args:
        levels: tested shifts in logarithms; negative ones find no rise.
        sigma: scatter of one row.
        clip_sigmas: larger values are cut to this many sigmas.
        threshold: log-likelihood ratio to reach.
        rows: rows since the onset.

    Returns:
        The shift in logarithms; None if none is found in so few rows, however large it is.
    """
    if rows < ROWS_NEEDED:
        return None
    needed = [threshold / rows * sigma**2 / level + level / 2 for level in levels if level > 0]
    return min((shift for shift in needed if shift <= clip_sigmas * sigma), default=None)
