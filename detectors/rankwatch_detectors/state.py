"""Saves and restores the state that decides a detector's further findings.

A `Stateful` object names these attributes in `STATE`; each holds JSON types, a numpy array or another `Stateful`. A
snapshot is a deep copy, so the object never changes it afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np


class Stateful:
    """An object whose results depend only on its configuration and on the attributes named in `STATE`."""

    STATE: ClassVar[str] = ""
    """Names parted by blanks, in addition to those of the base class."""
    _in_state: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        cls._in_state = (*cls._in_state, *vars(cls).get("STATE", "").split())

    def snapshot(self) -> dict[str, Any]:
        """Copy the state, nested objects included, into plain types and arrays."""
        return {name: _copied(getattr(self, name)) for name in self._in_state}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load a snapshot of the same version.

        Raises:
            KeyError: the snapshot lacks an attribute, so it is of another version.
        """
        for name in self._in_state:
            current = getattr(self, name)
            if isinstance(current, Stateful):
                current.restore(state[name])
            else:
                setattr(self, name, _copied(state[name]))


def _copied(value: Any) -> Any:
    if isinstance(value, Stateful):
        return value.snapshot()
    if isinstance(value, np.ndarray):
        return np.array(value)
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(item) for item in value]
    return value
