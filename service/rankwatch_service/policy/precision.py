"""Feedback of people on incidents, and the resulting precision of a kind of incident. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

WINDOW_DAYS: Final = 30
"""Incidents that were detected in these days count. A kind is judged by what it finds now."""

JUDGED_MIN: Final = 5
"""Incidents that were called useful or noise, from which on the precision of a kind is known: 1 of 1 shows nothing."""

DEMOTED_BELOW: Final = 0.5
"""A kind of which less is useful is proposed for demotion: it wastes more of people's time than it saves."""

_Z: Final = 1.96
"""Standard deviations on either side of a 95 % interval."""


class Feedback(StrEnum):
    """A person's feedback on an incident."""

    USEFUL = "useful"
    """It was right to report it."""
    NOISE = "noise"
    """Nothing was wrong, or it was not worth an incident."""
    DUPLICATE = "duplicate"
    """Another incident reports the same fault."""


@dataclass(frozen=True, slots=True)
class Precision:
    """How many incidents people rated as useful, and how many as noise."""

    useful: int = 0
    noise: int = 0

    @property
    def judged(self) -> int:
        """Incidents that count. Duplicates and those without an answer do not."""
        return self.useful + self.noise

    @property
    def ratio(self) -> float | None:
        """The share of useful ones, 0 to 1; None if none is judged."""
        return self.useful / self.judged if self.judged else None

    @property
    def interval(self) -> tuple[float, float]:
        """Where the true share lies with 95 % confidence (Wilson's score interval); (0, 1) if none is judged."""
        if not self.judged:
            return 0.0, 1.0
        count, share = self.judged, self.useful / self.judged
        centre = share + _Z**2 / (2 * count)
        half = _Z * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
        scale = 1 + _Z**2 / count
        return max((centre - half) / scale, 0.0), min((centre + half) / scale, 1.0)

    @property
    def is_known(self) -> bool:
        """Whether enough incidents are judged."""
        return self.judged >= JUDGED_MIN

    def reaches(self, least: float) -> bool:
        """Whether the ratio is known and at least this; 0 is always reached."""
        return least <= 0 or (self.is_known and self.useful / self.judged >= least)

    @property
    def is_low(self) -> bool:
        """Whether the kind is proposed for demotion."""
        return self.is_known and self.useful / self.judged < DEMOTED_BELOW


UNREVIEWED: Final = Precision()
