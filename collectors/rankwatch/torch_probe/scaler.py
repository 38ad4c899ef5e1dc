"""Which loss scaler, if any, calls an optimizer.

A torch.amp.GradScaler leaves no trace on the optimizers whose updates it decides about, nor they on it. But it stands
on the stack while it lets an update happen.
"""

from __future__ import annotations

import sys
from typing import Final

import torch

from rankwatch.torch_probe.arguments import Scaler

FRAMES_MAX: Final = 16
"""How far up the stack is looked: torch and the schedulers put 2 frames between, frameworks another 4."""

_STEP: Final = torch.amp.GradScaler.step.__code__


def calling_scaler() -> Scaler | None:
    """The enabled scaler in whose `step` the caller is."""
    frame = sys._getframe(1)
    for _ in range(FRAMES_MAX):
        if frame.f_code is _STEP:
            found = frame.f_locals["self"]
            return found if found.is_enabled() else None
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None
