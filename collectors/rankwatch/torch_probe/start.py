"""One line in the training output: what the probe watches of this job, what it does not, and why.

It is printed after the first step in which every optimizer has made an update. Earlier it is unknown whether hooks run
(compiled code may skip them) and what wraps the model (frameworks wrap it after returning it).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from rankwatch.notices import say
from rankwatch.sink import Sink
from rankwatch.torch_probe.sampling import Sampling
from rankwatch.torch_probe.sharded import ShardedModels
from rankwatch.torch_probe.share import Share
from rankwatch.torch_probe.watched_model import WatchedModels, is_distributed

PATIENCE_STEPS: Final = 10
"""Steps after which the line is printed even if not every optimizer has made an update."""

_LOG_IT: Final = "log what clip_grad_norm_ returns as grad_norm"


class Start:
    """Watches the first steps, and prints the line once, and again when the gradient norm is first left out in steps.

    What is declared always says how often the norm is measured.
    """

    def __init__(
        self,
        models: WatchedModels,
        sharded: ShardedModels | None,
        shares: Sequence[Share],
        wanted: tuple[bool, bool, int],
        sampling: Sampling,
    ) -> None:
        """Nothing was printed yet.

        Args:
            models: the watched models.
            sharded: what is known of their shards, if they have any.
            shares: of the optimizers.
            wanted: whether total norms and local gradients are measured, and the steps between fingerprints.
            sampling: how often total norms are measured.
        """
        self._said_every = 0
        self._saying = 2
        """How often the line may still be printed."""
        self._sampling = sampling
        self._models = models
        self._sharded = sharded
        self._shares = shares
        self._norms, self._local, self._fingerprint_every = wanted
        self._steps = 0

    def step_ends(self, sink: Sink) -> None:
        """A step has ended: tell if all is known by now, or if something has changed."""
        if self._said_every == self._sampling.every:
            return
        self._steps += 1
        if self._steps < PATIENCE_STEPS and not all(share.ever_made and share.ever_touched for share in self._shares):
            return
        self._said_every = self._sampling.every
        if not is_distributed() or torch.distributed.get_rank() == 0:
            text = self.text()
            sink.declare({"watched": text})
            if self._saying:
                self._saying -= 1
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
        if self._models.sharded and self._sharded is None:
            return [], [f"gradients (it cannot be read how parameters are sharded; {_LOG_IT})"]
        if not any(share.ever_touched for share in self._shares):
            return [], ["gradients (no backward has reached these parameters)"]
        every = self._sampling.every
        norm = "gradient norm" if every == 1 else f"gradient norm every {every} steps"
        why = self._sharded.unmeasured if self._sharded is not None and self._norms else ""
        seen = [norm] if self._norms and not why else []
        seen += ["local gradients"] if self._local else []
        idle = [type(share.optimizer).__name__ for share in self._shares if not share.ever_made]
        unseen = [f"gradient norm ({why}; {_LOG_IT})"] if why else []
        return seen, unseen + ([f"updates of {', '.join(idle)} (none was made)"] if idle else [])

    def _fingerprints(self) -> tuple[list[str], list[str]]:
        if not self._fingerprint_every:
            return [], ["fingerprints (switched off)"]
        if not is_distributed():
            return [], []
        if self._models.replicated:
            return [f"fingerprints every {self._fingerprint_every} steps"], self._apart()
        if self._models.sharded:
            return self._fingerprints_of_slices()
        if self._models.reduced_by_ddp:
            return [], ["fingerprints (replicas are a part of the job: declare them by rankwatch.start(topology=...))"]
        return [], ["fingerprints (not called through DistributedDataParallel: set replicated=True if ranks are equal)"]

    def _fingerprints_of_slices(self) -> tuple[list[str], list[str]]:
        compared = 0 if self._sharded is None else self._sharded.compared
        if not compared:
            return [], ["fingerprints (not comparable: no two ranks are known to hold the same part of a parameter)"]
        rest, every = len(self._models.parameters) - compared, f"every {self._fingerprint_every} steps"
        if not rest:
            return [f"fingerprints {every}"], []
        return (
            [f"fingerprints of {compared} parameters {every}"],
            [f"fingerprints of {rest} parameters (not comparable: no other rank is known to hold the same part)"],
        )

    def _apart(self) -> list[str]:
        """Models without replicas, if other models have some."""
        apart = [model.name for model in self._models.each if not model.replicated]
        return [f"fingerprints of {', '.join(apart)}"] if apart else []
