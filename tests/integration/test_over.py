"""A rollback moves torch's own loaders back: the batches come again as they came, in every epoch, with workers too."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from rankwatch.layout import Directive
from tests.support.ranks.recorders import Rank

pytestmark = [pytest.mark.torch, pytest.mark.integration]

BATCHES = 6


class Augmented(Dataset):
    """Draws from torch's random state for each item, as augmentations do."""

    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(())


def shuffled(workers: int) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(4 * BATCHES)), batch_size=4, shuffle=True, num_workers=workers)


def distributed() -> DataLoader:
    data = TensorDataset(torch.arange(8 * BATCHES))
    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, num_replicas=2, rank=1))


LOADERS = {
    "shuffled": lambda: shuffled(0),
    "shuffled, two workers": lambda: shuffled(2),
    "distributed sampler": distributed,
    "augmented": lambda: DataLoader(Augmented(), batch_size=4, shuffle=True),
}


def values(batch: object) -> list[float]:
    return (batch[0] if isinstance(batch, list) else batch).tolist()


def batches(rank: Rank, loader: DataLoader) -> list[tuple[int, list[float]]]:
    torch.manual_seed(5)
    seen = []
    for step, batch in rank.watch.over(loader, epochs=2):
        torch.rand(3)  # as dropout draws
        seen.append((step, values(batch)))
    return seen


@pytest.mark.parametrize(
    ("taken", "back"), [(4, 2), *(pytest.param(*case, marks=pytest.mark.ci) for case in ((9, 8), (9, 4), (7, 6)))]
)
@pytest.mark.parametrize("loader", LOADERS)
def test_batches_after_a_rollback_are_those_of_an_undisturbed_run(tmp_path, loader, taken, back):
    undisturbed = batches(Rank(tmp_path / "undisturbed"), LOADERS[loader]())
    rank = Rank(tmp_path / "rolled back")
    rank.watch.state(model=torch.nn.Linear(1, 1), keep=16, every=1)
    fields = {"action": "rollback", "step": taken, "checkpoint": f"memory:l.0:{back}", "checkpoint_step": back, "k": 1}
    rank._put(Directive("o", "l.0", "hold", **fields))
    rank.write_after(1, Directive("o", "l.0", "do", **fields, lease_s=120.0))
    rank.write_after(3, Directive("o", "l.0", "go", **fields))
    assert batches(rank, LOADERS[loader]()) == undisturbed[:taken] + undisturbed[back:]
    assert rank.watch.errors == 0
