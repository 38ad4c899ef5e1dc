"""Loss and gradient norms of a job of the cluster model, and when they arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from rankwatch_detectors.base import Floats, Frame, StepKind
from suite.cluster.faults import LossBurst, LossDrift, NonFiniteGradient
from suite.cluster.noise import CorrelatedNoise

if TYPE_CHECKING:
    from suite.cluster.job import ClusterJob

LOSS_END, LOSS_RANGE, LOSS_STEPS, LOSS_POWER = 1.8, 6.0, 50.0, 0.6
"""The loss falls as a power of the steps, as scaling laws have it: END + RANGE x (1 + step / STEPS)^-POWER."""
LOSS_SIGMA, LOSS_MEMORY_STEPS = 0.01, 5.0
"""AR(1) noise: neighbouring batches are of the same documents."""
NORM_SIGMA, NORM_MEMORY_STEPS = 0.15, 10.0
LOCAL_NORM_SIGMA: Final = 0.1


class TrainingCurves:
    """What training computes in each step. A step that is repeated gets new noise, as a restart shuffles data anew."""

    def __init__(self, job: ClusterJob, random: np.random.Generator) -> None:
        self._job, self._random = job, random
        self._loss = CorrelatedNoise(random, 1, LOSS_SIGMA, (LOSS_MEMORY_STEPS,))
        self._norm = CorrelatedNoise(random, 1, NORM_SIGMA, (NORM_MEMORY_STEPS,))

    def frame(self, attempt: str, step: int, ranks: int) -> Frame:
        """A step's values, as a frame that has not arrived yet and so has no time."""
        loss = self._loss_of(step) * float(np.exp(self._loss.after(1.0)[0]))
        norm = float(np.exp(self._norm.after(1.0)[0]))
        local = np.exp(LOCAL_NORM_SIGMA * self._random.standard_normal(ranks))
        exact = {"nonfinite": np.zeros(ranks, dtype=np.int64)}
        for fault in self._job.faults:
            if isinstance(fault, NonFiniteGradient) and step >= fault.at_step:
                bad: list[int] | slice = [fault.rank] if step == fault.at_step else slice(None)
                local[bad], norm, exact["nonfinite"][bad] = np.nan, np.nan, 7
                loss = loss if step == fault.at_step else np.nan
        values: dict[str, Floats] = {
            "loss": np.full(ranks, loss), "grad_norm": np.full(ranks, norm), "local_grad_norm": local,
        }  # fmt: skip
        present = dict.fromkeys([*values, *exact], np.ones(ranks, dtype=np.bool_))
        logs = np.zeros(ranks, dtype=np.bool_)
        logs[0] = step % self._job.log_every == 0
        present |= {"loss": logs, "grad_norm": logs}
        return Frame(attempt, "values", step, StepKind.TRAIN, 0.0, values, present, exact)

    def _loss_of(self, step: int) -> float:
        loss: float = LOSS_END + LOSS_RANGE * (1 + step / LOSS_STEPS) ** -LOSS_POWER
        for fault in self._job.faults:
            if isinstance(fault, LossBurst) and fault.at_step <= step < fault.at_step + fault.steps:
                loss *= fault.factor
            if isinstance(fault, LossDrift) and step >= fault.at_step:
                loss *= (1 + fault.share) ** (step - fault.at_step)
        return loss
