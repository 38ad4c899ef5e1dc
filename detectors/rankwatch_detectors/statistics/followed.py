"""Follows an open shift row by row: whether it is over, has grown, or has another one on top of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from rankwatch_detectors.state import Stateful


@dataclass(frozen=True, slots=True)
class FollowedConfig:
    """When a change of an open shift is reported."""

    clear_share: float = 0.4
    """The shift is over when the smoothed excess stays below this share of the reported one ..."""
    clear_rows: int = 16
    """... for this many rows."""
    rise_ratio: float = 1.05
    """It has risen when the excess is larger by this ratio, and by `rise_share` of the reported one, ..."""
    rise_share: float = 0.3
    rise_rows: int = 16
    """... for this many rows. The rise is another shift if its second half took at most ..."""
    sharp_rows: int = 48
    """... this many rows; a slower rise is growth of the same shift, ..."""
    growing_rows: int = 64
    """... as is one within this many rows of the report."""


class Followed(Stateful):
    """One open shift of a series of logarithms."""

    STATE: ClassVar[tuple[str, ...]] = ("excess", "calm_rows", "risen_rows", "_told", "_half_risen_rows", "_rows")

    def __init__(self, config: FollowedConfig) -> None:
        self._config = config
        self.begin(0.0)

    def begin(self, effect: float) -> None:
        """Start following a shift of this size."""
        self._told = self.excess = effect
        self.calm_rows = self.risen_rows = self._half_risen_rows = self._rows = 0

    def push(self, residual: float, reach: float) -> None:
        """Add a row.

        Args:
            residual: how far it is above the level before the shift.
            reach: how far the level wanders by itself.
        """
        config = self._config
        self._rows += 1
        self.excess += (residual - self.excess) / config.clear_rows
        self.calm_rows = self.calm_rows + 1 if self.excess < config.clear_share * self._told else 0
        rise, least = self.excess - self._told, max(math.log(config.rise_ratio) + reach, config.rise_share * self._told)
        self.risen_rows = self.risen_rows + 1 if rise > least else 0
        self._half_risen_rows = self._half_risen_rows + 1 if rise > least / 2 else 0

    @property
    def is_over(self) -> bool:
        """Whether the level is back where it was."""
        return self.calm_rows >= self._config.clear_rows

    @property
    def has_risen(self) -> bool:
        """Whether the shift has become larger."""
        return self.risen_rows >= self._config.rise_rows

    @property
    def is_another(self) -> bool:
        """Whether the rise came at once, on top of a shift that had settled."""
        sharp = self._half_risen_rows <= self.risen_rows + self._config.sharp_rows
        return sharp and self._rows > self._config.growing_rows + self.risen_rows
