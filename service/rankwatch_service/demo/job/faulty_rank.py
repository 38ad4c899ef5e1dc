"""The faults of a rank. The training script calls this at two points of each step."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from rankwatch_service.clock import Clock, SystemClock
from rankwatch_service.demo.job.faults import Armed, FaultKind, Injected, mark_path

MANTISSA_BIT = 12
"""The bit that flips: in the middle of float32's mantissa, 0.05 % of the weight, which no loss curve shows."""


class FaultyRank:
    """One rank's own faults. The two calls cost a few microseconds while no fault is armed."""

    def __init__(self, directory: Path, rank: int, clock: Clock | None = None) -> None:
        self._directory = directory
        self._armed_file = directory / "armed.json"
        self._rank = rank
        self._clock = clock or SystemClock()
        self._stamp_ns = 0
        self._armed: list[Armed] = []
        self._now: Armed | None = None
        self._compute_began_s = time.thread_time()
        self._compute_s = 0.0
        self._burnt_s = 0.0

    def begin_step(self, attempt: str, step: int, model: nn.Module) -> None:
        """Find the fault armed for this step; inject it now if it needs the model (bit flip, NaN)."""
        now_s = time.thread_time()
        self._compute_s = now_s - self._compute_began_s - self._burnt_s
        self._compute_began_s, self._burnt_s = now_s, 0.0
        self._reload()
        self._now = next((fault for fault in self._armed if _is_due(fault, attempt, step)), None)
        if self._now is None:
            return
        self._note(self._now, attempt, step)
        if self._now.fault is FaultKind.BIT_FLIP:
            flip_bit(_middle(model))
        elif self._now.fault is FaultKind.NAN:
            poison_next_gradient(_middle(model))

    def in_forward(self) -> None:
        """Inject this step's fault if it is a slow step, a hang or a kill."""
        if self._now is None:
            return
        if self._now.fault is FaultKind.SLOW:
            began_s = time.thread_time()
            while time.thread_time() - began_s < self._compute_s:
                pass
            self._burnt_s = time.thread_time() - began_s
        elif self._now.fault is FaultKind.HANG:
            loop_forever()
        elif self._now.fault is FaultKind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)

    def _reload(self) -> None:
        try:
            stamp_ns = self._armed_file.stat().st_mtime_ns
        except FileNotFoundError:
            return
        if stamp_ns == self._stamp_ns:
            return
        self._stamp_ns = stamp_ns
        listed = json.loads(self._armed_file.read_text())
        faults = [Armed(FaultKind(row["fault"]), row["rank"], row["attempt"], row["step"]) for row in listed]
        self._armed = [fault for fault in faults if fault.rank == self._rank]

    def _note(self, armed: Armed, attempt: str, step: int) -> None:
        path = mark_path(self._directory, armed)
        if path.exists():
            return
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(Injected(attempt, step, self._clock.unix_ns()))))
        fresh.replace(path)


def flip_bit(parameter: Tensor) -> None:
    """Flip one mantissa bit of the parameter's first element, as defective hardware would."""
    parameter.detach().view(torch.int32).view(-1)[0] ^= 1 << MANTISSA_BIT


def poison_next_gradient(parameter: Tensor) -> None:
    """Put one NaN into this parameter's next gradient, before the reduction."""

    def poison(gradient: Tensor) -> Tensor:
        handle.remove()
        poisoned = gradient.clone()
        poisoned.view(-1)[0] = float("nan")
        return poisoned

    handle = parameter.register_hook(poison)  # type: ignore[no-untyped-call]


def _middle(model: nn.Module) -> nn.Parameter:
    parameters = list(model.parameters())
    return parameters[len(parameters) // 2]


def loop_forever() -> None:
    """Loop for ever."""
    while True:
        pass


def _is_due(armed: Armed, attempt: str, step: int) -> bool:
    if armed.attempt != attempt:
        return False
    return step >= armed.step if armed.fault is FaultKind.SLOW else step == armed.step
