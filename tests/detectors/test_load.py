"""What a replica's ranks have in common in one step is their load, and how that was learned outlives a relaunch."""

import numpy as np
import pytest

from rankwatch_detectors.base import Frame, StepKind
from rankwatch_detectors.pace.load import LoadConfig, LoadModel
from rankwatch_detectors.statistics.peers import PeerGroups

REPLICAS, RANKS_EACH = 16, 4
REPLICA = np.arange(REPLICAS * RANKS_EACH) // RANKS_EACH
FRAME = Frame("steps", "l.0", 0, StepKind.TRAIN, 0.0, {}, {}, {})


def row(seed: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Residuals of one step: loads that differ by a tenth, and two hundredths of noise."""
    random = np.random.default_rng(seed)
    return 0.1 * random.standard_normal(REPLICAS)[REPLICA] + 0.02 * random.standard_normal(REPLICA.size)


def explained(model: LoadModel, residual: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    """Share of a step's variance that its loads explain."""
    usable = np.ones(residual.size, dtype=bool)
    left = model.unexplained(FRAME, residual, usable, PeerGroups(), np.full(residual.size, 0.02))
    return 1.0 - float(left.var() / residual.var())


@pytest.mark.parametrize(("replica", "known"), [(REPLICA, True), (REPLICA[::-1] // 2, False)], ids=["same", "others"])
def test_a_relaunch_with_the_same_replicas_knows_their_loads_from_its_first_step(replica, known):
    model = LoadModel(LoadConfig())
    model.regroup(REPLICA)
    for seed in range(30):
        share = explained(model, row(seed))
    assert share > 0.9
    model.regroup(replica)
    assert (explained(model, row(99)) > 0.9) == known
