"""The table of actions: all that is known of what a job can be asked to do, in one row.

Rules, suggestions, orders, the REST API, commands and pages derive from it. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final


class Action(StrEnum):
    """What a job can be asked to do, if its ranks report that they can (`RankInfo.can`)."""

    PAUSE = "pause"
    RESUME = "resume"
    CHECKPOINT = "checkpoint"
    ROLLBACK = "rollback"
    STOP = "stop"
    RELAUNCH = "relaunch"
    TRACE = "trace"


FROM_SCRATCH: Final = "from_scratch"
"""The parameter of a relaunch that starts without a checkpoint. Only people set it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionTraits:
    """What holds for all commands of an action."""

    name: str
    """On buttons."""
    help: str
    """Of its command on the command line."""
    does: str
    """What happens, in its dialog."""
    undo: str = ""
    """How it is undone."""
    reason: str = ""
    """Why it is suggested."""
    icon: str = ""
    """Of its button; empty: pages have none."""
    params: frozenset[str] = frozenset()
    """Parameters that a command may have."""
    may_be_automatic: bool = True
    """A rule may take it. Only people resume a paused job, and only they trace one: that waits for devices."""
    is_costly: bool = False
    """It takes back steps of all ranks, or ends them: people confirm it, and a second person may have to approve it."""
    has_order: bool = True
    """It has an order of its own. A resume ends that of the pause, and a trace touches the loop of no rank."""
    keeps_pause: bool = False
    """A paused job stays paused."""


ACTIONS: Final[dict[Action, ActionTraits]] = {
    Action.PAUSE: ActionTraits(
        name="Pause",
        help="Pause all ranks of a job at the same step.",
        does="All ranks wait at the same step and keep their memory, until they are resumed or the lease of the pause"
        " ends.",
        undo="Resume: all ranks continue from where they wait.",
        reason="keeps processes and memory while someone investigates",
        icon="pause",
        keeps_pause=True,
    ),
    Action.RESUME: ActionTraits(
        name="Resume",
        help="Resume a paused job.",
        does="All ranks continue from where they wait.",
        undo="Pause again.",
        icon="play",
        may_be_automatic=False,
        has_order=False,
    ),
    Action.CHECKPOINT: ActionTraits(
        name="Checkpoint",
        help="Save a checkpoint of a job now; a paused job stays paused.",
        does="All ranks save a checkpoint at the same step, then continue; a paused job stays paused.",
        undo="Nothing to undo: training goes on as before.",
        reason="saves the work so far",
        icon="save",
        keeps_pause=True,
    ),
    Action.ROLLBACK: ActionTraits(
        name="Roll back",
        help="Roll a job back to a checkpoint, within its processes if supported.",
        does="All ranks load a checkpoint and repeat the steps since then.",
        undo="It cannot be undone: the steps since the checkpoint are trained again.",
        reason="restores a checkpoint from before the onset",
        icon="back",
        params=frozenset({"checkpoint", "mode"}),
        is_costly=True,
    ),
    Action.RELAUNCH: ActionTraits(
        name="Relaunch",
        help="End the processes of a job; its launcher starts them again. Training goes on from the newest good"
        " checkpoint; a job without one is relaunched only with --from-scratch.",
        does="The agents end the processes; the launcher restarts them from the newest good checkpoint. Without one"
        " this is refused, unless you choose from scratch.",
        undo="It cannot be undone: what is in the memory of the processes is lost.",
        reason="starts new processes from the newest good checkpoint",
        icon="back",
        params=frozenset({"culprits", FROM_SCRATCH}),
        is_costly=True,
    ),
    Action.TRACE: ActionTraits(
        name="Trace",
        help="Record some steps of some ranks with torch's profiler, and show where their time went. These ranks"
        " synchronise with their devices while they record.",
        does="Some ranks record some steps with torch's profiler.",
        reason="records some steps, which shows what takes longer",
        params=frozenset({"ranks", "steps"}),
        may_be_automatic=False,
        has_order=False,
    ),
    Action.STOP: ActionTraits(
        name="Stop",
        help="End the training loop of a job, on all ranks at the same step.",
        does="The training loop ends on all ranks at the same step.",
        undo="It cannot be undone: a new launch goes on from the newest checkpoint on disk.",
        reason="ends the training loop on all ranks at the same step",
        icon="stop",
        is_costly=True,
    ),
}

POLICY_ACTIONS: Final = tuple(action for action in Action if ACTIONS[action].may_be_automatic)
WITHOUT_ORDER: Final = tuple(action for action, traits in ACTIONS.items() if not traits.has_order)
COSTLY: Final = tuple(action for action, traits in ACTIONS.items() if traits.is_costly)
KEEP_PAUSED: Final = frozenset(action for action, traits in ACTIONS.items() if traits.keeps_pause)


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
