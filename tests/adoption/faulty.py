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
from rankwatch.torch_probe.watched_model import divided_by, managed, own_part, whole_of

SLOW_S = 0.06
"""What a slow rank burns more in each step: these scripts' steps take 10 to 40 ms."""
MANTISSA_BIT = 12
SPIKE_STEPS = 3
SPIKE_FACTOR = 20.0


class Injector:
    """Stands between the loop and its steps."""

    def __init__(self, fault: str, at_step: int) -> None:
        self._fault = getattr(self, fault)
        self._lasts = fault in ("slow", "nan_for_good", "spike")
        self._at_step = at_step
        self._begin = Loop.begin
        self._done = False
        self._steps = 0
        self._cross_entropy = torch.nn.functional.cross_entropy

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

        parameter = computed_with(loop, middle(loop))
        handle = parameter.register_hook(poison)
        # It comes from the computation, so before what any other hook sees of the gradient.
        hooks = parameter._backward_hooks
        others = [number for number in hooks if number != handle.id]
        for number in others:
            hooks[number] = hooks.pop(number)

    nan_for_good = nan

    def spike(self, loop: Loop) -> None:
        usual = self._cross_entropy
        spiked = self._steps < SPIKE_STEPS
        torch.nn.functional.cross_entropy = (lambda *a, **k: SPIKE_FACTOR * usual(*a, **k)) if spiked else usual
        self._steps += 1

    def flip(self, loop: Loop) -> None:
        shared(loop).view(torch.int32).view(-1)[0] ^= 1 << MANTISSA_BIT

    def stop(self, loop: Loop) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def kill(self, loop: Loop) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def fail(self, loop: Loop) -> None:
        def divide(*_: Any) -> None:
            raise ZeroDivisionError("a bug of the script")

        before_update(loop, divide)

    def leave(self, loop: Loop) -> None:
        def leave(*_: Any) -> None:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()  # else threads of gloo may abort the process as it ends
            sys.exit(3)

        before_update(loop, leave)


def before_update(loop: Loop, act: Callable[..., None]) -> None:
    """Act within the step's body: an exception that leaves the loop comes from there."""
    loop.probe.handed[0].optimizers[0].register_step_pre_hook(act)


def middle(loop: Loop) -> torch.nn.Parameter:
    """A parameter in the middle of what the script handed to `watch.torch`."""
    parameters = loop.probe._model.parameters
    return parameters[len(parameters) // 2]


def computed_with(loop: Loop, parameter: torch.nn.Parameter) -> torch.Tensor:
    """The tensor that gets the gradient of this rank's own data: of FSDP2, the whole parameter."""
    records = [record for model in loop.probe._model.each for record in managed(model.bare)]
    return next((whole_of(record) for record in records if divided_by(record) is parameter), parameter)


def shared(loop: Loop) -> torch.Tensor:
    """What this rank holds of a parameter of which another rank holds the same."""
    sharded = loop.probe._sharded
    if sharded is None:
        return middle(loop).detach()
    members = next(one.members for one in sharded.slices if one.replica_of >= 0)
    return own_part(loop.probe._model.parameters[members[len(members) // 2]].detach())


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
