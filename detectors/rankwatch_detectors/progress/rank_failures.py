"""The failed saves or restores of many ranks, the oldest of each rank and tier."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Final

from rankwatch_detectors.episodes import EPISODES_MAX
from rankwatch_detectors.progress.checkpoint_failure import DISK, MEMORY, TEXTS, Failure, first_of
from rankwatch_detectors.state import Stateful

TEXTS_MAX: Final = 64
"""Ranks of a tier of which the texts are kept (path, exception, place): one of them is shown."""
RANKS_MAX: Final = 65_536
"""Ranks of a tier: four times the largest job. Further ones are not counted."""


class RankFailures(Stateful):
    """Failures by tier and rank. Memory: 1 KB a rank, and 2.5 KB more for `TEXTS_MAX` of them."""

    STATE: ClassVar[tuple[str, ...]] = ("_by_tier",)

    def __init__(self) -> None:
        self._by_tier: dict[str, dict[str, Failure]] = {DISK: {}, MEMORY: {}}

    def __len__(self) -> int:
        return sum(map(len, self._by_tier.values()))

    def add(self, failure: Failure) -> None:
        """Keep a failure, unless the rank has one in its tier already; texts only of the first `TEXTS_MAX`."""
        known = self._by_tier[failure["tier"]]
        if str(failure["rank"]) in known or len(known) >= RANKS_MAX:
            return
        if len(known) >= TEXTS_MAX:
            failure |= dict.fromkeys(("path", *TEXTS), "")
        known[str(failure["rank"])] = failure

    def get(self, rank: int | None, tier: str) -> Failure | None:
        """The failure of a rank in a tier."""
        return self._by_tier[tier].get(str(rank))

    def drop(self, rank: int | None, tier: str | None = None) -> None:
        """Forget a rank's failure in a tier, or in each."""
        for name, known in self._by_tier.items():
            if tier in (name, None):
                known.pop(str(rank), None)

    def take_out(self, fits: Callable[[Failure], bool]) -> list[Failure]:
        """Take out the failures that fit, oldest of each tier first."""
        taken = [one for known in self._by_tier.values() for one in known.values() if fits(one)]
        for one in taken:
            del self._by_tier[one["tier"]][str(one["rank"])]
        return taken

    def clear(self) -> None:
        """Forget all."""
        self._by_tier = {DISK: {}, MEMORY: {}}

    def of(self, tier: str) -> list[Failure]:
        """The failures in a tier."""
        return list(self._by_tier[tier].values())

    def has(self, tier: str) -> bool:
        """Whether a rank has failed in a tier."""
        return bool(self._by_tier[tier])

    @property
    def shown(self) -> list[Failure]:
        """The failures that matter most: those on disk, if there are any; the first one first, then by rank."""
        known = self.of(DISK) or self.of(MEMORY)
        first = first_of(known)
        return [first, *sorted((one for one in known if one is not first), key=lambda one: one["rank"])]


def ranks_of(failures: list[Failure]) -> tuple[int, ...]:
    """Their ranks in the same order, as many as a finding names."""
    return tuple(one["rank"] for one in failures[:EPISODES_MAX])
