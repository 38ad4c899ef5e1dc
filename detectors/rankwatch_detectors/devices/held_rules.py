"""What all rules of counters share: how long something must be so before it is told, and before it is over. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from rankwatch_detectors.base import Bools, DeviceCounters, Floats, Severity
from rankwatch_detectors.state import Stateful

MINUTE_S: Final = 60.0
SLOT_S: Final = 5.0
"""Length of a slot of counters."""
GAP_SLOTS: Final = 12
"""Slots in which a device was not read, after which what is bad has begun anew: nobody knows what was between."""


@dataclass(frozen=True, slots=True)
class DeviceProblem:
    """Something that is wrong with a device, in the newest slot."""

    number: int
    """Of the device."""
    what: str
    """The rule that it breaks."""
    slots: int
    """Since how many slots it has been so; 0: it is over."""
    severity: Severity = Severity.INFO
    evidence: Mapping[str, Any] | None = None
    lasts: int = 1
    """1: it began with the first of these slots; 0: before it, as what a count counts."""


class HeldRules(Stateful, ABC):
    """Judges a job's devices of one kind slot by slot. Memory: linear in devices."""

    STATE: ClassVar[tuple[str, ...]] = (
        "_slot",
        "_trains",
        "_held",
        "_since",
        "_calm",
        "_open",
        "_last",
        "_hit",
        "_risen",
    )

    def __init__(self) -> None:
        self._slot = -1
        self._trains = False
        """Whether this launch has made a step."""
        self.standing: set[str] = set()
        """Of the newest slot: counts that were read, are not over, and have nothing new ("NUMBER RULE")."""
        self.begin_launch()

    def begin_launch(self) -> None:
        """Forget what was wrong, and the counts: nobody has read them meanwhile."""
        self._held: dict[str, Any] = {}
        """By rule and device: readings in a row in which it was bad."""
        self._since: dict[str, Any] = {}
        """By rule and device: the slot of the first of them; some counters are not read in every slot."""
        self._calm: dict[str, Any] = {}
        self._open: dict[str, Any] = {}
        self._last: dict[str, Any] = {}
        """By counter and device: the newest value of a count; -1: none."""
        self._hit: dict[str, Any] = {}
        """By rule and device: the slot in which a count last rose, or it was bad."""
        self._risen: dict[str, Any] = {}
        """By rule and device: how many new ones its counts had since they were last still for long."""

    def see(self, counters: DeviceCounters, *, trains: bool = True) -> Iterator[DeviceProblem]:
        """Take the next slot; one that is older than the newest is not judged.

        Args:
            counters: the slot.
            trains: whether this launch has made a step.

        Returns:
            What is wrong with which device: in each slot as long as it lasts, and once when it is over.
        """
        if counters.slot > self._slot:
            self._slot, self._trains = counters.slot, trains
            self.standing = set()
            yield from self._rules(counters)

    @abstractmethod
    def _rules(self, counters: DeviceCounters) -> Iterator[DeviceProblem]:
        """Judge a slot, rule by rule."""

    def _rising(
        self,
        what: str,
        names: Sequence[str],
        warning: int,
        counters: DeviceCounters,
        *,
        quiet_slots: int,
        told: int = 1,
        each: bool = False,
    ) -> Iterator[DeviceProblem]:
        """Counts of errors: it is over when they have stood still for a while.

        Args:
            what: the rule.
            names: the counts that are its errors.
            warning: readings with new ones, after which they are a warning.
            counters: the slot.
            quiet_slots: slots without new ones after which it is over.
            told: readings with new ones, from which on each is told.
            each: `warning` and `told` are about the new ones themselves, not about readings.
        """
        size = len(counters.devices)
        rise, read = np.zeros(size), np.zeros(size, dtype=bool)
        evidence = dict[str, Floats]()
        for name in names:
            evidence[name], here = column(counters, name, size)
            last = self._last[name] = grown(self._last.get(name), size, -1.0)
            rise += np.where(here & (last >= 0), np.maximum(evidence[name] - last, 0), 0)
            last[here] = evidence[name][here]
            read |= here
        held = self._held[what] = grown(self._held.get(what), size)
        hit = self._hit[what] = grown(self._hit.get(what), size)
        quiet = read & (held > 0) & (counters.slot - hit >= quiet_slots)
        risen = self._risen[what] = grown(self._risen.get(what), size)
        held[quiet] = risen[quiet] = 0
        risen += rise
        over = quiet & (rise == 0)
        held += rise if each else rise > 0
        hit[rise > 0] = counters.slot
        self.standing |= {f"{number} {what}" for number in np.flatnonzero(read & (rise == 0) & (held >= told)).tolist()}
        for number in np.flatnonzero(over).tolist():
            yield DeviceProblem(number, what, 0)
        for number in np.flatnonzero((rise > 0) & (held >= told)).tolist():
            severity = Severity.WARNING if held[number] >= warning else Severity.INFO
            figures = {name: float(f"{value[number]:.6g}") for name, value in evidence.items()}
            yield DeviceProblem(number, what, 1, severity, {**figures, "new_errors": float(risen[number])}, 0)

    def _judge(
        self, what: str, bad: Bools, good: Bools, hold: int, figures: Mapping[str, Floats], warning: float = 0
    ) -> Iterator[DeviceProblem]:
        """Devices that are neither bad nor good stay as they are: they were not read, or nothing can be said."""
        held = self._held[what] = grown(self._held.get(what), len(bad))
        calm = self._calm[what] = grown(self._calm.get(what), len(bad))
        is_open = self._open[what] = grown(self._open.get(what), len(bad))
        since = self._since[what] = grown(self._since.get(what), len(bad))
        hit = self._hit[what] = grown(self._hit.get(what), len(bad))
        held[bad & (self._slot - hit > GAP_SLOTS)] = 0
        hit[bad] = self._slot
        since[bad & (held == 0)] = self._slot
        held[bad] += 1
        calm[bad] = 0
        calm[good] += 1
        held[good & (is_open == 0)] = 0
        over = good & (is_open > 0) & (calm >= hold)
        held[over] = is_open[over] = 0
        is_open[bad & (held >= hold)] = 1
        for number in np.flatnonzero(over).tolist():
            yield DeviceProblem(number, what, 0)
        for number in np.flatnonzero(bad & (is_open > 0)).tolist():
            slots = self._slot - int(since[number]) + 1
            severity = Severity.WARNING if slots >= warning else Severity.INFO
            evidence = {name: float(f"{value[number]:.6g}") for name, value in figures.items()}
            yield DeviceProblem(number, what, slots, severity, evidence)


def column(counters: DeviceCounters, name: str, size: int) -> tuple[Floats, Bools]:
    """A counter of all devices, and who told a finite value."""
    if name not in counters.values:
        return np.zeros(size), np.zeros(size, dtype=bool)
    told = counters.present[name] & np.isfinite(counters.values[name])
    return np.where(told, counters.values[name], 0.0), told


def grown(array: Any, size: int, fill: float = 0.0) -> Floats:
    """The array with room for so many devices."""
    grown = np.full(size, fill)
    if array is not None:
        grown[: len(array)] = array
    return grown
