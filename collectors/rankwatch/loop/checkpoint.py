"""A checkpoint that a job can go back to, and the one that a relaunch is advised to begin from."""

from __future__ import annotations

import json
from typing import NamedTuple

from rankwatch import layout


class Checkpoint(NamedTuple):
    """A registered checkpoint."""

    id: str
    """TIER:ATTEMPT:STEP"""
    location: str
    """The location that the job's save returned."""
    step: int
    """The step to go on from, as registered with the save."""
    mode: str = "full"
    """What is restored: full (weights, optimizer, schedulers, random states, data, step), or relaunch (new processes
    load it)."""


def advised_checkpoint(directory: str, job: str) -> Checkpoint | None:
    """The newest good checkpoint for a relaunch, as the agent wrote it down; None without advice.

    Raises:
        ValueError, KeyError, OSError: the file holds no advice.
    """
    try:
        with open(layout.resume_path(directory, job)) as file:
            advice = json.load(file)
    except FileNotFoundError:
        return None
    if advice["job"] != job or not advice["checkpoint"]:
        return None
    return Checkpoint(str(advice["checkpoint"]), str(advice["location"]), int(advice["step"]), "relaunch")
