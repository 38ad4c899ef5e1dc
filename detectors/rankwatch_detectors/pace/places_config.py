"""Settings for hosts and switches as a whole."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rankwatch_detectors.pace.witness import WitnessConfig
from rankwatch_detectors.statistics.baseline import BaselineConfig


@dataclass(frozen=True, slots=True)
class PlacesConfig:
    """Settings for hosts and switches as a whole. The rows of their baseline and CUSUMs are blocks."""

    block_rows: int = 8
    """Rows of a block: a host of 8 ranks then has a fifth of the noise of a rank's row, and judging it costs little."""
    witness: WitnessConfig = field(
        # Three blocks at least: most disturbances of a host that are harmless last for seconds.
        default_factory=lambda: WitnessConfig(ratios=(1.02, 1.05), ratio_min=1.015, rows_min=2)
    )
    baseline: BaselineConfig = field(
        # Hosts of different devices differ by more than silicon does, so any standing offset is accepted. They are
        # judged only once blocks have shown for how long their common noise lasts. No single row or rank can move the
        # value of a block far, so more of it counts.
        default_factory=lambda: BaselineConfig(
            warm_rows=16,
            block_rows=(4, 16),
            clip_sigmas=5.0,
            sigma_start=0.02,
            sigma_floor=0.003,
            offset_max=math.inf,
            warm_reach=math.inf,
            kept_rows=128,
        )
    )
    spoken_sigmas: float = 4.0
    """A rank speaks for its host or switch only if that is slower by more than this many sigmas of its own noise."""
    usual_blocks: int = 64
    """Blocks over which the usual offset of each rank is averaged: far more than it takes to find a slow place."""
    smooth_blocks: int = 2
    """Blocks over which the excess of a slow place is smoothed."""
    clear_share: float = 0.35
    """It is over when the smoothed excess stays below this share of the reported one ..."""
    clear_blocks: int = 3
    """... for this many blocks."""
    retell_share: float = 0.5
    """A change of the excess by this share is reported as an update, once it has lasted as long."""
