"""A small GPT over bytes, and its training text: the language reference that every Python installation includes.

Equal seeds give equal training: the batch of a step depends only on (seed, rank, step), so an iterator can be rebuilt
at any position.
"""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256
CONTEXT = 64
WIDTH = 128
HEADS = 4
LAYERS = 3
BATCH = 8


class TransformerBlock(nn.Module):
    """One transformer block: causal attention, then a feed-forward layer, each with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.attended = nn.Linear(WIDTH, WIDTH)
        self.before_forward = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Transform activations of shape (batch, position, width)."""
        batch, length, _ = x.shape
        heads = self.query_key_value(self.before_attention(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attention = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attended(attention.transpose(1, 2).reshape(batch, length, WIDTH))
        forward: Tensor = self.narrow(functional.gelu(self.widen(self.before_forward(x))))
        return x + forward


class GPT(nn.Module):
    """Predicts the next byte at every position."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.blocks = nn.Sequential(*(TransformerBlock() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (batch, position, vocabulary) for tokens of shape (batch, position)."""
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def corpus() -> Tensor:
    """The help texts of Python's own language reference (about 700 KB) as one row of bytes."""
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def batches(text: Tensor, seed: int, rank: int, start_step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (inputs, targets) for `start_step` and every later step; each rank gets different text."""
    step = start_step
    generator = torch.Generator()
    while True:
        generator.manual_seed((seed * 1_000_003 + rank) * 1_000_003 + step)
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=generator)
        rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()]).long()
        yield rows[:, :-1], rows[:, 1:]
        step += 1


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats per byte."""
    return functional.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1))


def weights_sum(model: nn.Module) -> int:
    """Sum the bits of all parameters as 32-bit words: equal on equal replicas."""
    return sum(int(parameter.detach().view(torch.int32).sum(dtype=torch.int64)) for parameter in model.parameters())
