"""One line in the training output: what the probe watches of this job, what it does not, and why.

It is printed after the first step in which every optimizer has made an update. Earlier it is unknown whether hooks run
(compiled code may skip them) and what wraps the model (frameworks wrap it after returning it).

How often the total gradient norm is measured, so that it takes at most a given part of the training time.

On a long step it is measured each time. Ranks decide by their own clocks, so the interval is a power of two and counts
from step 0: ranks that come to different intervals still measure in common steps.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import torch

from rankwatch.notices import say
from rankwatch.sink import Sink
from rankwatch.torch_probe.sharded import ShardedModels
from rankwatch.torch_probe.share import Share
from rankwatch.torch_probe.watched_model import WatchedModels, is_distributed

OVERHEAD_MAX: Final = 0.01
"""Default part of the training time: a tenth of what a user would notice."""
EVERY_MAX: Final = 64
"""Longest interval in steps; the detectors of gradient norms still learn a baseline within some thousand steps."""
STEPS_REMEMBERED: Final = 16
"""Steps and measurements whose median counts, so that an evaluation or a busy core does not change the interval."""
MEASURED_FIRST: Final = 4
"""Measurements before the first choice: the first steps of a job are slower than others."""
_SHRINKS_BELOW: Final = 0.4
"""The interval is halved only when less than this part of it is needed, so that it does not alternate."""


class Sampling:
    """Says in which steps to measure. `every` is the interval in steps."""

    def __init__(self, overhead_max: float, now: Callable[[], int] = time.monotonic_ns) -> None:
        """Measure in each step at first.

        Args:
            overhead_max: largest part of the training time that measurements may take.
            now: monotonic nanoseconds.
        """
        self.every = 1
        self.due = True
        """Whether to measure in this step."""
        self.now = now
        self._overhead_max = overhead_max
        self._begun_ns = 0
        self._spent_ns = 0
        self._steps_ns: deque[int] = deque(maxlen=STEPS_REMEMBERED)
        self._costs_ns: deque[int] = deque(maxlen=STEPS_REMEMBERED)

    def step_begins(self, step: int) -> None:
        """The next step begins."""
        now_ns = self.now()
        if self._begun_ns:
            self._steps_ns.append(now_ns - self._begun_ns)
        self._begun_ns = now_ns
        if self._spent_ns and self._steps_ns:
            self._costs_ns.append(self._spent_ns)
            if len(self._costs_ns) >= MEASURED_FIRST:
                self._choose()
        self._spent_ns = 0
        self.due = step % self.every == 0

    def took(self, spent_ns: int) -> None:
        """A measurement of this step took so long; there are several if gradients accumulate."""
        self._spent_ns += spent_ns

    def _choose(self) -> None:
        step_ns = statistics.median(self._steps_ns)
        needed = statistics.median(self._costs_ns) / max(step_ns * self._overhead_max, 1.0)
        while self.every < min(needed, EVERY_MAX):
            self.every *= 2
        while self.every > 1 and needed < self.every * _SHRINKS_BELOW:
            self.every //= 2


START_STEPS_MAX: Final = 10
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
        self._said: tuple[int, int] | None = None
        """The interval of the norm, and how many optimizers make updates, as last declared."""
        self._saying = 2
        """How often the line may still be printed."""
        self._sampling = sampling
        self._models = models
        self._sharded = sharded
        self._shares = shares
        self._norms, self._local, self._fingerprint_every = wanted
        self._steps = 0

    def step_ends(self, sink: Sink) -> None:
        """Handle the end of a step: print what is watched, once all of it is known and whenever it changes."""
        known = self._sampling.every, len(self._active)
        if self._said == known:
            return
        self._steps += 1
        if self._steps < START_STEPS_MAX and not all(share.ever_made and share.ever_touched for share in self._shares):
            return
        self._said = known
        sink.declare({"optimizers": len(self._active)})
        if not is_distributed() or torch.distributed.get_rank() == 0:
            text = self.text()
            if sink.declare({"watched": text}) and self._saying:
                self._saying -= 1
                say(text)

    @property
    def _active(self) -> Sequence[Share]:
        """The optimizers that make updates; all of them as long as none is known to."""
        return [share for share in self._shares if share.ever_made] or self._shares

    def text(self) -> str:
        """The line."""
        seen, unseen = self._gradients()
        reported, missing = self._fingerprints()
        active = self._active
        earlier = next(number for number, share in enumerate(self._shares) if share is active[0])
        over = {id(parameter) for share in self._shares[:earlier] for parameter in share.parameters}
        models = [one for one in self._models.each if not over.issuperset(id(held) for _, held in one.named)]
        named = [f"{model.name} ({len(model.named)} parameters)" for model in models]
        named += [type(share.optimizer).__name__ for share in self._shares[earlier:]]
        line = f"watching {', '.join(named)}: {', '.join([*seen, *reported]) or 'times only'}"
        left_out = [*unseen, *missing]
        line += f"; not watched: {'; '.join(left_out)}" if left_out else ""
        return line + (f"; {earlier} earlier {'one is' if earlier == 1 else 'ones are'} idle" if earlier else "")

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
        newest = self._shares[self._shares.index(self._active[0]) :]
        idle = [type(share.optimizer).__name__ for share in newest if not share.ever_made]
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
            return [], [
                "fingerprints (only some ranks are replicas of each other: declare them by "
                "rankwatch.start(topology=...))"
            ]
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
