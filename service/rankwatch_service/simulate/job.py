"""Synthetic jobs: seeded, with labelled faults.

    job = Job(64, seed=1).inject(Slow(17, from_step=300, factor=1.6), Hang(3, at_step=500))
    for observation in generate(job): ...
    job.labels      # what a perfect detector would report

Noise is heavy-tailed, ranks differ by a silicon spread, and training is synchronous: a step lasts as long on every rank
as on the slowest one. Equal jobs give equal observations.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Final

from rankwatch_detectors.base import Kind, Topology
from rankwatch_service.simulate.faults import BatchRamp, Fault, Kill, Label, Restart, labels_of
from rankwatch_service.simulate.noise import Noise
from rankwatch_service.simulate.placement import RankPlacement
from rankwatch_service.simulate.transit import Transit

WITHOUT_A_STEP: Final = frozenset({Kind.HANG, Kind.RANK_LOST, Kind.TELEMETRY_LOST})
"""Kinds that show even in a step that is not finished."""


@dataclass(frozen=True, slots=True)
class Job:
    """A scripted synthetic job."""

    world_size: int = 64
    steps: int = 600
    """The step before which training ends, absolute."""
    seed: int = 0
    _: KW_ONLY
    start_step: int = 0
    step_s: float = 1.0
    tick_s: float = 1.0
    """Seconds between ticks; one in the stream."""
    noise: Noise = field(default_factory=Noise)
    placement: RankPlacement = field(default_factory=RankPlacement)
    faults: tuple[Fault, ...] = ()
    """In the order in which they were injected."""
    transit: Transit = field(default_factory=Transit)
    expected: tuple[Label, ...] | None = None
    """Labels, if they differ from those of the faults so far; labels of faults injected later are added."""
    late_values: bool = False
    """Loss and norms arrive as late values, one step after, as on an accelerator."""
    report_tokens: bool = False
    """The steps have token counts; they always do under a `BatchRamp`."""
    fingerprint_every: int = 10
    """Steps; 0 = never."""
    launch: str = "launch"
    """Prefix of the names of all attempts: LAUNCHn.k."""
    ends: bool = True
    """The ranks leave their loops at the end; False: the record stops without that."""

    def inject(self, *faults: Fault) -> Job:
        """The same job with more faults."""
        expected = None if self.expected is None else self.expected + labels_of(faults)
        return replace(self, faults=self.faults + faults, expected=expected)

    @property
    def labels(self) -> tuple[Label, ...]:
        """The faults that should be found."""
        return labels_of(self.faults) if self.expected is None else self.expected

    def played_labels(self) -> list[Label]:
        """The labels of the faults that the job reaches: none after the end of a process without a restart."""
        restarts = Counter(fault.at_step for fault in self.faults if isinstance(fault, Restart))
        kills = Counter(fault.at_step for fault in self.faults if isinstance(fault, Kill))
        last = min((step for step, count in kills.items() if count > restarts[step]), default=self.steps)
        return [
            one for one in self.labels if one.at_step < last or (one.at_step == last and one.kind in WITHOUT_A_STEP)
        ]

    @property
    def has_tokens(self) -> bool:
        """Whether the steps have token counts."""
        return self.report_tokens or any(isinstance(fault, BatchRamp) for fault in self.faults)

    def topology(self) -> Topology:
        """Hosts, devices and parallel groups of the ranks.

        Raises:
            ValueError: the number of ranks is not a multiple of the parallel groups.
        """
        return self.placement.topology(self.world_size)
