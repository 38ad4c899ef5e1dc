"""Jobs of the cluster model: seeded, with labels. Equal jobs give equal observations.

job = ClusterJob(ClusterPlacement(ep=8), hosts=8, faults=(SlowDevice(200, 1.3, ranks=(17,)),))
for observation in job.observations(): ...
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field

from rankwatch_detectors.base import Observation, Topology
from rankwatch_service.simulate.faults import Label
from suite.cluster.faults import ClusterFault, Resize
from suite.cluster.placement import ClusterPlacement
from suite.cluster.player import ClusterPlayer


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """A job on a number of hosts with eight devices each."""

    placement: ClusterPlacement = field(default_factory=ClusterPlacement)
    hosts: int = 8
    seed: int = 0
    _: KW_ONLY
    start_step: int = 0
    steps: int = 400
    """The step before which the record ends, absolute."""
    step_s: float = 1.0
    """About how long a step takes."""
    log_every: int = 1
    """Rank 0 logs the loss and the gradient norm of every n-th step."""
    log_lag: int = 2
    """How many steps later the logged values, and what was counted on devices, arrive."""
    eval_every: int = 0
    """An evaluation comes before every n-th step; 0: never."""
    eval_s: float = 30.0
    """Median time of a rank's part of an evaluation."""
    resizes: tuple[Resize, ...] = ()
    faults: tuple[ClusterFault, ...] = ()

    @property
    def labels(self) -> tuple[Label, ...]:
        """The faults that should be found."""
        return tuple(fault.label for fault in self.faults)

    def topology(self) -> Topology:
        """The topology of the first attempt.

        Raises:
            ValueError: the ranks cannot be divided as the placement says.
        """
        return self.placement.topology(range(self.hosts))

    def observations(self) -> Iterator[Observation]:
        """The job's observations in stream order; each call begins anew."""
        return ClusterPlayer(self).play()
