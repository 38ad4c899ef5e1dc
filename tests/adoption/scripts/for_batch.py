"""`for batch in loader`, epoch by epoch, an evaluation and a save after each; no label on anything."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import rankwatch

EPOCHS = 3

dist.init_process_group("gloo")
torch.manual_seed(0)
train = TensorDataset(torch.randn(2560, 64), torch.randint(0, 10, (2560,)))
test_x, test_y = torch.randn(8192, 64), torch.randint(0, 10, (8192,))
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=32, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(64, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 10)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

watch = rankwatch.start()
watch.torch(model, optimizer)

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for x, y in loader:
        with watch.step():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            watch.log(loss=loss)
    with torch.no_grad():
        for _ in range(10):
            accuracy = (model.module(test_x).argmax(1) == test_y).float().mean()
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), "epoch.pt")
        print(f"epoch {epoch}: accuracy {accuracy:.3f}", flush=True)
    dist.barrier()
watch.close()
dist.destroy_process_group()
