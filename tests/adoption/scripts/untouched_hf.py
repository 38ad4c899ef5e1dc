"""Hugging Face Trainer with a tiny GPT-2 from scratch; not a line for rankwatch."""

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(Dataset):
    def __len__(self):
        return 8192

    def __getitem__(self, index):
        ids = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))
arguments = TrainingArguments(
    output_dir="out",
    use_cpu=True,
    ddp_backend="gloo",
    max_steps=320,
    per_device_train_batch_size=8,
    learning_rate=5e-4,
    logging_steps=10,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
Trainer(model=model, args=arguments, train_dataset=Tokens()).train()
if torch.distributed.is_initialized():  # else gloo's threads may abort the process as it ends
    torch.distributed.destroy_process_group()
