"""Lightning's Trainer with automatic optimization and DDP; rankwatch lives in a callback."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rankwatch

STEPS = 120


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10))

    def training_step(self, batch, batch_index):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 50)]


class Rankwatch(lightning.Callback):
    def on_train_start(self, trainer, module):
        self.watch = rankwatch.start()
        self.watch.torch(module, module.optimizers())

    def on_train_batch_start(self, trainer, module, batch, batch_index):
        self.step = self.watch.step(trainer.global_step)
        self.step.__enter__()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_index):
        self.watch.log(loss=outputs["loss"])
        self.step.__exit__(None, None, None)

    def on_train_end(self, trainer, module):
        self.watch.close()


torch.manual_seed(0)
data = TensorDataset(torch.randn(16384, 64), torch.randint(0, 10, (16384,)))
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=lightning.pytorch.strategies.DDPStrategy(process_group_backend="gloo"),
    max_steps=STEPS,
    gradient_clip_val=1.0,
    callbacks=[Rankwatch()],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Classifier(), DataLoader(data, batch_size=64))
