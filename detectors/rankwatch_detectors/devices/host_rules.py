"""What counters say of a host as a whole: judged by what is usual for it, and by the job's other hosts. Pure.

What holds from a job's first minutes, or on most of its hosts, is how this job runs: a container whose processors are
limited, or training on CPUs that fills them. So a share of time counts only above what the host began with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Final

import numpy as np

from rankwatch_detectors.base import DeviceCounters
from rankwatch_detectors.devices.held_rules import DeviceProblem, HeldRules, column, grown

LIMITS: Final[Mapping[str, tuple[str, float]]] = MappingProxyType(
    {
        "throttled": ("cpu_throttled_ratio", 0.25),
        "steal": ("cpu_steal_ratio", 0.1),
        "memory": ("memory_pressure_ratio", 0.1),
    }
)
"""By rule: the share of time that it is about, and from which on it is told."""


@dataclass(frozen=True, slots=True)
class HostRulesConfig:
    """Settings of the rules; a slot is 5 s."""

    limits: Mapping[str, tuple[str, float]] = field(default_factory=lambda: LIMITS)
    of_usual: float = 2.0
    """Times what is usual for the host, from which on a share is told."""
    learning_slots: int = 24
    """Slots from the first step on, from which what is usual is learned before anything is told."""
    held_slots: int = 12
    """Slots in a row after which it is told, and after which it is over: a minute."""
    warning_slots: int = 60
    """Slots of it after which it is a warning."""
    peers_min: int = 4
    """Hosts of which half must be within a limit, or it is about none of them."""
    oom_warning: int = 3
    """Readings with new processes that the kernel killed for want of memory, after which these are a warning."""
    oom_quiet_slots: int = 60
    """Slots without new ones after which these are over."""


class HostRules(HeldRules):
    """Judges a job's hosts slot by slot. Memory: linear in hosts."""

    STATE: ClassVar[tuple[str, ...]] = (*HeldRules.STATE, "_usual", "_seen")

    def __init__(self, config: HostRulesConfig) -> None:
        super().__init__()
        self._config = config

    def begin_launch(self) -> None:
        """What is usual is that of a launch, from its first step on: what it loads and compiles before says nothing."""
        super().begin_launch()
        self._usual: dict[str, Any] = {}
        """By rule and host: the mean share of its first slots."""
        self._seen: dict[str, Any] = {}

    def _rules(self, counters: DeviceCounters) -> Iterator[DeviceProblem]:
        config = self._config
        for what, (name, limit) in config.limits.items() if self._trains else ():
            yield from self._share(what, name, limit, counters)
        yield from self._rising("oom", ("oom_kills",), config.oom_warning, counters, quiet_slots=config.oom_quiet_slots)

    def _share(self, what: str, name: str, limit: float, counters: DeviceCounters) -> Iterator[DeviceProblem]:
        config, size = self._config, len(counters.devices)
        value, told = column(counters, name, size)
        usual = self._usual[what] = grown(self._usual.get(what), size)
        seen = self._seen[what] = grown(self._seen.get(what), size)
        known = told & (seen >= config.learning_slots)
        learn = told & ~known
        seen[learn] += 1
        usual[learn] += (value - usual)[learn] / seen[learn]
        peers = float(np.median(value[told])) if np.count_nonzero(told) >= config.peers_min else 0.0
        high = known & (value >= np.maximum(limit, config.of_usual * usual))
        bad = high & (peers < limit)
        figures = {name: value, f"usual_{name}": usual}
        yield from self._judge(what, bad, known & ~high, config.held_slots, figures, config.warning_slots)
