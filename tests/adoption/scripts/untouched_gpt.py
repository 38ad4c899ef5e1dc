"""A small GPT as in nanoGPT's train.py, under DDP; not a line for rankwatch."""

import contextlib
import math
import os
import time

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

max_iters, eval_interval, log_interval, gradient_accumulation_steps = 320, 100, 10, 2
batch_size, block_size, vocab_size, n_embd = 8, 16, 64, 32
learning_rate, warmup_iters, grad_clip = 1e-3, 20, 1.0

ddp = "RANK" in os.environ
if ddp:
    init_process_group("gloo")
rank = int(os.environ.get("RANK", "0"))
torch.manual_seed(1337 + rank)
text = torch.arange(20_000).remainder(37)


def get_batch():
    ix = torch.randint(len(text) - block_size, (batch_size,))
    return torch.stack([text[i : i + block_size] for i in ix]), torch.stack(
        [text[i + 1 : i + 1 + block_size] for i in ix]
    )


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.TransformerEncoder(nn.TransformerEncoderLayer(n_embd, 2, 64, 0.0, batch_first=True), 2)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        mask = nn.Transformer.generate_square_subsequent_mask(idx.size(1))
        logits = self.lm_head(self.h(x, mask=mask, is_causal=True))
        return logits, F.cross_entropy(logits.view(-1, vocab_size), targets.view(-1))


torch.manual_seed(1337)
raw_model = GPT()
model = DDP(raw_model) if ddp else raw_model
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)


@torch.no_grad()
def estimate_loss():
    model.eval()
    loss = sum(raw_model(*get_batch())[1].item() for _ in range(10)) / 10
    model.train()
    return loss


def get_lr(it):
    return learning_rate * min(1.0, (it + 1) / warmup_iters) * (0.55 + 0.45 * math.cos(math.pi * it / max_iters))


t0 = time.time()
for iter_num in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0 and rank == 0:
        print(f"step {iter_num}: val loss {estimate_loss():.4f}", flush=True)
    for micro_step in range(gradient_accumulation_steps):
        last = micro_step == gradient_accumulation_steps - 1
        with contextlib.nullcontext() if last or not ddp else model.no_sync():
            _, loss = model(*get_batch())
            loss = loss / gradient_accumulation_steps
            loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % log_interval == 0 and rank == 0:
        lossf = loss.item() * gradient_accumulation_steps
        print(f"iter {iter_num}: loss {lossf:.4f}, time {(time.time() - t0) * 1000:.2f}ms", flush=True)
    t0 = time.time()
if ddp:
    destroy_process_group()
