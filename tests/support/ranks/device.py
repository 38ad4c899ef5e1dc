"""An accelerator whose work is done when the test says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch


class FakeMoment:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.number = -1

    def query(self) -> bool:
        assert not self.device.capturing, "a moment is asked in a capture"
        self.device.queries += 1
        return self.number < self.device.done

    def elapsed_time(self, end: FakeMoment) -> float:
        assert end.number < self.device.done, "read before the device had come there"
        return self.device.at_ms(end.number) - self.device.at_ms(self.number)


class FakeDevice:
    """Implements rankwatch.torch_probe.device.Device. Moments are numbered; those before `done` are past."""

    def __init__(self) -> None:
        self.moments = 0
        """Recorded so far."""
        self.made = 0
        self.done = 0
        self.queries = 0
        self.capturing = False
        self.host_now_s = 0.0
        self.work_ms = 0.0
        """Work given to the device so far, beside 1 ms before each moment."""
        self._at_ms: list[float] = []
        self._free: list[FakeMoment] = []

    def describe(self, known_uuid: str, failed: Callable[[Exception], None]) -> Mapping[str, str]:
        return {"device_type": "fake"}

    def pinned(self, rows: int, words: int) -> torch.Tensor:
        return torch.full((rows, words), -1, dtype=torch.int64)

    def now(self) -> FakeMoment:
        assert not self.capturing, "a moment is recorded in a capture"
        if not self._free:
            self.made += 1
            self._free.append(FakeMoment(self))
        moment = self._free.pop()
        moment.number = self.moments
        self.moments += 1
        self._at_ms.append(self.moments + self.work_ms)
        return moment

    def stream(self) -> int:
        return 0

    def host_s(self) -> float:
        return self.host_now_s

    def free(self, moment: FakeMoment) -> None:
        assert moment not in self._free, "a moment is freed twice"
        self._free.append(moment)

    def captures(self) -> bool:
        return self.capturing

    def at_ms(self, number: int) -> float:
        return self._at_ms[number]

    def finish(self) -> None:
        """All work given so far is done."""
        self.done = self.moments
