"""An accelerator for those who have none: it has streams, events, collectives and a driver, and computes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Final

DRIVER: Final = Path(__file__).parent / "driver"
"""Folder with the module `pynvml` of simulated devices. Agents that have it first on their path read those."""
