"""Observations of a job, changed in ways that must not change the findings, or only as stated."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankwatch_detectors.base import AttemptStart, Frame, Observation, Tick
from rankwatch_detectors.catalogue import CatalogueConfig

Order = NDArray[np.int64]
TIMED_PREFIX = "phase."
"""Metrics of this name, and those whose names end in _s, are durations."""


def frozen(observation: Observation) -> Observation:
    """The same observation; its arrays refuse writes, so that an attempt fails at its place."""
    records: list[Any] = [observation]
    if isinstance(observation, AttemptStart):
        records.append(observation.topology)
    if isinstance(observation, Tick) and observation.presence is not None:
        records.append(observation.presence)
    for record in records:
        for field in dataclasses.fields(record):
            value = getattr(record, field.name)
            for array in value.values() if isinstance(value, Mapping) else [value]:
                if isinstance(array, np.ndarray):
                    array.flags.writeable = False
    return observation


def permuted(observation: Observation, order: Order) -> Observation:
    """The same job with its ranks numbered otherwise: new rank i is old rank order[i]."""
    if isinstance(observation, Frame):
        return _with_columns(observation, lambda array: array[order])
    if isinstance(observation, AttemptStart):
        return dataclasses.replace(observation, topology=_reordered(observation.topology, order))
    if isinstance(observation, Tick):
        presence = observation.presence
        return dataclasses.replace(observation, presence=presence and _reordered(presence, order))
    if observation.rank is None:
        return observation
    return dataclasses.replace(observation, rank=int(np.flatnonzero(order == observation.rank)[0]))


def scaled(observation: Observation, factor: float) -> Observation:
    """The same job on a slower clock: every duration, measured or passed, is so many times as long."""
    changes: dict[str, Any] = {
        field.name: getattr(observation, field.name) * factor
        for field in dataclasses.fields(observation)
        if field.name.endswith("_s")
    }
    if isinstance(observation, Frame):
        changes["values"] = {
            name: values * factor if name.endswith("_s") or name.startswith(TIMED_PREFIX) else values
            for name, values in observation.values.items()
        }
    if isinstance(observation, Tick) and observation.presence is not None:
        presence = observation.presence
        times = {
            f.name: getattr(presence, f.name) * factor for f in dataclasses.fields(presence) if f.name[-2:] == "_s"
        }
        changes["presence"] = dataclasses.replace(presence, **times)
    return dataclasses.replace(observation, **changes)


def scaled_config(factor: float, config: Any = None) -> Any:
    """Settings with all their seconds so many times as long, and as many false incidents for each row as before."""
    config = CatalogueConfig() if config is None else config
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            changes[field.name] = scaled_config(factor, value)
        elif field.name.endswith("_s"):
            changes[field.name] = value * factor
        elif field.name == "budget":
            changes[field.name] = value / factor
        elif field.name == "long_phases":
            changes[field.name] = tuple((name, seconds * factor) for name, seconds in value)
    return dataclasses.replace(config, **changes)


@dataclasses.dataclass(frozen=True)
class Spoilt:
    """Cells of frames or progress blocks that hold something else."""

    field: str
    from_step: int
    steps: int
    ranks: tuple[int, ...]
    value: float

    def apply(self, observations: Iterable[Observation]) -> list[Observation]:
        """The observations with these cells spoilt."""
        return [self._spoil(observation) for observation in observations]

    def _spoil(self, observation: Observation) -> Observation:
        if isinstance(observation, Frame) and self.field in observation.values and self._meets(observation.step):
            values = dict(observation.values)
            values[self.field] = self._written(values[self.field])
            return dataclasses.replace(observation, values=values)
        presence = observation.presence if isinstance(observation, Tick) else None
        if presence is not None and hasattr(presence, self.field) and self._meets(int(presence.step.max())):
            column = self._written(getattr(presence, self.field))
            return dataclasses.replace(observation, presence=dataclasses.replace(presence, **{self.field: column}))
        return observation

    def _meets(self, step: int) -> bool:
        return self.from_step <= step < self.from_step + self.steps

    def _written(self, column: NDArray[np.float64]) -> NDArray[np.float64]:
        column = column.copy()
        column[[rank for rank in self.ranks if rank < column.size]] = self.value
        return column


def thinned(observation: Observation, random: np.random.Generator, silent: tuple[int, ...]) -> Observation:
    """A frame of which some metrics are missing, on some ranks or on all, and on the silent ranks everything."""
    if not isinstance(observation, Frame):
        return observation
    names = [name for name in (*observation.values, *observation.exact) if random.random() > 0.15]
    present = {}
    for name in names:
        here = observation.present[name] & (random.random(observation.present[name].size) > 0.05)
        here[list(silent)] = False
        present[name] = here
    return dataclasses.replace(
        observation,
        values={name: array for name, array in observation.values.items() if name in present},
        exact={name: array for name, array in observation.exact.items() if name in present},
        present=present,
    )


def narrowed(frame: Frame, ranks: int) -> Frame:
    """A frame of the first ranks only, as it was before the others were known."""
    return _with_columns(frame, lambda array: array[:ranks])


def _with_columns(frame: Frame, change: Any) -> Frame:
    return dataclasses.replace(
        frame,
        values={name: change(array) for name, array in frame.values.items()},
        present={name: change(array) for name, array in frame.present.items()},
        exact={name: change(array) for name, array in frame.exact.items()},
    )


def _reordered(record: Any, order: Order) -> Any:
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, np.ndarray):
            changes[field.name] = value[order]
        elif field.name == "slices":
            changes[field.name] = tuple(array[order] for array in value)
        elif isinstance(value, tuple) and value and field.name != "parameters":
            changes[field.name] = tuple(value[index] for index in order)
    return dataclasses.replace(record, **changes)
