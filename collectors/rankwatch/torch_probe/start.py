"""One line in the training output: what the probe watches of this job, what it does not, and why.

It is printed after the first step in which every optimizer has made an update. Earlier it is unknown whether hooks run
(compiled code may skip them) and what wraps the model (frameworks wrap it after returning it).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from rankwatch.console import say
from rankwatch.meter import Sink
from rankwatch.torch_probe.share import Share
from rankwatch.torch_probe.watched_model import WatchedModels, is_distributed

PATIENCE_STEPS: Final = 10
"""Steps after which the line is printed even if not every optimizer has made an update."""


class Start:
    """Watches the first steps, and prints the line once."""

    def __init__(
        self, models: WatchedModels, shares: Sequence[Share], norms: bool, local: bool, fingerprint_every: int
    ) -> None:
        self.told = False
        self._models = models
        self._shares = shares
        self._norms = norms
        self._local = local
        self._fingerprint_every = fingerprint_every
        self._steps = 0

    def tell(self, sink: Sink) -> None:
        """A step has ended: print the line if all is known by now."""
        self._steps += 1
        if self._steps < PATIENCE_STEPS and not all(share.ever_made and share.ever_touched for share in self._shares):
            return
        self.told = True
        if not is_distributed() or torch.distributed.get_rank() == 0:
            text = self.text()
            sink.declare({"watched": text})
            say(text)

    def text(self) -> str:
        """The line."""
        seen, unseen = self._gradients()
        told, missing = self._fingerprints()
        models = ", ".join(f"{model.name} ({len(model.named)} parameters)" for model in self._models.each)
        optimizers = ", ".join(type(share.optimizer).__name__ for share in self._shares)
        line = f"watching {models}, {optimizers}: {', '.join([*seen, *told]) or 'times only'}"
        left_out = [*unseen, *missing]
        return f"{line}; not watched: {'; '.join(left_out)}" if left_out else line

    def _gradients(self) -> tuple[list[str], list[str]]:
        if self._models.sharded:
            return [], ["gradients (parameters are sharded; log what clip_grad_norm_ returns as grad_norm)"]
        if not any(share.ever_touched for share in self._shares):
            return [], ["gradients (no backward has reached these parameters)"]
        seen = (["gradient norm"] if self._norms else []) + (["local gradients"] if self._local else [])
        idle = [type(share.optimizer).__name__ for share in self._shares if not share.ever_made]
        return seen, [f"updates of {', '.join(idle)} (none was made)"] if idle else []

    def _fingerprints(self) -> tuple[list[str], list[str]]:
        if not self._fingerprint_every:
            return [], ["fingerprints (switched off)"]
        if not is_distributed():
            return [], []
        if self._models.replicated:
            return [f"fingerprints every {self._fingerprint_every} steps"], self._apart()
        if self._models.sharded:
            return [], ["fingerprints (parameters are sharded: no two ranks hold the same)"]
        if self._models.reduced_by_ddp:
            return [], ["fingerprints (replicas are a part of the job: declare them by rankwatch.start(topology=...))"]
        return [], ["fingerprints (not called through DistributedDataParallel: set replicated=True if ranks are equal)"]

    def _apart(self) -> list[str]:
        """Models without replicas, if other models have some."""
        apart = [model.name for model in self._models.each if not model.replicated]
        return [f"fingerprints of {', '.join(apart)}"] if apart else []
