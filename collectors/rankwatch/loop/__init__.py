"""The training loop as the watch sees it: its forms, the boundaries between steps, orders, state, its exit."""

from rankwatch.loop.checkpoint import Checkpoint, advised_checkpoint
from rankwatch.loop.loop import Loop

__all__ = ["Checkpoint", "Loop", "advised_checkpoint"]
