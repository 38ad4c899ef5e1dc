"""What is asked of a job, before anything is stored. Pure, so that stream derives the same commands in a replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

EXPIRES_S: Final = 60.0
"""A command that could not be begun for so long is not begun at all: nobody expects it any more."""

APPROVAL_S: Final = 900.0
"""The same for a command that waits for a person's approval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRequest:
    """A command as its requester states it."""

    id: str
    """Chosen by the requester before anything is stored; the same id is the same command."""
    job: str
    attempt: str
    """The only attempt that it may touch."""
    action: str
    """One of `policy.Action`, or `stack_dumps.STACKS`."""
    params: Mapping[str, Any]
    """Rollback: {"checkpoint": id, "mode": mode}; relaunch: {"culprits": [ranks]}; stacks: {"ranks": [ranks]}."""
    reason: str
    """For people, as is the next."""
    requested_by: str
    requested_unix_ns: int
    incident_id: str | None = None
    """The incident that it answers."""
    idempotency_key: str | None = None
    """Unique over all commands."""
    approval_required: bool = False
    """A person must approve it before it is carried out."""
    expires_s: float | None = None
    """Seconds within which it must begin; without it, the default for commands with or without approval."""

    @property
    def expires_unix_ns(self) -> int:
        """When it must have begun."""
        default_s = APPROVAL_S if self.approval_required else EXPIRES_S
        return self.requested_unix_ns + int((default_s if self.expires_s is None else self.expires_s) * 1e9)
