"""The request for a command, before it is stored. Pure, so that stream derives the same commands in a replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

EXPIRES_S: Final = 60.0
"""A command that cannot begin within this time expires: nobody expects it any more."""

APPROVAL_S: Final = 900.0
"""The same limit for a command that a person must approve first."""

TRACE_S: Final = 300.0
"""How long the ranks have to answer a trace, unless its requester says otherwise: 3 steps of 100 s."""

TRACE_STEPS: Final = 3
"""Steps of a trace unless its requester says otherwise: more than one, because the first may differ."""

TRACE_STEPS_MAX: Final = 10
"""Most steps of a trace; a rank records some 100,000 spans in a step of a large model."""

TRACE_RANKS_MAX: Final = 8
"""Most ranks of a trace: a named one and peers of it. All others wait for them while they start and stop."""

SET_APPROVALS: Final = "set_approvals"
MAKE_TOKEN: Final = "make_token"  # noqa: S105 - an action, not a secret
"""Commands to all jobs that change who can approve: see `orders.approvals`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRequest:
    """A command as its requester states it."""

    id: str
    """Chosen by the requester before anything is stored; the same id is the same command."""
    job: str
    attempt: str
    """The only attempt that it may act on."""
    action: str
    """One of `policy.actions.Action`, or `hang.STACKS`, `SET_APPROVALS`, `MAKE_TOKEN`."""
    params: Mapping[str, Any]
    """Rollback: {"checkpoint": id, "mode": mode}; relaunch: {"culprits": [ranks],
    "from_scratch": bool}; stacks: {"ranks": [ranks]}, without ranks for
    all of them; trace: {"ranks": [ranks], "steps": count}."""
    reason: str
    """Why, for people."""
    requested_by: str
    """The requester, as the audit trail names people; or "policy" or "stream"."""
    requester: str = ""
    """The person behind `requested_by`, as `Identity.person` names people; empty: no person."""
    requested_unix_ns: int
    incident_id: str | None = None
    """The incident that it responds to."""
    idempotency_key: str | None = None
    """Unique among all commands."""
    world_size: int = 0
    """Ranks that it acts on; 0: unknown."""
    approval_required: bool = False
    """A person other than its requester must approve it before it is carried out."""
    refused_because: str = ""
    """Why it is refused as soon as it is stored: the policy would have done it. Empty: it is carried out."""
    expires_s: float | None = None
    """Seconds within which it must begin; None: `APPROVAL_S` if it needs approval, else `EXPIRES_S`."""

    @property
    def expires_unix_ns(self) -> int:
        """The latest time at which it may begin."""
        default_s = APPROVAL_S if self.approval_required else EXPIRES_S
        return self.requested_unix_ns + int((default_s if self.expires_s is None else self.expires_s) * 1e9)
