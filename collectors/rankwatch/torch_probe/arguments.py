"""Arguments of `watch.torch`: models and optimizers; one, a list, or a dict of them; with or without wrappers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Optimizer = torch.optim.Optimizer


class Scaler(Protocol):
    """The part of torch.amp.GradScaler that the probe uses."""

    def scale(self, outputs: torch.Tensor) -> torch.Tensor:
        """Multiply by the loss scale."""

    def is_enabled(self) -> bool:
        """Whether it scales at all."""


@dataclass(frozen=True)
class Handed:
    """The arguments of one call of `watch.torch`."""

    models: tuple[tuple[str, torch.nn.Module], ...]
    """Each with its name; "" if it has none."""
    optimizers: tuple[Optimizer, ...]
    scaler: Scaler | None
    replicated: bool | None

    @classmethod
    def of(cls, model: Any, optimizer: Any, scaler: Scaler | None, replicated: bool | None) -> Handed:
        """Parse the arguments.

        Raises:
            TypeError: an argument is not a model or not an optimizer.
        """
        models, optimizers = _named(model), tuple(_unwrapped(one) for _, one in _named(optimizer))
        wrong = [one for _, one in models if not isinstance(one, torch.nn.Module)]
        if wrong or not models:
            raise TypeError(
                f"watch.torch: the model must be a torch.nn.Module, or a list or dict of them, not {_kind(wrong)}"
            )
        wrong = [one for one in optimizers if not isinstance(one, Optimizer)]
        if wrong or not optimizers:
            raise TypeError(
                "watch.torch: the optimizer must be a torch.optim.Optimizer, or a list or dict of them, "
                f"not {_kind(wrong)}"
            )
        return cls(models, optimizers, scaler, replicated)

    def without(self, later: Handed) -> Handed:
        """The models and optimizers that a later call did not pass again."""
        models = tuple(pair for pair in self.models if all(pair[1] is not model for _, model in later.models))
        optimizers = tuple(one for one in self.optimizers if all(one is not other for other in later.optimizers))
        return Handed(models, optimizers, self.scaler, self.replicated)


def check_parts(fingerprint_every: int, on_nonfinite: str, overhead_max: float) -> None:
    """Check what is to be measured.

    Raises:
        ValueError: a number is out of range, or a word is not known.
    """
    if not overhead_max > 0:
        raise ValueError(f"overhead_max must be more than 0, not {overhead_max}")
    if fingerprint_every < 0:
        raise ValueError(f"fingerprint_every must be 0 or more, not {fingerprint_every}")
    if on_nonfinite not in ("record", "skip"):
        raise ValueError(f'on_nonfinite must be "record" or "skip", not {on_nonfinite!r}')


def check_skip(*, divided: bool, grad_norm: bool) -> None:
    """Check that all ranks of a job with `on_nonfinite="skip"` decide alike.

    Args:
        divided: a rank knows only the gradients of a part of the model.
        grad_norm: it is to decide by the norm that it measures.

    Raises:
        ValueError: they would not, or there is no norm to decide by.
    """
    if divided and grad_norm:
        raise ValueError(
            'on_nonfinite="skip": each rank has gradients of a part of this model alone: ranks would not decide alike. '
            "Pass grad_norm=False, and log the norm of the whole as grad_norm before the optimizer steps"
        )
    if not divided and not grad_norm:
        raise ValueError('on_nonfinite="skip" decides by the total gradient norm: leave grad_norm on')


def _named(given: Any) -> tuple[tuple[str, Any], ...]:
    if isinstance(given, torch.nn.Module | Optimizer):  # first, because a ModuleList is a module and iterable
        return (("", given),)
    if isinstance(given, Mapping):
        return tuple((str(name), one) for name, one in given.items())
    if isinstance(given, Iterable) and not isinstance(given, str):
        return tuple(("", one) for one in given)
    return (("", given),)


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer that makes the updates: frameworks return wrappers whose own hooks never run."""
    seen: list[Any] = []
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer) and inner not in seen:
        seen.append(optimizer)
        optimizer = inner
    return optimizer


def _kind(wrong: Sequence[Any]) -> str:
    return type(wrong[0]).__name__ if wrong else "nothing"
