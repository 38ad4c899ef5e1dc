"""DeepSpeed with ZeRO 1 on CPUs: the engine accumulates, clips, reduces and steps. The loop saves, and can go on."""

import os

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import rankwatch

STEPS = int(os.environ.get("STEPS", "120"))
CONFIG = {
    "train_micro_batch_size_per_gpu": 32,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20}},
    "zero_optimization": {"stage": int(os.environ.get("STAGE", "1"))},
    "zero_force_ds_cpu_optimizer": False,
}

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo reduces, so that nothing is compiled
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(16384, 64), torch.randint(0, 10, (16384,)))
model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10))
engine, optimizer, loader, scheduler = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), training_data=data, config=CONFIG
)
watch = rankwatch.deepspeed(engine)

if watch.resume:
    engine.load_checkpoint("out")


def train():
    while True:
        for x, y in loader:
            loss = nn.functional.cross_entropy(engine(x), y)
            engine.backward(loss)
            updates = engine.is_gradient_accumulation_boundary()
            engine.step()
            if updates and engine.global_steps % 40 == 0:
                engine.save_checkpoint("out")
            if watch.should_stop or engine.global_steps >= STEPS:
                return


train()
dist.destroy_process_group()
