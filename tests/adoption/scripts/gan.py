"""A GAN as in PyTorch's DCGAN tutorial: two networks, two optimizers, two calls of watch.torch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import rankwatch

STEPS = 150

dist.init_process_group("gloo")
torch.manual_seed(0)


class Generator(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64), nn.Tanh())


class Critic(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Linear(64, 256), nn.LeakyReLU(0.2), nn.Linear(256, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1)
        )


generator, critic = DDP(Generator()), DDP(Critic())
of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
of_critic = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()

watch = rankwatch.start()
watch.torch(generator, of_generator)
watch.torch(critic, of_critic)

noise = torch.Generator().manual_seed(dist.get_rank())
ones, zeros = torch.ones(128, 1), torch.zeros(128, 1)
for _ in watch.steps(STEPS):
    real = torch.randn(128, 64, generator=noise).cumsum(1).tanh()
    z = torch.randn(128, 32, generator=noise)
    of_critic.zero_grad()
    fake = generator(z)
    loss_critic = criterion(critic(real), ones) + criterion(critic(fake.detach()), zeros)
    loss_critic.backward()
    of_critic.step()
    of_generator.zero_grad()
    loss_generator = criterion(critic(fake), ones)
    loss_generator.backward()
    of_generator.step()
    watch.log(loss=loss_generator, loss_critic=loss_critic)
dist.destroy_process_group()
