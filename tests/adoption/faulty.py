"""Runs a training script and lets one of its ranks have a fault: `python faulty.py SCRIPT`, as a launcher's command.

The script is not touched and knows nothing of it. The fault comes at a step's begin, in the rank's own process, so that
it falls into the same step in every run. `ADOPTION_FAULT` says which: "NAME RANK STEP".
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from rankwatch.loop import Loop

SLOW_S = 0.06
"""What a slow rank burns more in each step: these scripts' steps take 10 to 40 ms."""
MANTISSA_BIT = 12


class Injector:
    """Stands between the loop and its steps."""

    def __init__(self, fault: str, at_step: int) -> None:
        self._fault = getattr(self, fault)
        self._lasts = fault in ("slow", "nan_for_good")
        self._at_step = at_step
        self._begin = Loop.begin
        self._done = False

    def begin(self, loop: Loop, step: int, **how: Any) -> int:
        """A step has begun."""
        step = self._begin(loop, step, **how)
        if step >= self._at_step and (self._lasts or not self._done):
            self._done = True
            self._fault(loop)
        return step

    def slow(self, loop: Loop) -> None:
        end_s = time.thread_time() + SLOW_S
        while time.thread_time() < end_s:
            pass

    def nan(self, loop: Loop) -> None:
        def poison(gradient: torch.Tensor) -> torch.Tensor:
            handle.remove()
            return gradient * float("nan")

        parameter = middle(loop)
        if hasattr(parameter, "to_local"):  # FSDP2 computes with parameters of its own: the weight is what can be had
            parameter.detach().to_local().view(-1)[0] = float("nan")
            return
        handle = parameter.register_hook(poison)

    nan_for_good = nan

    def flip(self, loop: Loop) -> None:
        middle(loop).detach().view(torch.int32).view(-1)[0] ^= 1 << MANTISSA_BIT

    def stop(self, loop: Loop) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def kill(self, loop: Loop) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def fail(self, loop: Loop) -> None:
        def divide(*_: Any) -> None:
            raise ZeroDivisionError("a bug of the script")

        before_update(loop, divide)

    def leave(self, loop: Loop) -> None:
        before_update(loop, lambda *_: sys.exit(3))


def before_update(loop: Loop, act: Callable[..., None]) -> None:
    """Act within the step's body: an exception that leaves the loop comes from there."""
    loop.probe.handed[0].optimizers[0].register_step_pre_hook(act)


def middle(loop: Loop) -> torch.nn.Parameter:
    """A parameter in the middle of what the script handed to `watch.torch`."""
    parameters = loop.probe._model.parameters
    return parameters[len(parameters) // 2]


def main() -> None:
    """Run the script given as the first argument."""
    fault, rank, step = os.environ["ADOPTION_FAULT"].split()
    first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if rank == os.environ.get("RANK", os.environ.get("LOCAL_RANK")) and first_start:
        injector = Injector(fault, int(step))

        def begin(loop: Loop, step: int, **how: Any) -> int:
            return injector.begin(loop, step, **how)

        Loop.begin = begin
    script = sys.argv[1]
    if "RANK" in os.environ:
        sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(script)
    # Not runpy, which changes argv: a script that starts its other ranks itself does so with the command it was given.
    with open(script) as file:
        exec(compile(file.read(), script, "exec", dont_inherit=True), vars(sys.modules["__main__"]))


if __name__ == "__main__":
    main()
