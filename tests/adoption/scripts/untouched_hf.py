"""Hugging Face Trainer with a tiny GPT-2 from scratch; not a line for rankwatch."""

import torch
from common import Tokens, left
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

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
Trainer(model=model, args=arguments, train_dataset=Tokens(8192, 16, 64)).train()
left()
