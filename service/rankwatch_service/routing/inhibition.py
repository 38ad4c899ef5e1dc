"""Inhibition: an incident of one kind mutes others, such as the hang of a job its stragglers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rankwatch_service.labels.matcher import Labels, Matcher, match_all


@dataclass(frozen=True, slots=True)
class InhibitRule:
    """While an incident that matches the source is open, those that match the target notify nobody."""

    source: tuple[Matcher, ...]
    target: tuple[Matcher, ...]
    equal: tuple[str, ...] = ()
    """Labels that must have equal values in both; missing in both is equal."""

    def inhibits(self, source: Labels, target: Labels) -> bool:
        """Whether an open incident with the labels `source` mutes one with the labels `target`.

        What matches both sides of the rule is never muted by another that does, so two cannot mute each other.
        """
        return (
            match_all(self.target, target)
            and match_all(self.source, source)
            and all(source.get(name, "") == target.get(name, "") for name in self.equal)
            and not (match_all(self.source, target) and match_all(self.target, source))
        )


def inhibited(rules: Iterable[InhibitRule], target: Labels, sources: Iterable[Labels]) -> bool:
    """Whether any of the open incidents `sources` mutes one with the labels `target`."""
    listed = list(sources)
    return any(rule.inhibits(source, target) for rule in rules for source in listed)
