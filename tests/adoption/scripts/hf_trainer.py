"""Hugging Face Trainer with a tiny GPT-2 from scratch; rankwatch lives in a callback."""

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import rankwatch

STEPS = 100


class Tokens(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, 256, (32,), generator=generator)
        return {"input_ids": ids, "labels": ids}


class Rankwatch(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.watch = rankwatch.start()
        self.watch.torch(model, optimizer)

    def on_step_begin(self, args, state, control, **kwargs):
        self.step = self.watch.step(state.global_step)
        self.step.__enter__()

    def on_step_end(self, args, state, control, **kwargs):
        self.step.__exit__(None, None, None)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.watch.log(loss=float(logs["loss"]))

    def on_train_end(self, args, state, control, **kwargs):
        self.watch.close()


torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2))
arguments = TrainingArguments(
    output_dir="out",
    use_cpu=True,
    ddp_backend="gloo",
    max_steps=STEPS,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    learning_rate=5e-4,
    warmup_steps=10,
    logging_steps=10,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
Trainer(model=model, args=arguments, train_dataset=Tokens(), callbacks=[Rankwatch()]).train()
if torch.distributed.is_initialized():  # else gloo's threads may abort the process as it ends
    torch.distributed.destroy_process_group()
