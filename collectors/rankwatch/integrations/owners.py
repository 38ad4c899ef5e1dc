"""Finds the modules that an optimizer trains, in a process whose script was not asked for them."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch


def parameter_ids(optimizer: torch.optim.Optimizer) -> set[int]:
    """The ids of an optimizer's parameters."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def models_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Module]:
    """The outermost modules that hold the parameters of an optimizer, wrappers included; empty if none is known.

    A few modules that together hold all the parameters, those with the most parameters first: a copy of a part, such as
    a `Sequential` over some layers, adds nothing. Looks at each object of the garbage collector once.
    """
    missing = parameter_ids(optimizer)
    modules = [found for found in gc.get_objects() if issubclass(type(found), torch.nn.Module)]
    holders = [
        module
        for module in modules
        if any(id(parameter) in missing for parameter in module.__dict__.get("_parameters", {}).values())
    ]
    roots = _outermost(holders, modules)
    held = {id(root): {id(parameter) for parameter in root.parameters()} & missing for root in roots}
    chosen = []
    for root in sorted(roots, key=lambda root: len(held[id(root)]), reverse=True):
        if held[id(root)] & missing:
            chosen.append(root)
            missing -= held[id(root)]
    return chosen


def _outermost(modules: Iterable[torch.nn.Module], known: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """The modules that contain these and are contained in no other."""
    parents: dict[int, list[torch.nn.Module]] = {}
    for module in known:
        for child in module.__dict__.get("_modules", {}).values():
            if child is not None:
                parents.setdefault(id(child), []).append(module)
    roots: dict[int, torch.nn.Module] = {}
    seen: set[int] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        above = parents.get(id(module), [])
        waiting += above
        if not above:
            roots[id(module)] = module
    return list(roots.values())
