"""Measures models whose parameters are divided over ranks, without a collective: each rank measures its own slices.

The service adds the norms of slices up to that of the whole, each different slice once, and compares the fingerprints
of ranks that hold the same one. Gradients before the reduction are seen where autograd computes them: FSDP reduces the
gradients of whole parameters, which are other tensors than those that the model shows outside of its forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from rankwatch.torch_probe.fingerprint import bit_sum, fingerprint
from rankwatch.torch_probe.gradients import Scalar, norms, stacked
from rankwatch.torch_probe.topology import (
    Division,
    ddp_division,
    divided,
    divided_axes,
    division_of,
    group_division,
    mesh_size,
    slices_of,
)
from rankwatch.torch_probe.watched_model import (
    Flat,
    WatchedModel,
    WatchedModels,
    divided_by,
    flats,
    managed,
    own_part,
    whole_of,
)

_FLAT_NAME = "_flat_param"


class ShardedModels:
    """The watched models as slices. An index below `len(models.parameters)` is that of a parameter."""

    def __init__(self, models: WatchedModels, stage: int) -> None:
        """Find out how the parameters are divided.

        Args:
            models: the watched models, at least one of them with divided parameters.
            stage: index of this rank's pipeline stage.
        """
        self._models = models
        self._flats = [flat for model in models.each for flat in flats(model.bare)]
        self._index = {id(parameter): index for index, parameter in enumerate(models.parameters)}
        self._managed = {id(divided_by(record)): record for model in models.each for record in managed(model.bare)}
        self._awaited = [(self._index[own], record) for own, record in self._managed.items() if own in self._index]
        self.names = list(models.names)
        """Names of the parameters, and then those of the original ones within flat parameters."""
        self.owned: list[torch.Tensor] = list(models.parameters)
        """The parameter that an optimizer knows, for each name."""
        self._parts_of = [self._named(flat) for flat in self._flats]
        divisions = self._divisions()
        self._reduced = self._all_reduced(divisions)
        self.slices = slices_of(
            [(name, shape, way) for name, (shape, way) in zip(models.names, divisions, strict=True)], stage
        )
        self.unmeasured = "" if self.slices is not None else "parameters are divided in too many ways"
        """Why norms of slices are not known, as of the newest gradients; empty if they are."""
        self._slice_of = {
            id(models.parameters[index]): number
            for number, one in enumerate(self.slices or ())
            for index in one.members
        }

    def _named(self, flat: Flat) -> list[int]:
        """The index of the name of each original parameter of a flat one."""
        if flat.originals:
            return [self._index.get(id(original), -1) for original in flat.originals]
        prefix = self.names[self._index[id(flat.tensor)]].removesuffix(_FLAT_NAME)
        first = len(self.names)
        self.names += [prefix + name for name in flat.names]
        self.owned += [flat.tensor] * len(flat.names)
        return list(range(first, len(self.names)))

    def _divisions(self) -> list[tuple[tuple[int, ...], Division | None]]:
        """The shape of each whole parameter, and how it is divided."""
        of_flat: dict[int, tuple[tuple[int, ...], Division | None]] = {}
        for flat in self._flats:
            division = group_division(flat.group, flat.replicas, divides=flat.divides)
            of_flat[id(flat.tensor)] = (flat.sizes, division)
            for original, shape in zip(flat.originals, flat.shapes, strict=False):
                of_flat[id(original)] = (shape, division)
        found = []
        for model, parameter in self._of_models():
            if divided(parameter):
                found.append((tuple(parameter.shape), division_of(parameter)))
            else:
                found.append(of_flat.get(id(parameter)) or (tuple(parameter.shape), ddp_division(model)))
        return found

    def _of_models(self) -> Iterator[tuple[WatchedModel, torch.nn.Parameter]]:
        known: set[int] = set()
        for model in self._models.each:
            for _, parameter in model.named:
                if id(parameter) not in known:
                    known.add(id(parameter))
                    yield model, parameter

    def _all_reduced(self, divisions: Sequence[tuple[tuple[int, ...], Division | None]]) -> bool:
        """Whether backward ends with all reductions there are: by FSDP, DDP, or none if one mesh has all ranks."""
        world_size = torch.distributed.get_world_size()
        pending, spans = False, False
        for (model, parameter), (_, division) in zip(self._of_models(), divisions, strict=True):
            by_fsdp = id(parameter) in self._managed or (division is not None and division.way[0] == "group")
            if not by_fsdp:
                spans |= divided(parameter) and mesh_size(parameter) == world_size
                pending |= model.ddp is None
        return spans or not pending

    @property
    def is_whole_after_backward(self) -> bool:
        """Whether all gradients are reduced when backward ends, before the loop clips them."""
        return self._reduced

    # ---- gradients before the reduction ------------------------------------------------------------------------------

    def leaves(self) -> list[tuple[int, torch.Tensor]]:
        """The tensors whose gradients autograd accumulates, each with an index for `parts`, but for those of FSDP2."""
        elsewhere = {id(tensor) for flat in self._flats for tensor in (flat.tensor, *flat.originals)}.union(
            self._managed
        )
        plain = [(index, one) for index, one in enumerate(self._models.parameters) if id(one) not in elsewhere]
        return [*plain, *((-1 - number, flat.tensor) for number, flat in enumerate(self._flats))]

    def gathered(self) -> list[tuple[int, torch.Tensor]]:
        """Those of FSDP2, which forwards create; each is returned once."""
        if not self._awaited:
            return []
        found = [(index, whole) for index, record in self._awaited if (whole := whole_of(record)) is not None]
        self._awaited = [one for one in self._awaited if whole_of(one[1]) is None]
        return found

    def parts(self, index: int, gradient: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """The gradients of original parameters in the gradient of a leaf, each with the index of its name."""
        if index >= 0:
            yield index, own_part(gradient)
            return
        flat, names = self._flats[-1 - index], iter(self._parts_of[-1 - index])
        if sum(flat.sizes) != gradient.numel():
            return
        for part, is_padding in zip(torch.split(gradient.flatten(), list(flat.sizes)), flat.is_padding, strict=True):
            if not is_padding and (name := next(names)) >= 0:
                yield name, part

    # ---- values ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def norms(self, parameters: Iterable[torch.Tensor], *, on_host: bool) -> dict[str, Scalar] | None:
        """The norm of each slice of the gradients of some parameters, by metric; 0 for one without any.

        Returns:
            None if it cannot be known: there are no gradients, or some are not what their parameters' division says,
            such as sums that are not reduced yet (`Partial`).
        """
        if self.slices is None:
            return None
        self.unmeasured = ""
        held: list[torch.Tensor] = []
        numbers: list[int] = []
        any_gradient = False
        for parameter in parameters:
            gradient = parameter.grad
            number = self._slice_of.get(id(parameter))
            if gradient is None:
                any_gradient |= own_part(parameter).numel() == 0  # FSDP1 gives none to a rank that has no part of it
                continue
            any_gradient = True
            if number is None:
                continue
            if divided(parameter):
                if not divided(gradient) or not _divided_alike(gradient, parameter):
                    self.unmeasured = "gradients are Partial, or divided otherwise than their parameters"
                    return None
                gradient = own_part(gradient)
            if gradient.layout is not torch.strided:
                self.unmeasured = "gradients are sparse"
                return None
            if gradient.numel():
                held.append(gradient)
                numbers.append(number)
        if not any_gradient:
            return None
        parts: list[list[torch.Tensor]] = [[] for _ in self.slices]
        for number, norm in zip(numbers, norms(held) if held else (), strict=True):
            parts[number].append(norm)
        return {f"grad_norm.{number}": _together(own, on_host) for number, own in enumerate(parts)}

    @torch.no_grad()
    def fingerprints(self) -> dict[str, Scalar]:
        """The fingerprint of each slice that other ranks hold too, by metric."""
        found: dict[str, Scalar] = {}
        for number, one in enumerate(self.slices or ()):
            if one.replica_of >= 0:
                total = bit_sum([own_part(self._models.parameters[index]) for index in one.members])
                if total is not None:
                    found[f"fingerprint.{number}"] = total
        return found

    def shared_fingerprint(self) -> int:
        """One fingerprint of all slices that other ranks hold too; waits for their device."""
        shared = [one for one in self.slices or () if one.replica_of >= 0]
        return fingerprint(own_part(self._models.parameters[index]) for one in shared for index in one.members)

    # ---- what is said of them ----------------------------------------------------------------------------------------

    def declaration(self) -> dict[str, Any]:
        """Fields of the identity block."""
        reported = None if self.slices is None else [[one.content, one.replica_of] for one in self.slices]
        return {"parameters": self.names, "slices": reported}

    @property
    def compared(self) -> int:
        """How many parameters another rank holds the same part of."""
        return sum(len(one.members) for one in self.slices or () if one.replica_of >= 0)


def sharded_models(models: WatchedModels, stage: int, failed: Callable[[Exception], None]) -> ShardedModels | None:
    """Group the models' parameters into slices; None if no parameter is divided."""
    if not models.sharded:
        return None
    try:
        return ShardedModels(models, stage)
    except Exception as error:  # noqa: BLE001 -- private names of a torch that is not known
        failed(error)
        return None


def _divided_alike(gradient: Any, parameter: Any) -> bool:
    """Whether a gradient has the division of its parameter, and no axis over which it is still to be summed."""
    if gradient.placements == parameter.placements:
        return not any(placement.is_partial() for placement in gradient.placements)
    return (
        gradient.device_mesh == parameter.device_mesh
        and not any(placement.is_partial() for placement in gradient.placements)
        and divided_axes(gradient) == divided_axes(parameter)
    )


def _together(parts: list[torch.Tensor], on_host: bool) -> Scalar:
    if not parts:
        return 0.0
    return math.hypot(*(part.item() for part in parts)) if on_host else torch.linalg.vector_norm(stacked(parts))
