"""A trainer as torchtitan has it: FSDP2 on a mesh, a job config, accumulation, DCP checkpoints to go back to."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rankwatch


@dataclass
class JobConfig:
    steps: int = int(os.environ.get("STEPS", "120"))
    dump_folder: Path = Path("out")
    checkpoint_interval: int = 40
    validation_interval: int = 40
    gradient_accumulation_steps: int = 2
    max_norm: float = 1.0
    lr: float = 1e-3
    warmup_steps: int = 10
    batch_size: int = 8
    sequence_length: int = 32
    model: dict = field(default_factory=lambda: {"vocabulary": 128, "width": 64, "layers": 2})


class Transformer(nn.Module):
    def __init__(self, vocabulary, width, layers):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.output = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        hidden = self.tok_embeddings(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.output(hidden)


class Loader:
    """Batches of this rank; knows its place."""

    def __init__(self, config, rank):
        self.config, self.generator = config, torch.Generator().manual_seed(rank)

    def __next__(self):
        shape = self.config.batch_size, self.config.sequence_length + 1
        return torch.randint(0, self.config.model["vocabulary"], shape, generator=self.generator)

    def state_dict(self):
        return {f"rank-{dist.get_rank()}": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state[f"rank-{dist.get_rank()}"])


class Trainer:
    def __init__(self, config):
        self.config, self.step = config, 0
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
        torch.manual_seed(0)
        self.model = Transformer(**config.model)
        for layer in self.model.layers:
            fully_shard(layer, mesh=self.mesh)
        fully_shard(self.model, mesh=self.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr)
        warmup = config.warmup_steps
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda done: min(1.0, (done + 1) / warmup))
        self.loader = Loader(config, dist.get_rank())

        self.watch = rankwatch.start()
        self.watch.torch(self.model, self.optimizer)
        self.watch.on_checkpoint(self.save)
        self.watch.on_rollback(self.load)

    def state(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        others = {"scheduler": self.scheduler.state_dict(), "loader": self.loader.state_dict(), "step": self.step}
        return {"model": model, "optimizer": optimizer, **others}

    def save(self, step):
        folder = self.config.dump_folder.absolute() / f"step-{step}"
        dcp.save(self.state(), checkpoint_id=folder)
        assert (folder / ".metadata").exists()  # written last: the checkpoint is whole
        return str(folder)

    def load(self, checkpoint):
        state = self.state()
        dcp.load(state, checkpoint_id=checkpoint.location)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.loader.load_state_dict(state["loader"])
        self.step = state["step"]
        print(f"goes on from {checkpoint.location}", flush=True)
        return self.step

    def loss_of(self, tokens):
        return nn.functional.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def train_step(self):
        self.optimizer.zero_grad()
        losses = []
        for micro in range(self.config.gradient_accumulation_steps):
            with self.watch.phase("data_wait"):
                tokens = next(self.loader)
            self.model.set_requires_gradient_sync(micro == self.config.gradient_accumulation_steps - 1)
            loss = self.loss_of(tokens) / self.config.gradient_accumulation_steps
            loss.backward()
            losses.append(loss.detach())
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_norm)
        self.optimizer.step()
        self.scheduler.step()
        rate = self.scheduler.get_last_lr()[0]
        self.watch.log(loss=torch.stack(losses).sum(), grad_norm=norm.full_tensor(), lr=rate, tokens=tokens.numel())

    def validate(self):
        self.model.eval()
        with self.watch.pause("eval"), torch.no_grad():
            self.loss_of(torch.zeros(self.config.batch_size, self.config.sequence_length + 1, dtype=torch.long))
        self.model.train()

    def train(self):
        if (checkpoint := self.watch.resume) is not None:
            self.load(checkpoint)
            self.watch.checkpoint_loaded(checkpoint)
        while self.step < self.config.steps and not self.watch.should_stop:
            with self.watch.step(self.step):
                self.train_step()
            self.step += 1
            if self.step % self.config.validation_interval == 0:
                self.validate()
            if self.step % self.config.checkpoint_interval == 0:
                with self.watch.pause("checkpoint_save"):
                    location = self.save(self.step)
                self.watch.checkpoint_saved(self.step, location)


dist.init_process_group("gloo")
Trainer(JobConfig()).train()
dist.destroy_process_group()
