"""What the device of a rank is measured by: the timer of its steps, and the marks of sharded models' blocks."""

from __future__ import annotations

from collections.abc import Callable

from rankwatch.sink import Sink
from rankwatch.torch_probe.blocks import BlockMarks
from rankwatch.torch_probe.device import Device
from rankwatch.torch_probe.device_timer import DeviceTimer, StepSpans
from rankwatch.torch_probe.watched_model import WatchedModels


class DeviceTimes:
    """The timer and the block marks of the watched models."""

    def __init__(self, device: Device, models: WatchedModels, sink: Sink, failed: Callable[[Exception], None]) -> None:
        """Register the hooks of blocks; `failed` gets what one of them raises."""
        self.timer = DeviceTimer(device, sink)
        self._models = models
        self._blocks = BlockMarks([model.module for model in models.each], self.timer, failed)

    def take(self) -> StepSpans:
        """What was marked in the step that ends now."""
        knows_waits = self._blocks.all_ranks or self._models.waits_in_ddp
        return self.timer.take(blocks_each=self._blocks.each, knows_waits=knows_waits)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._blocks.handles:
            handle.remove()
