"""The variation of a healthy synthetic job, which no detector should report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Noise:
    """Sizes and probabilities of the usual variation. Shares are of the usual value; 0 turns an effect off."""

    busy: float = 0.02
    """Standard deviation of a rank's busy time from step to step, as a share."""
    silicon: float = 0.02
    """Standard deviation of the lasting differences between ranks, as a share."""
    loss: float = 0.02
    """Standard deviation of the loss from step to step, as a share."""
    contention: float = 0.0
    """Standard deviation of wall time that ranks lose to other processes on the same cores, as a share."""
    uneven_cv: float = 0.0
    """Sequences of uneven length: coefficient of variation of a replica's load from step to step."""
    collect_every: int = 0
    """Steps between garbage collections of a rank; ranks collect in different steps."""
    collect_s: float = 0.0
    hiccup_probability: float = 0.0
    """Probability of one slow step, for each rank and step: a slow data shard, the operating system."""
    hiccup_s: float = 0.0
    burst_probability: float = 0.0
    """Probability that two to four slow steps begin, for each rank and step."""
    wave: float = 0.0
    """Amplitude by which all step times vary over a day, as a share."""
    warm_up_steps: int = 0
    """First steps of every attempt that take longer, with decreasing excess: caches fill, kernels are tuned."""
    warm_up_factor: float = 1.0
