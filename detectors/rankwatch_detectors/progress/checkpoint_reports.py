"""What agents report of checkpoints: the file system of saves (event `checkpoint_disk`), and what could not be saved or
loaded (event `checkpoint_failed`), the oldest of each rank and tier.

A failure is a plain dict. Its keys are those of the evidence, and `time_s`, `attempt`, `ended`: the rank's process has
ended since, `ordered`: all ranks are held until each has restored, `follows`: its error is one that the end of another
rank causes, and `missing`: the rank has reported nothing, but its part never came.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Final

from rankwatch_detectors.base import Occurrence
from rankwatch_detectors.ends.teardown import tells_of_lost_peer
from rankwatch_detectors.episodes import EPISODES_MAX
from rankwatch_detectors.state import Stateful

FULL_SHARE: Final = 0.001
"""A file system with less free space counts as full, whatever a save takes."""

SIZES: Final = ("free_bytes", "total_bytes", "save_bytes")
PATH_CHARS_MAX: Final = 512
UNITS: Final = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
"""Units of sizes, the largest first; the size of the file system decides which one."""


class DiskReport(Stateful):
    """The newest report: of a full file system, else of any host's."""

    STATE: ClassVar[str] = "evidence"

    def __init__(self) -> None:
        self.evidence: dict[str, Any] = {}
        """Host, path and sizes; empty before the first report."""

    def add(self, occurrence: Occurrence) -> None:
        """Keep a host's report; that of a full file system until the same host reports another."""
        sizes = {name: occurrence.fields.get(name) for name in SIZES}
        if not all(isinstance(size, int) and size >= 0 for size in sizes.values()):
            return
        reported = {"host": occurrence.host, "path": str(occurrence.fields.get("path", ""))[:PATH_CHARS_MAX], **sizes}
        if _is_full(reported) or not self.is_full or self.evidence["host"] == occurrence.host:
            self.evidence = reported

    @property
    def is_full(self) -> bool:
        """Whether another save does not fit on it."""
        return _is_full(self.evidence)

    @property
    def sentence(self) -> str:
        """How full it is, with a space before it; "" if it is not known."""
        disk = self.evidence
        if not disk:
            return ""
        return f" The file system of {disk['path']} on {disk['host']} {self._state}."

    @property
    def sentence_of_last_save(self) -> str:
        """The same where the path of the save that failed is not known, and may be on another file system."""
        disk = self.evidence
        if not disk:
            return ""
        where = f"the file system of the last save, {disk['path']} on {disk['host']}, {self._state}"
        return f" The path of the save is not known; {where}."

    @property
    def _state(self) -> str:
        free, total = self.evidence["free_bytes"], self.evidence["total_bytes"]
        unit, name = next((one for one in UNITS if total >= one[0]), UNITS[-1])
        return f"{'is full' if self.is_full else 'has room'}: {free / unit:.1f} of {total / unit:.1f} {name} are free"


def _is_full(disk: Mapping[str, Any]) -> bool:
    return bool(disk) and disk["free_bytes"] < max(disk["save_bytes"], FULL_SHARE * disk["total_bytes"])


Failure = dict[str, Any]

SAVE, RESTORE = "save", "restore"
MEMORY, DISK = "memory", "disk"
NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a file system or a quota that is full."""

TEXT_CHARS_MAX: Final = 500
LINE_CHARS_MAX: Final = 200
TEXTS: Final = ("checkpoint", "type", "message", "where")
SHOWN: Final = ("rank", "host", "step", "tier", "path", *TEXTS, "errno")
_PATH: Final = re.compile(r"\S*/\S*")


def failure_of(occurrence: Occurrence) -> Failure:
    """The failure that an event `checkpoint_failed` of a rank reports."""
    fields = occurrence.fields
    texts = {name: str(fields.get(name) or "")[:TEXT_CHARS_MAX] for name in TEXTS}
    number = fields.get("errno")
    number = number if isinstance(number, int) else 0
    error = _PATH.sub("", f"{texts['type']}: {texts['message']}")
    return {
        "rank": occurrence.rank,
        "host": occurrence.host,
        "step": -1 if occurrence.step is None else occurrence.step,
        "path": str(fields.get("location") or "")[:TEXT_CHARS_MAX],
        **texts,
        "errno": number,
        "time_s": occurrence.time_s,
        "attempt": occurrence.attempt,
        "tier": tier_of(occurrence),
        "ended": False,
        "ordered": fields.get("ordered") is True,
        "follows": not number and tells_of_lost_peer(error, texts["where"]),
        "missing": False,
    }


def tier_of(occurrence: Occurrence) -> str:
    """Where a checkpoint was to be saved, or was: memory (of the ranks' processes) or disk."""
    return MEMORY if occurrence.fields.get("tier") == MEMORY else DISK


def launch_of(attempt: str) -> str:
    """The launch of an attempt."""
    return attempt.rpartition(".")[0]


def first_of(failures: Iterable[Failure]) -> Failure:
    """The failure that came first; of those at about the same time, one that no other rank has caused."""
    return min(failures, key=lambda one: (one["follows"], one["time_s"], one["rank"]))


def error_of(failure: Failure) -> str:
    """Its exception, on one line, after a colon; "" if it has none."""
    said = ": ".join(text for text in (failure["type"], failure["message"].strip()) if text)
    return f": {said.splitlines()[0][:LINE_CHARS_MAX]}" if said else ""


def also(others: int) -> str:
    """How many other ranks failed too, to go on with a sentence."""
    return f", and so did {others} other{'s' * (others > 1)}" if others else ""


def evidence_of(failure: Failure) -> dict[str, Any]:
    """The fields of a failure that go into evidence."""
    return {name: failure[name] for name in SHOWN}


TEXTS_MAX: Final = 64
"""Ranks of a tier of which the texts are kept (path, exception, place): one of them is shown."""
RANKS_MAX: Final = 65_536
"""Ranks of a tier: four times the largest job. Further ones are not counted."""


class RankFailures(Stateful):
    """Failures by tier and rank. Memory: 1 KB a rank, and 2.5 KB more for `TEXTS_MAX` of them."""

    STATE: ClassVar[str] = "_by_tier"

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
        """Remove and return the failures that match, oldest of each tier first."""
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
