"""Finds the loss scaler that calls an optimizer, if any.

A torch.amp.GradScaler and its optimizers have no reference to each other, but the scaler's `step` is on the stack while
it calls an optimizer.
"""

from __future__ import annotations

import sys
from typing import Final

import torch

from rankwatch.torch_probe.arguments import Scaler

FRAMES_MAX: Final = 16
"""Depth of the search on the stack: torch and the schedulers add 2 frames, frameworks another 4."""

_STEP: Final = torch.amp.GradScaler.step.__code__


def calling_scaler() -> Scaler | None:
    """The enabled scaler whose `step` is on the caller's stack; None without one."""
    frame = sys._getframe(1)
    for _ in range(FRAMES_MAX):
        if frame.f_code is _STEP:
            found = frame.f_locals["self"]
            return found if found.is_enabled() else None
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None
