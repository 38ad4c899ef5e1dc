"""Marks where a device waits for other ranks in what a script communicates, as with tensor and pipeline parallelism.

Torch has no hooks there. All that Python communicates goes through the methods of a process group, and waits for it in
`Work.wait` or, for DTensor, in `wait_tensor`. These functions are replaced while the probe is open, and only in jobs
whose waits are not known otherwise. In each of them the stream of the training may be made to wait: in the first ones
where the communication takes place on that stream itself.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from threading import get_ident
from typing import Any, Final

import torch

from rankwatch.torch_probe.device import Device
from rankwatch.torch_probe.device_timer import DeviceTimer, TimedMoment
from rankwatch.torch_probe.phases import is_recomputed

_OF_GROUPS: Final = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "allgather",
    "allgather_coalesced",
    "_allgather_base",
    "all_gather_single",
    "gather",
    "scatter",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "send",
    "recv",
    "barrier",
)
"""Methods of a process group that communicate. Not every version of torch has all of them."""


class CollectiveWaits:
    """The marks of one training thread, from when it is made until `remove`."""

    def __init__(
        self, device: Device, timer: DeviceTimer, part: Callable[[], str | None], failed: Callable[[Exception], None]
    ) -> None:
        """Replace torch's functions. Call it on the thread that trains, with its usual stream.

        Args:
            device: of the rank.
            timer: gets the marks.
            part: the part of the step in which the device is given work now (see `StepSpans.waits`); None: waits in it
                are not measured.
            failed: gets what a mark raises.
        """
        self._device = device
        self._timer = timer
        self._part = part
        self._failed = failed
        self._thread = get_ident()
        self._stream = device.stream()
        self._within = False
        """One of the functions is running for the training, and may call others of them."""
        self._removed = False
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        """By owner and name, what was replaced and by what."""
        group, work = torch.distributed.ProcessGroup, torch.distributed.Work
        of_dtensor = sys.modules.get("torch.distributed._functional_collectives")  # not imported: not used
        places = [*((group, name) for name in _OF_GROUPS), (work, "wait"), (of_dtensor, "wait_tensor")]
        for owner, name in places:
            if hasattr(owner, name):
                self._replace(owner, name)

    def remove(self) -> None:
        """Restore torch's functions. Where others have replaced one since, ours stays in theirs and does nothing."""
        self._removed = True
        for owner, name, original, ours in self._replaced:
            if getattr(owner, name) is ours:
                setattr(owner, name, original)
        self._replaced = []
        self._part = lambda: None  # it holds the models, which what stays in theirs must not keep alive

    def _replace(self, owner: Any, name: str) -> None:
        original, kept = getattr(owner, name), inspect.getattr_static(owner, name)  # of a class: a function, a method

        @functools.wraps(original)
        def marked(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._removed or self._within or not self._trains():
                return original(*args, **kwargs)
            begun = None
            try:  # a signal's handler may raise anywhere, and the script may go on after it
                self._within = True
                begun = self._begins()
                return original(*args, **kwargs)
            finally:
                self._within = False
                if begun is not None:
                    self._ends(*begun)

        setattr(owner, name, marked)
        self._replaced.append((owner, name, kept, marked))

    def _trains(self) -> bool:
        """Whether the training calls, and not another thread, such as one that saves a checkpoint."""
        return get_ident() == self._thread or is_recomputed()

    def _begins(self) -> tuple[str, TimedMoment] | None:
        """The part in which a wait begins, and its start; None: it is not measured."""
        try:
            part = self._part()
            if part is None or self._device.stream() != self._stream:  # what another stream waits for overlaps
                return None
            begin = self._timer.wait_begins(part)
        except Exception as error:  # noqa: BLE001 -- an error of the probe must not end the user's communication
            self._failed(error)
            return None
        return None if begin is None else (part, begin)

    def _ends(self, part: str, begin: TimedMoment) -> None:
        try:
            self._timer.wait_ends(part, begin)
        except Exception as error:  # noqa: BLE001 -- the same
            self._failed(error)
