"""What the device of a rank is measured by: the timer of its steps, the marks of blocks, and those of collectives."""

from __future__ import annotations

from collections.abc import Callable

from rankwatch.sink import Sink
from rankwatch.torch_probe.blocks import BlockMarks
from rankwatch.torch_probe.collective_waits import CollectiveWaits
from rankwatch.torch_probe.device import Device
from rankwatch.torch_probe.device_timer import BLOCK, PASSES, WAIT, DeviceTimer, StepSpans
from rankwatch.torch_probe.watched_model import WatchedModels, is_distributed


class DeviceTimes:
    """The timer of the watched models, and the marks between phases' own."""

    def __init__(self, device: Device, models: WatchedModels, sink: Sink, failed: Callable[[Exception], None]) -> None:
        """Register the hooks of blocks; `failed` gets what one of them raises."""
        self.timer = DeviceTimer(device, sink)
        self._device = device
        self._models = models
        self._failed = failed
        self._blocks = BlockMarks([model.module for model in models.each], self.timer, failed)
        self._collectives: CollectiveWaits | None = None
        self._compiled = False

    def take(self) -> StepSpans:
        """What was marked in the step that ends now.

        After the first step it is known how gradients are reduced. If that does not hold all waits of the job, the
        other ones are marked from then on.
        """
        reductions_are_all = self._blocks.all_ranks or self._models.waits_in_ddp
        knows_waits = reductions_are_all or self._collectives_are_known
        taken = self.timer.take(blocks_each=self._blocks.each, knows_waits=knows_waits)
        if self._collectives is None and not reductions_are_all and is_distributed():
            self._collectives = CollectiveWaits(self._device, self.timer, self._part, self._failed)
            self._compiled = self._models.compiled
        return taken

    def remove(self) -> None:
        """Remove the hooks, and restore torch's functions."""
        for handle in self._blocks.handles:
            handle.remove()
        if self._collectives is not None:
            self._collectives.remove()

    @property
    def _collectives_are_known(self) -> bool:
        """Whether all waits of this step are marked: DDP's or FSDP's, and those in collectives of the model.

        What a compiled part communicates is not seen, nor what a library does without torch.distributed; so none is
        taken for known in a step without any mark.
        """
        reductions_are_known = self._models.all_in_ddp or self._blocks.measured
        return reductions_are_known and self.timer.waits_seen and not self._compiled

    def _part(self) -> str | None:
        """The part of the step in which the device is given work now; None: waits in it are not measured.

        Where blocks are measured, the rest of a pass counts as waiting as a whole, as does all of `WAIT`.
        """
        if self.timer.phase == WAIT:
            return None
        if self.timer.phase in PASSES and self._blocks.each:
            return BLOCK if self._blocks.measures_now else None
        return self.timer.phase
