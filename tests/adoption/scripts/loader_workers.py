"""A DataLoader with worker processes that prepare images, over which rankwatch iterates."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import rankwatch

EPOCHS = 4


class Images(Dataset):
    def __len__(self):
        return 832  # 26 batches for each of two ranks

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 24, 24, generator=generator), index % 10


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = Images()
    loader = DataLoader(
        data, batch_size=16, sampler=DistributedSampler(data), num_workers=2, persistent_workers=True, prefetch_factor=4
    )
    model = DDP(
        nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    watch = rankwatch.start()
    watch.torch(model, optimizer)
    for _, (x, y) in watch.over(loader, epochs=EPOCHS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        watch.log(loss=loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
