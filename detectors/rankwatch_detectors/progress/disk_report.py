"""The file system on which a job's checkpoints are saved, as agents report it (event `checkpoint_disk`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from rankwatch_detectors.base import Occurrence
from rankwatch_detectors.state import Stateful

FULL_SHARE: Final = 0.001
"""A file system with less free space counts as full, whatever a save takes."""

SIZES: Final = ("free_bytes", "total_bytes", "save_bytes")
PATH_CHARS_MAX: Final = 512
UNITS: Final = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
"""Units of sizes, the largest first; the size of the file system decides which one."""


class DiskReport(Stateful):
    """The newest report: of a full file system, else of any host's."""

    STATE: ClassVar[tuple[str, ...]] = ("evidence",)

    def __init__(self) -> None:
        self.evidence: dict[str, Any] = {}
        """Host, path and sizes; empty before the first report."""

    def take(self, occurrence: Occurrence) -> None:
        """Keep a host's report; that of a full file system until the same host reports another."""
        sizes = {name: occurrence.fields.get(name) for name in SIZES}
        if not all(isinstance(size, int) and size >= 0 for size in sizes.values()):
            return
        told = {"host": occurrence.host, "path": str(occurrence.fields.get("path", ""))[:PATH_CHARS_MAX], **sizes}
        if _is_full(told) or not self.is_full or self.evidence["host"] == occurrence.host:
            self.evidence = told

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
