"""Frameworks for training, imported when a test first uses them: each takes seconds, in every process that collects."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import pytest


class Framework:
    """A module that is imported with its first attribute. A test file that names a missing one is skipped."""

    def __init__(self, name: str) -> None:
        self._name = name
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed", allow_module_level=True)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)
