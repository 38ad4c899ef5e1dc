"""Settings of the straggler detector."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rankwatch_detectors.pace.crowding import CrowdingConfig
from rankwatch_detectors.pace.load import LoadConfig
from rankwatch_detectors.pace.places_config import PlacesConfig
from rankwatch_detectors.pace.witness import WitnessConfig
from rankwatch_detectors.statistics.baseline import BaselineConfig
from rankwatch_detectors.statistics.budget import ROWS_BETWEEN


@dataclass(frozen=True, slots=True)
class StragglerConfig:
    """Settings of the straggler detector."""

    budget: float = 1.0
    """False incidents per job-week, over all ranks, hosts, switches, levels and witnesses."""
    wall: WitnessConfig = field(
        # +3 %, +5 %, +10 %, +30 %: close enough that a shift in between is found only a few rows later.
        default_factory=lambda: WitnessConfig(
            ratios=(1.03, 1.05, 1.10, 1.30), ratio_min=1.022, rows_between=ROWS_BETWEEN
        )
    )
    cpu: WitnessConfig = field(
        # CPU time on shared cores varies with caches, clock frequencies and hyper-threads although no rank is at fault:
        # mostly by 10 %, by 50 % for seconds while something else runs on the same core, and by more for tenths of one.
        default_factory=lambda: WitnessConfig(
            ratios=(1.25, 1.6), ratio_min=1.2, lasting_ratio=1.6, lasting_s=20.0, lasting_rows=24, large_s=1.0
        )
    )
    host: WitnessConfig = field(
        # Being descheduled comes and goes; only a third more time for a minute needs a person's attention.
        default_factory=lambda: WitnessConfig(ratios=(1.3, 2.0), ratio_min=1.3, duration_min_s=60.0)
    )
    baseline: BaselineConfig = field(default_factory=BaselineConfig)
    shared_baseline: BaselineConfig = field(
        # On CPU jobs rank 0 often writes logs too, which costs about 10 % and is no fault.
        default_factory=lambda: BaselineConfig(offset_max=math.log(1.15))
    )
    crowding: CrowdingConfig = field(default_factory=CrowdingConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    places: PlacesConfig = field(default_factory=PlacesConfig)
    skipped_rows: int = 2
    """First rows of an attempt: compilation, caches and connections, not work."""
    standing_rows: int = 16
    """A rank with fewer usual rows than these was never seen at another speed: it is slow from the first step ..."""
    standing_onset_rows: int = 64
    """... and so is one whose offset silicon does not explain, if noise hid it for up to this many rows."""
    fact_rows: int = 48
    """Rows after which smaller standing differences are reported; they are then known to a third of a percent. This is
    before a relaunch counts as the fix of an earlier incident."""
    fact_ratio: float = 1.05
    """The least standing difference that is reported."""
    smooth_rows: int = 8
    """Rows over which the excess of an open episode is smoothed."""
    clear_share: float = 0.35
    """An episode ends when the smoothed excess stays below this share of the reported one ..."""
    clear_rows: int = 16
    """... for this many rows, in which the rank was not measurably slower than its peers."""
    clear_sigmas: float = 2.0
    """Tolerance for the mean of these rows, in sigmas of that mean."""
    retell_share: float = 0.3
    """A change of the excess by this share is reported as an update ..."""
    retell_rows: int = 32
    """... once it has lasted this many rows."""
