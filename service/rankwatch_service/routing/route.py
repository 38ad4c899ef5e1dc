"""The route tree: which groups an incident belongs to, and how their messages are timed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rankwatch_service.labels.matcher import Labels, Matcher, match_all
from rankwatch_service.routing.inhibition import InhibitRule
from rankwatch_service.routing.time_interval import TimeInterval

ALL_LABELS = "..."
"""In `group_by`: group by all labels, so that each incident is a group of its own."""


@dataclass(frozen=True, slots=True)
class Escalation:
    """Who is notified besides of what nobody has acknowledged in time."""

    after_s: float
    """Seconds from the first message about the incident."""
    receiver: str


@dataclass(frozen=True, slots=True)
class Route:
    """A node of the tree with what it has inherited from its parents."""

    key: str
    """Its place in the tree, by the matchers on the way: `{}/{severity="critical"}`. Unique."""
    receiver: str
    """Empty: nobody is notified."""
    matchers: tuple[Matcher, ...] = ()
    group_by: tuple[str, ...] = ()
    """Empty: all incidents of the route are one group."""
    continues: bool = False
    """Siblings behind it are tried too, though it matches."""
    group_wait_s: float = 30.0
    """From the first incident of a group to the first message."""
    group_interval_s: float = 300.0
    """Between two messages about changes of a group."""
    repeat_interval_s: float = 14_400.0
    """After which a message is repeated though nothing has changed."""
    mute_time_intervals: tuple[str, ...] = ()
    active_time_intervals: tuple[str, ...] = ()
    """Empty: always."""
    escalations: tuple[Escalation, ...] = ()
    routes: tuple[Route, ...] = ()

    def matching(self, labels: Labels) -> Iterator[Route]:
        """The routes for an incident, as Alertmanager finds them.

        A node whose matchers hold hands the incident to its children: the first that matches takes it, and those
        behind are tried only if that one continues. A node of which no child matches takes it itself.
        """
        if not match_all(self.matchers, labels):
            return
        taken = False
        for child in self.routes:
            found = list(child.matching(labels))
            taken = taken or bool(found)
            yield from found
            if found and not child.continues:
                break
        if not taken:
            yield self

    def walk(self) -> Iterator[Route]:
        """This node and all below it."""
        yield self
        for child in self.routes:
            yield from child.walk()

    def group_labels(self, labels: Labels) -> dict[str, str]:
        """The labels that the group of an incident has in common; those that it lacks are left out."""
        names = sorted(labels) if ALL_LABELS in self.group_by else sorted(self.group_by)
        return {name: labels[name] for name in names if name in labels}

    def group_key(self, labels: Labels) -> str:
        """Identifies the group of an incident under this route."""
        common = self.group_labels(labels).items()
        return f"{self.key}:{{{', '.join(str(Matcher(name, '=', value)) for name, value in common)}}}"


@dataclass(frozen=True, slots=True)
class Routing:
    """Everything that decides who is notified of an incident, and when."""

    root: Route
    inhibit_rules: tuple[InhibitRule, ...] = ()
    time_intervals: Mapping[str, tuple[TimeInterval, ...]] = field(default_factory=dict)

    def muted_by_time(self, route: Route, unix_s: float) -> str:
        """Why a route sends nothing at this moment; empty if it does."""
        for name in route.mute_time_intervals:
            if self._contains(name, unix_s):
                return f"muted in {name}"
        if not route.active_time_intervals:
            return ""
        if any(self._contains(name, unix_s) for name in route.active_time_intervals):
            return ""
        return f"active only in {', '.join(route.active_time_intervals)}"

    def receivers(self) -> frozenset[str]:
        """Names of all receivers in the tree."""
        named = {
            name for route in self.root.walk() for name in (route.receiver, *(e.receiver for e in route.escalations))
        }
        return frozenset(named - {""})

    def _contains(self, name: str, unix_s: float) -> bool:
        return any(interval.contains(unix_s) for interval in self.time_intervals[name])
