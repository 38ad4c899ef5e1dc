"""Ranks that were reported as slow, and how slow they are now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rankwatch_detectors.scope import IncidentScope
from rankwatch_detectors.state import Stateful


@dataclass(slots=True)
class TrackedRank:
    """One rank that was reported as slow. Excesses are logarithms of a ratio to its peers."""

    witness: str
    """Which witness found it: wall, cpu or host."""
    told: float
    """The excess that was reported last."""
    excess: float
    """The excess now, smoothed over rows."""
    standing: float
    """Its excess before that, which its baseline attributes to silicon."""
    changed: int = 0
    """Rows in which the excess differs from the reported one."""
    calm: int = 0
    """Rows in a row in which the excess is small, and the sum of their residuals."""
    calm_sum: float = 0.0


class TrackedRanks(Stateful):
    """Tracked ranks by number; in a snapshot by the text of the rank's scope."""

    def __init__(self) -> None:
        self.ranks: dict[int, TrackedRank] = {}

    def snapshot(self) -> dict[str, Any]:
        """All tracked ranks, as JSON types."""
        return {str(IncidentScope.of_rank(rank)): asdict(slow) for rank, slow in self.ranks.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load a result of `snapshot`."""
        self.ranks = {IncidentScope.parse(text).number: TrackedRank(**slow) for text, slow in state.items()}
