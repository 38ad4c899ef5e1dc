"""What an order is, what decides about its next phase, and the limits that hold for it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from rankwatch.wire import OrderView, Progress

S: Final = 10**9
"""One second in nanoseconds."""

FRESH_NS: Final = 300 * 10**6
"""A step to hold at is chosen only from views younger than this; agents post one every 50 ms."""

REACH_S: Final = 0.1
"""Time for an order to come from here to every slot, before the ranks' next boundary (measured: 60 ms at worst)."""

SILENT_NS: Final = 2 * S
"""An agent that has not told anything for so long releases a hold: its ranks can be neither counted on nor told."""

HOLD_LEASE_S: Final = 5.0
"""A rank goes on by itself after holding so long. Far below the shortest collective time-out."""

PAUSE_LEASE_S: Final = 60.0
ACT_LEASE_S: Final = 120.0
"""After a checkpoint or rollback a rank that hears no `go` for so long ends its process."""

ACT_NS_MAX: Final = 600 * S
"""Longest time that checkpoint and rollback hooks are waited for; until then the lease is renewed."""

PAUSE_SILENT_NS: Final = 20 * S
"""A pause ends for all when an agent is silent for so long: below the lease, at which its own ranks go on."""

VIEW_NS_MAX: Final = 10 * S
"""Longest wait for fresh views of all hosts: twice an agent's longest reconnect back-off."""

SETTLE_NS_MAX: Final = 10 * S
"""Longest wait for the last answers to `go` and `release`; every lease of a hold is over by then."""

KILL_NS_MAX: Final = 30 * S
TRIES_MAX: Final = 3
"""Holds that are tried, each with twice the margin of the one before."""


class Phase(StrEnum):
    """What an order asks of its ranks; see docs/design.md, "Orders"."""

    VIEW = "view"
    HOLD = "hold"
    DO = "do"
    GO = "go"
    RELEASE = "release"
    KILL = "kill"
    CLOSED = "closed"


BEFORE_DO: Final = (Phase.VIEW, Phase.HOLD)


@dataclass(frozen=True, slots=True)
class Order:
    """One try to carry out a command; the columns of its row."""

    id: str
    command_id: str
    job: str
    attempt: str
    action: str
    phase: Phase
    step: int
    try_number: int
    checkpoint: str
    location: str
    checkpoint_step: int
    k: int
    culprits: tuple[int, ...]
    phase_unix_ns: int
    """When this phase began."""
    lease_unix_ns: int
    """Until when this phase may last. For a hold: until when `do` may be written."""
    detail: str
    version: int
    mode: str = ""
    """For rollback: full or weights, or relaunch where the action is that instead; "" where the ranks know no modes."""
    refused: bool = False
    """A rank said that it cannot do this."""

    def wire(self) -> OrderView:
        """The order as agents hear it."""
        return OrderView(
            order=self.id,
            job=self.job,
            attempt=self.attempt,
            phase=self.phase,
            action=self.action,
            step=self.step,
            lease_s=act_lease_s(self) if self.phase is Phase.DO else HOLD_LEASE_S,
            checkpoint=self.checkpoint,
            location=self.location,
            checkpoint_step=self.checkpoint_step,
            k=self.k,
            culprits=self.culprits,
            renewal=self.version,
            mode=self.mode,
        )


@dataclass(frozen=True, slots=True)
class HostView:
    """What one host's agent has told last."""

    at_unix_ns: int
    ranks: tuple[Progress, ...]


@dataclass(frozen=True, slots=True)
class OrderSituation:
    """Everything outside the order that decides about its next phase."""

    now_unix_ns: int
    expires_unix_ns: int
    """The command must not begin after this."""
    withdrawn: str
    """Why the command shall not be carried out any more; empty: it shall."""
    resumed: bool
    """A pause shall end."""
    superseded: bool
    """Another attempt trains now."""
    hosts: Mapping[str, tuple[int, ...]]
    """Ranks of the attempt by host; empty while the topology is not known."""
    views: Mapping[str, HostView]
    step_time_s: float | None
    """None while nobody knows; an order waits for it."""
    replicas: tuple[tuple[int, ...], ...]
    """Groups of ranks whose parameters must be bit-equal."""
    can_relaunch: bool

    def age_ns(self, host: str) -> int:
        """How old the newest view of a host is; a host that has told nothing is older than any limit."""
        view = self.views.get(host)
        return ACT_NS_MAX if view is None else self.now_unix_ns - view.at_unix_ns

    def silent(self, limit_ns: int) -> list[str]:
        """Hosts that have told nothing for longer than `limit_ns`."""
        return sorted(host for host in self.hosts if self.age_ns(host) > limit_ns)

    def ranks(self) -> dict[int, Progress]:
        """The newest progress of every rank of the attempt that has been told."""
        known = {rank for ranks in self.hosts.values() for rank in ranks}
        return {p.rank: p for view in self.views.values() for p in view.ranks if p.rank in known}

    def world_size(self) -> int:
        """How many ranks must answer."""
        return sum(len(ranks) for ranks in self.hosts.values())


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """What becomes of the command by this step of its order."""

    state: str
    """accepted, applied, refused, expired, failed."""
    result: str = ""
    step: int | None = None


def enter(order: Order, phase: Phase, now_unix_ns: int, lease_ns: int, detail: str = "") -> Order:
    """The order at the beginning of a phase that may last `lease_ns`."""
    return replace(
        order,
        phase=phase,
        phase_unix_ns=now_unix_ns,
        lease_unix_ns=now_unix_ns + lease_ns,
        detail=detail,
        version=order.version + 1,
    )


def act_lease_s(order: Order) -> float:
    """How long a rank keeps to `do` without hearing more."""
    return PAUSE_LEASE_S if order.action == "pause" else ACT_LEASE_S
