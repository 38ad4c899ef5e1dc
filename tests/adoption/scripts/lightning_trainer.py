"""Lightning's Trainer with automatic optimization and DDP, which validates and saves now and then."""

import os

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rankwatch

STEPS = int(os.environ.get("STEPS", "120"))


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10))

    def training_step(self, batch, batch_index):
        loss = self.loss_of(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_index):
        self.log("val_loss", self.loss_of(batch))

    def loss_of(self, batch):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 50)]


torch.manual_seed(0)
data = TensorDataset(torch.randn(16384, 64), torch.randint(0, 10, (16384,)))
held_out = TensorDataset(torch.randn(512, 64), torch.randint(0, 10, (512,)))
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=lightning.pytorch.strategies.DDPStrategy(process_group_backend="gloo"),
    max_steps=STEPS,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    val_check_interval=80,
    callbacks=[lightning.pytorch.callbacks.ModelCheckpoint(dirpath="out", every_n_train_steps=40, save_top_k=-1)],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
rankwatch.lightning(trainer)
trainer.fit(Classifier(), DataLoader(data, batch_size=32), DataLoader(held_out, batch_size=64))
