"""Which ranks save a part of each checkpoint, and whose part never came although those of the others did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final

from rankwatch_detectors.base import Occurrence
from rankwatch_detectors.state import Stateful

SAVES_MAX: Final = 8
"""Newest saves that may be incomplete."""


@dataclass(frozen=True, slots=True)
class SavePartsConfig:
    """When a part of a save counts as missing."""

    wait_s: float = 300.0
    """Since the newest part came: ranks that write in the background end minutes apart."""
    factor: float = 3.0
    """The same in times the longest span between the parts of one save."""


class SaveParts(Stateful):
    """The saves of one launch to disk, of which ranks register their parts.

    A save that says how many ranks take part (`shards`) is whole when as many have registered theirs. Whose parts
    belong to any other is learned from the fullest one of the launch in its tier, and only these are looked after.
    Memory: `SAVES_MAX` numbers for a rank.
    """

    STATE: ClassVar[tuple[str, ...]] = ("newest_step", "missed_step", "_usual", "_span_s", "_saves", "_stopped")

    def __init__(self, config: SavePartsConfig) -> None:
        self._config = config
        self.newest_step: int | None = None
        """Of the newest save that no part is missing of; None before the first of the launch."""
        self.missed_step = -1
        """Of the save that `missing` told of last."""
        self._stopped = False
        self._usual: dict[str, dict[str, None]] = {}
        """By tier, the ranks of the fullest save."""
        self._span_s = 0.0
        self._saves: dict[str, dict[str, Any]] = {}

    def begin(self, *, new_launch: bool) -> None:
        """A new attempt begins: no further part comes of the saves before it."""
        self._saves, self._stopped = {}, False
        if new_launch:
            self._usual, self.newest_step = {}, None

    def stop(self) -> None:
        """A rank has ended: a part that is missing from now on needs no other reason."""
        self._saves, self._stopped = {}, True

    def take(self, occurrence: Occurrence, now_s: float) -> None:
        """Add a rank's part of a save (event `checkpoint_saved`)."""
        step, rank, shards = occurrence.step, occurrence.rank, occurrence.fields.get("shards")
        if step is None or rank is None:
            return
        tier = "remote" if occurrence.fields.get("tier") == "remote" else "local"
        save = self._saves.setdefault(
            str(occurrence.fields.get("checkpoint") or f"{tier}:{step}"),
            {"step": step, "tier": tier, "ranks": {}, "first_s": now_s, "shards": 0},
        )
        save["ranks"][str(rank)] = None
        save["last_s"] = now_s
        if isinstance(shards, int):
            save["shards"] = max(save["shards"], shards)
        self._span_s = max(self._span_s, now_s - save["first_s"])
        if len(save["ranks"]) >= (save["shards"] or len(self._usual.get(tier, ()))):
            self.newest_step = max(step, self.newest_step or 0)
            if not save["shards"]:
                self._usual[tier] = save["ranks"]
        while len(self._saves) > SAVES_MAX:
            del self._saves[next(iter(self._saves))]

    def missing(self, now_s: float) -> list[int]:
        """The ranks whose parts of one save are missing for too long, ascending; each save once."""
        wait_s = max(self._config.wait_s, self._config.factor * self._span_s)
        for name, save in self._saves.items():
            if not self._stopped and now_s - save["last_s"] >= wait_s:
                del self._saves[name]
                self.missed_step = save["step"]
                usual = {} if save["shards"] else self._usual[save["tier"]]
                return sorted(int(rank) for rank in usual if rank not in save["ranks"])
        return []
