"""Hugging Face Trainer with a tiny GPT-2 from scratch, which it evaluates and saves now and then."""

import os

import torch
from common import Tokens, left
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import rankwatch

STEPS = int(os.environ.get("STEPS", "100"))

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
    eval_strategy="steps",
    eval_steps=40,
    save_steps=40,
    save_total_limit=3,
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=Tokens(4096), eval_dataset=Tokens(64))
rankwatch.hf(trainer)
trainer.train()
left()
