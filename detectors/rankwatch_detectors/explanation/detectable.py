"""The smallest shift that a bank of CUSUMs finds within a number of rows."""

from __future__ import annotations

from rankwatch_detectors.statistics.shift import ShiftBank


def least_shift(bank: ShiftBank, sigma: float, threshold: float, rows: float) -> float | None:
    """The smallest constant shift whose expected evidence reaches the threshold in this many rows.

    A row that is shifted by s adds L (s - L / 2) / sigma² to the evidence of level L, with s cut at the
    bank's `clip_sigmas` and the sum of a row at 1 / `rows_needed` of the threshold.

    Args:
        bank: the CUSUMs; negative levels find no rise.
        sigma: scatter of one row.
        threshold: log-likelihood ratio to reach.
        rows: rows since the onset.

    Returns:
        The shift in logarithms; None if none is found in so few rows, however large it is.
    """
    if rows < bank.rows_needed:
        return None
    needed = [threshold / rows * sigma**2 / level + level / 2 for level in bank.tested if level > 0]
    return min((shift for shift in needed if shift <= bank.clip_sigmas * sigma), default=None)
