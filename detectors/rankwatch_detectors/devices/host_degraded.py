"""Reports hosts that cannot give training what they gave it before: their processors are taken away or limited, or
their memory is not enough. What is judged, and from when on, stands in `HostRules`. What the provider of a machine
announces (an event `host_notice`) is a warning as long as it stands: there is time to save.

Counters of a host are judged by what is usual for it, and by the job's other hosts. What holds from a job's first
minutes, or on most of its hosts, is how this job runs: a container whose processors are limited, or training on CPUs
that fills them. So a share of time counts only above what the host began with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Final

import numpy as np

from rankwatch_detectors.base import DeviceCounters, Finding, Kind, Occurrence, Severity
from rankwatch_detectors.devices.counter_detector import CounterDetector, DeviceProblem, HeldRules, column, grown
from rankwatch_detectors.scope import IncidentScope

LIMITS: Final[Mapping[str, tuple[str, float]]] = MappingProxyType(
    {
        "throttled": ("cpu_throttled_ratio", 0.25),
        "steal": ("cpu_steal_ratio", 0.1),
        "memory": ("memory_pressure_ratio", 0.1),
    }
)
"""By rule: the share of time that it judges, and the limit from which on it is reported."""


@dataclass(frozen=True, slots=True)
class HostRulesConfig:
    """Settings of the rules; a slot is 5 s."""

    limits: Mapping[str, tuple[str, float]] = field(default_factory=lambda: LIMITS)
    of_usual: float = 2.0
    """Multiple of the host's usual share from which on a share is reported."""
    learning_slots: int = 24
    """Slots from the first step on in which the usual share is learned and nothing is reported."""
    held_slots: int = 12
    """Slots in a row after which it is reported, and after which it is over: a minute."""
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

    STATE: ClassVar[str] = "_usual _seen"

    def __init__(self, config: HostRulesConfig) -> None:
        super().__init__()
        self._config = config

    def begin_launch(self) -> None:
        """What is usual is that of a launch, from its first step on: what it loads and compiles before says nothing."""
        super().begin_launch()
        self._usual: dict[str, Any] = {}
        """The mean share of its first slots, by rule and host."""
        self._seen: dict[str, Any] = {}

    def _rules(self, counters: DeviceCounters) -> Iterator[DeviceProblem]:
        config = self._config
        for what, (name, limit) in config.limits.items() if self._trains else ():
            yield from self._share(what, name, limit, counters)
        yield from self._rising("oom", ("oom_kills",), config.oom_warning, counters, quiet_slots=config.oom_quiet_slots)

    def _share(self, what: str, name: str, limit: float, counters: DeviceCounters) -> Iterator[DeviceProblem]:
        config, size = self._config, len(counters.devices)
        value, reported = column(counters, name, size)
        usual = self._usual[what] = grown(self._usual.get(what), size)
        seen = self._seen[what] = grown(self._seen.get(what), size)
        known = reported & (seen >= config.learning_slots)
        learn = reported & ~known
        seen[learn] += 1
        usual[learn] += (value - usual)[learn] / seen[learn]
        peers = float(np.median(value[reported])) if np.count_nonzero(reported) >= config.peers_min else 0.0
        high = known & (value >= np.maximum(limit, config.of_usual * usual))
        bad = high & (peers < limit)
        figures = {name: value, f"usual_{name}": usual}
        yield from self._evaluate(what, bad, known & ~high, config.held_slots, figures, config.warning_slots)


NOTICE: Final = "host_notice"
WHAT: Final = {"preemption": "is about to take away", "maintenance": "will maintain"}
"""The words for a notice, by its subject."""


@dataclass(frozen=True, slots=True)
class HostDegradedConfig:
    """Settings of the host_degraded detector."""

    counters: HostRulesConfig = field(default_factory=HostRulesConfig)


class HostDegradedDetector(CounterDetector):
    """Episodes by host."""

    DEVICES: ClassVar[str] = "host"
    CAUSE: ClassVar[str] = "host"
    NAMED: ClassVar[str] = "device"
    WELL: ClassVar[str] = "The host is back to its usual state."

    def __init__(self, config: HostDegradedConfig) -> None:
        super().__init__(Kind.HOST_DEGRADED, 4, HostRules(config.counters))

    def _on_occurrence(self, occurrence: Occurrence) -> Sequence[Finding]:
        same_launch = occurrence.attempt.rpartition(".")[0] == self.attempt.rpartition(".")[0]
        if occurrence.kind != NOTICE or not same_launch or not self._places.has(occurrence.host):
            return ()
        fields = {name: text for name, text in occurrence.fields.items() if isinstance(text, str) and text}
        scope = IncidentScope.of_host(occurrence.host)
        if fields.get("what") not in WHAT:
            return self._over(scope, {NOTICE}, "The provider has withdrawn its notice.")
        summary = f"The provider {WHAT[fields['what']]} host {occurrence.host}{_when(fields)}."
        evidence = {"host": occurrence.host, "rule": NOTICE, **fields}
        return self._report(scope, NOTICE, Severity.WARNING, summary, evidence, self.now_s)

    def _sentence(self, scope: IncidentScope, problem: DeviceProblem, host: str, device: str) -> str:  # noqa: ARG002
        figure = dict(problem.evidence or {})

        def share(name: str) -> str:
            return f"{100 * figure[name]:.0f} % of the time, usually {100 * figure[f'usual_{name}']:.0f} %"

        match problem.what:
            case "throttled":
                return f"The container on host {host} has used up its processor time {share('cpu_throttled_ratio')}."
            case "steal":
                return f"The hypervisor gives the processors of host {host} to others {share('cpu_steal_ratio')}."
            case "memory":
                return f"On host {host} all processes wait for memory {share('memory_pressure_ratio')}."
            case "oom":
                killed = "1 process (`dmesg -T | grep -i oom` names it)"
                if (new := round(figure["new_errors"])) > 1:
                    killed = f"{new} processes (`dmesg -T | grep -i oom` names them)"
                return f"Host {host} ran out of memory: the kernel killed {killed}."
            case other:
                raise AssertionError(f"{other} has a limit and no sentence")


def _when(fields: Mapping[str, str]) -> str:
    action = f" ({fields['action']})" if "action" in fields else ""
    return f"{action}, not before {fields['at']}" if "at" in fields else action
