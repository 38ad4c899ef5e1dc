"""An accelerator whose work is done when the test says so."""

from __future__ import annotations

import torch


class FakeMoment:
    def __init__(self, device: FakeDevice, number: int) -> None:
        self.device = device
        self.number = number

    def query(self) -> bool:
        self.device.queries += 1
        return self.number < self.device.done

    def elapsed_time(self, end: FakeMoment) -> float:
        assert end.number < self.device.done, "read before the device had come there"
        return float(end.number - self.number)


class FakeDevice:
    """Implements rankwatch.torch_probe.late.Device. Moments are numbered; those before `done` are past."""

    def __init__(self) -> None:
        self.moments = 0
        self.done = 0
        self.queries = 0

    def pinned(self, rows: int, words: int) -> torch.Tensor:
        return torch.full((rows, words), -1, dtype=torch.int64)

    def now(self) -> FakeMoment:
        self.moments += 1
        return FakeMoment(self, self.moments - 1)

    def finish(self) -> None:
        """All work given so far is done."""
        self.done = self.moments
