"""What detectors tell of a judgement that has not become a finding: the statistic, its threshold, what is missing."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import NamedTuple

from rankwatch_detectors.scope import IncidentScope


class Statistic(StrEnum):
    """The quantity that a threshold is for."""

    EVIDENCE = "log_likelihood_ratio"
    """Of a run that is shifted against one that is as usual."""
    LEFT_LEVEL = "excess_over_best_level"
    """Share by which a series is above the best level that it has kept."""
    DISTANCE = "sigmas_from_level"
    """Distance of one point from the level."""
    SUM = "sum_of_high_points"
    """Sum of the distances of moderately high points."""
    LASTED = "points_beyond_level"
    """Points for which a jump has lasted."""
    AGE = "seconds_without_progress"


class Shortfall(StrEnum):
    """What a statistic beyond its threshold still lacks."""

    NOTHING = ""
    CERTAINTY = "certainty"
    """The mean of the run may still differ from the baseline by chance, or is below the least reported shift."""
    DURATION = "duration"
    """It may pass by itself within seconds."""
    AGREEMENT = "agreement"
    """The whole step does not show it."""
    ONSET = "onset"
    """It grows as slowly as by a schedule."""
    VALUE = "value"
    """The rank did not measure this step."""


class Suspect(NamedTuple):
    """One judged row of a scope that may become a finding."""

    scope: IncidentScope
    statistic: Statistic
    value: float
    threshold: float
    rows: int = 1
    """Rows of the run so far."""
    size: float = math.nan
    """How large it is, NaN if not known: for `DISTANCE`, `SUM` and `LASTED` the value of a curve, else the ratio to
    what is usual (of a run its mean)."""
    missing: Shortfall = Shortfall.NOTHING
    source: str = ""
    """Which of several views of the scope it is, such as a witness."""
