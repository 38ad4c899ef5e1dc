"""All devices of a job's hosts, by kind: a board for each, so that the series of one are not as wide as all. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rankwatch import wire
from rankwatch_detectors.base import DeviceCounters, Frame, StepKind
from rankwatch_service.job.boards.device_board import DeviceBoard, DeviceNumber


class DeviceBoards:
    """The boards of GPUs, network ports and hosts, as one."""

    def __init__(self, known: Iterable[DeviceNumber] = ()) -> None:
        devices = list(known)
        self._boards = {
            kind: DeviceBoard(kind, [one for one in devices if one.kind == kind]) for kind in wire.DEVICE_KINDS
        }

    @property
    def counts(self) -> Counter[str]:
        """Samples and values that are not charted, by reason."""
        return sum((board.counts for board in self._boards.values()), Counter())

    def take(self, batches: Sequence[wire.Batch], ranks: int, now_s: float) -> list[DeviceNumber]:
        """As `DeviceBoard.take`."""
        carrying = [batch for batch in batches if batch.devices or batch.host_devices]
        if not carrying:
            return []
        return [device for board in self._boards.values() for device in board.take(carrying, ranks, now_s)]

    def due(self, now_s: float) -> Iterator[DeviceCounters]:
        """As `DeviceBoard.due`, kind by kind."""
        for board in self._boards.values():
            yield from board.due(now_s)

    def state(self) -> dict[str, Any]:
        """Everything, as JSON types and arrays."""
        return {kind: board.state() for kind, board in self._boards.items()}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> DeviceBoards:
        """The boards that gave this state."""
        boards = cls()
        for kind, kept in state.items():
            boards._boards[kind] = DeviceBoard.restored(kind, kept)
        return boards


def as_frame(counters: DeviceCounters) -> Frame:
    """Counters as the series keep them: a frame of the family "devices", of no attempt."""
    whole = (counters.time_s, counters.values, counters.present)
    return Frame("", "devices", counters.slot, StepKind.TRAIN, *whole)
