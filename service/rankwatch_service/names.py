"""Names with a meaning of their own."""

from __future__ import annotations

from typing import Final

ALL_JOBS: Final = "*"
"""Stands for every job: the key of control records that concern all of them. No job can have this name."""
