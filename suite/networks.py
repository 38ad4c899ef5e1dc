"""Loss and gradient norm of small networks trained from scratch: real curves, about a second each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

Batches = Iterator[tuple[Tensor, Tensor]]
Curve = dict[str, NDArray[np.float64]]
"""By metric, a value for each step."""

TOKENS, WINDOW = 64, 32
CLASSES, FEATURES = 10, 16
NORM_MAX = 1.0
"""Norms are clipped to it, as language models' are; what is logged is the norm before."""


class Transformer(nn.Module):
    """A language model of two blocks."""

    def __init__(self, *, norm_first: bool = True, zero_head: bool = False) -> None:
        super().__init__()
        width = 32
        self.embedding = nn.Embedding(TOKENS, width)
        self.places = nn.Parameter(0.02 * torch.randn(WINDOW, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 2 * width, 0.0, batch_first=True, norm_first=norm_first)
            for _ in range(2)
        )
        self.head = nn.Linear(width, TOKENS)
        if zero_head:
            nn.init.zeros_(self.head.weight)
        self.register_buffer("mask", torch.triu(torch.full((WINDOW, WINDOW), -math.inf), 1))

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next token at each place."""
        hidden = self.embedding(tokens) + self.places
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.mask)
        scores: Tensor = self.head(hidden)
        return scores


class Recurrent(nn.Module):
    """A language model of one LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(TOKENS, 24), nn.Linear(48, TOKENS)
        self.cells = nn.LSTM(24, 48, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next token at each place."""
        scores: Tensor = self.head(self.cells(self.embedding(tokens))[0])
        return scores


class Residual(nn.Module):
    """Six residual layers without normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 32), nn.Linear(32, CLASSES)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, features: Tensor) -> Tensor:
        """Scores of the classes."""
        hidden = self.first(features)
        for layer in self.layers:
            hidden = hidden + torch.relu(layer(hidden))
        scores: Tensor = self.last(hidden)
        return scores


def perceptron(
    depth: int, activation: type[nn.Module], *, outputs: int = CLASSES, normalized: bool = False
) -> nn.Module:
    """Some layers of 48."""
    layers: list[nn.Module] = []
    for number in range(depth):
        layers.append(nn.Linear(48 if number else FEATURES, 48))
        layers += [nn.BatchNorm1d(48)] if normalized else []
        layers.append(activation())
    return nn.Sequential(*layers, nn.Linear(48, outputs))


def convolutions(*, normalized: bool) -> nn.Module:
    """Two convolutions over images of 8 x 8."""
    middle: list[nn.Module] = [nn.BatchNorm2d(16)] if normalized else []
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), *middle, nn.ReLU(),
        nn.Flatten(), nn.Linear(256, CLASSES),
    )  # fmt: skip


def autoencoder() -> nn.Module:
    """64 numbers through 8 and back."""
    return nn.Sequential(
        nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 64)
    )


def labelled(random: torch.Generator) -> Batches:
    """Features and their class, with noise."""
    weights = torch.randn(FEATURES, CLASSES, generator=random)
    while True:
        features = torch.randn(32, FEATURES, generator=random)
        yield features, (features @ weights + torch.randn(32, CLASSES, generator=random)).argmax(1)


def measured(random: torch.Generator) -> Batches:
    """Features and a number that depends on them."""
    weights = torch.randn(FEATURES, 1, generator=random)
    while True:
        features = torch.randn(32, FEATURES, generator=random)
        yield features, torch.sin(features @ weights) + 0.1 * torch.randn(32, 1, generator=random)


def images(random: torch.Generator) -> Batches:
    """One faint picture for each class."""
    pictures = 0.4 * torch.randn(CLASSES, 1, 8, 8, generator=random)
    while True:
        classes = torch.randint(CLASSES, (32,), generator=random)
        yield pictures[classes] + torch.randn(32, 1, 8, 8, generator=random), classes


def vectors(random: torch.Generator) -> Batches:
    """64 numbers that depend on 8, to be reconstructed."""
    basis = torch.randn(8, 64, generator=random)
    while True:
        numbers = torch.tanh(torch.randn(32, 8, generator=random) @ basis)
        numbers += 0.05 * torch.randn(32, 64, generator=random)
        yield numbers, numbers


def texts(random: torch.Generator) -> Batches:
    """Windows of a text in which each token depends on the one before."""
    odds = torch.softmax(2.5 * torch.randn(TOKENS, TOKENS, generator=random), 1)
    # For each token a long list of successors, so that the text is a walk and not one draw after the other.
    successors = torch.multinomial(odds, 512, replacement=True, generator=random).tolist()
    picks, text = torch.randint(512, (20_000,), generator=random).tolist(), [0]
    for pick in picks:
        text.append(successors[text[-1]][pick])
    tokens = torch.tensor(text)
    while True:
        places = torch.randint(len(text) - WINDOW - 1, (8, 1), generator=random) + torch.arange(WINDOW + 1)
        yield tokens[places[:, :-1]], tokens[places[:, 1:]]


@dataclass(frozen=True)
class Network:
    """A network and its task."""

    build: Callable[[], nn.Module]
    batches: Callable[[torch.Generator], Batches]
    numbers: bool = False
    """A regression; otherwise a classification."""


NETWORKS = {
    "perceptron": Network(lambda: perceptron(3, nn.ReLU), labelled),
    "normalized perceptron": Network(lambda: perceptron(4, nn.ReLU, normalized=True), labelled),
    "deep tanh perceptron": Network(lambda: perceptron(6, nn.Tanh), labelled),
    "residual perceptron": Network(Residual, labelled),
    "regression": Network(lambda: perceptron(3, nn.ReLU, outputs=1), measured, numbers=True),
    "convolutions": Network(lambda: convolutions(normalized=False), images),
    "normalized convolutions": Network(lambda: convolutions(normalized=True), images),
    "autoencoder": Network(autoencoder, vectors, numbers=True),
    "recurrent": Network(Recurrent, texts),
    "transformer": Network(Transformer, texts),
    "transformer, norm last": Network(lambda: Transformer(norm_first=False), texts),
    "transformer, head of zeros": Network(lambda: Transformer(zero_head=True), texts),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda network: torch.optim.SGD(network.parameters(), 0.1),
    "SGD with momentum": lambda network: torch.optim.SGD(network.parameters(), 0.05, momentum=0.9),
    "AdamW": lambda network: torch.optim.AdamW(network.parameters(), 3e-3),
}


def trained(name: str, optimizer_name: str, *, warm_up: int, seed: int, steps: int) -> Curve:
    """The curves that a network logs from its first step; `warm_up` 0 begins with the full learning rate."""
    torch.manual_seed(seed)
    made = NETWORKS[name]
    network = made.build()
    optimizer = OPTIMIZERS[optimizer_name](network)
    full = float(optimizer.param_groups[0]["lr"])
    batches = made.batches(torch.Generator().manual_seed(seed))
    curve: Curve = {metric: np.zeros(steps) for metric in ("loss", "grad_norm", "lr")}
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate = full * min(1.0, (step + 1) / warm_up) if warm_up else full
        given, wanted = next(batches)
        answer = network(given)
        if made.numbers:
            loss = functional.mse_loss(answer, wanted)
        else:
            loss = functional.cross_entropy(answer.flatten(0, -2), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        curve["grad_norm"][step] = nn.utils.clip_grad_norm_(network.parameters(), NORM_MAX).item()
        optimizer.step()
        curve["loss"][step], curve["lr"][step] = loss.item(), rate
    return curve


def adversaries(optimizer_name: str, *, seed: int, steps: int) -> Curve:
    """A generator against a discriminator: the loss and the norm of the generator, which never settle."""
    torch.manual_seed(seed)
    generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    optimizers = [
        torch.optim.Adam(network.parameters(), 1e-3, betas=(0.5, 0.9))
        if optimizer_name == "Adam"
        else torch.optim.SGD(network.parameters(), 0.05)
        for network in (generator, critic)
    ]
    curve: Curve = {metric: np.zeros(steps) for metric in ("loss", "grad_norm")}
    for step in range(steps):
        angle = 2 * math.pi * torch.rand(64)
        real = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(64, 2)
        made = generator(torch.randn(64, 8))
        critic_loss = functional.softplus(-critic(real)).mean() + functional.softplus(critic(made.detach())).mean()
        optimizers[1].zero_grad()
        critic_loss.backward()  # type: ignore[no-untyped-call]
        optimizers[1].step()
        loss = functional.softplus(-critic(made)).mean()
        optimizers[0].zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in generator.parameters() if p.grad is not None]
        curve["grad_norm"][step] = nn.utils.get_total_norm(gradients).item()
        optimizers[0].step()
        curve["loss"][step] = loss.item()
    return curve
