"""The training loop as the watch sees it: its forms, the boundaries between steps, orders, state, its exit."""

from rankwatch.loop.loop import Checkpoint, Loop, advised_checkpoint

__all__ = ["Checkpoint", "Loop", "advised_checkpoint"]
