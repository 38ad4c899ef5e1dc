"""Settings of the slowdown detector, with their reasons."""

from __future__ import annotations

from dataclasses import dataclass, field

from rankwatch_detectors.declared import ScheduleConfig
from rankwatch_detectors.statistics.anchor import AnchorConfig
from rankwatch_detectors.statistics.baseline import BaselineConfig
from rankwatch_detectors.statistics.followed import FollowedConfig
from rankwatch_detectors.statistics.wandering import WanderingConfig


@dataclass(frozen=True, slots=True)
class SlowdownConfig:
    """Settings of the slowdown detector."""

    budget: float = 1.0
    """False incidents per job-week."""
    ratios: tuple[float, ...] = (1.05, 1.1, 1.3, 1 / 1.1, 1 / 1.3)
    """Tested ratios; those below 1 only make a faster job learn its new level."""
    ratio_min: float = 1.03
    """Least ratio that is reported. Busy times that grow by 5 % lengthen the step by less, since its transfers stay."""
    bare_ratio_min: float = 1.045
    """The same if only the step time is known: 5 %, of which a short run may show half a percent less. Planned changes
    of a run cost less than that."""
    bare_duration_s: float = 60.0
    """If only the step time is known, a slowdown below `brief_ratio` must last a minute: its cause cannot be checked,
    and short steps sometimes wait for a disk or a neighbour."""
    mild_ratio: float = 1.05
    """A slowdown below it is `info`: planned changes of a run cost as much."""
    brief_ratio: float = 1.1
    """A slowdown below it is `info` as long as it may pass by itself, as most of these do ..."""
    brief_s: float = 900.0
    """... within a quarter of an hour."""
    onset_share: float = 0.75
    """In the middle of its run a shift has reached this share of its height, a trend only half. The baseline's lag
    behind a trend is no shift: it is learned, and the anchor decides whether a level has been left ..."""
    trend_ratio: float = 1.02
    """... unless steps lengthen by this ratio within `trend_rows`: schedules (attention windows) take half of that."""
    trend_rows: int = 128
    trend_blocks_min: int = 2
    rows_min: int = 5
    shared_ratio_min: float = 1.3
    """On shared cores, caches and neighbours change CPU time by 10 % and more."""
    shared_duration_s: float = 60.0
    skipped_rows: int = 2
    settle_rows: int = 64
    """Rows skipped at the start of an attempt that keeps the last attempt's level: caches are cold again, and steps
    are slower for some tens of rows."""
    baseline: BaselineConfig = field(
        default_factory=lambda: BaselineConfig(warm_rows=32, offset_rows=256, scatter_rows=128)
    )
    wandering: WanderingConfig = field(default_factory=WanderingConfig)
    followed: FollowedConfig = field(default_factory=FollowedConfig)
    anchor: AnchorConfig = field(default_factory=lambda: AnchorConfig(steady_share=0.005))
    """Schedules that lengthen steps gradually from the start (attention windows) add 1 % in 128 rows; medians of as
    many rows of a steady job differ by 0.3 %."""
    retell_factor: float = 3.0
    """A drift is reported again when its excess is this many times the reported one."""
    schedule: ScheduleConfig = field(default_factory=lambda: ScheduleConfig(rates=()))
    """Without learning rates, which do not affect the duration of a step."""

    def least_ratio(self, *, bare: bool) -> float:
        """The least ratio that is reported; `bare`: only the step time is known."""
        return max(self.bare_ratio_min, self.ratio_min) if bare else self.ratio_min
