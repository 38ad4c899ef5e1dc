"""Orders, what decides on their next phase, and their limits. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from rankwatch.wire import OrderView, Progress

S: Final = 10**9
"""One second in nanoseconds."""

FRESH_NS: Final = 300 * 10**6
"""The step to hold at is chosen only from views younger than this; agents post one every 50 ms."""

REACH_S: Final = 0.1
"""Time that an order may take to reach the slots of all ranks (measured: 60 ms at worst)."""

SILENT_NS: Final = 2 * S
"""When an agent has been silent for this long, the hold is released: orders may not reach its ranks any more."""

HOLD_LEASE_S: Final = 5.0
"""A rank that has held for this long goes on by itself. Far below the shortest time-out of a collective."""

PAUSE_LEASE_S: Final = 60.0
"""A paused rank goes on by itself after this long without a renewal."""

ACT_LEASE_S: Final = 120.0
"""A rank that gets no `go` for this long after a checkpoint or rollback ends its process."""

ACT_NS_MAX: Final = 600 * S
"""Longest wait for checkpoint and rollback hooks; the lease is renewed until then."""

PAUSE_SILENT_NS: Final = 20 * S
"""When an agent has been silent for this long, the pause ends for all ranks, before its own go on at PAUSE_LEASE_S."""

PAUSED_HOLD_NS_MAX: Final = 40 * S
"""Longest wait for paused ranks to hold for a checkpoint: longer than PAUSE_SILENT_NS, and as much before they go on by
themselves at PAUSE_LEASE_S."""

VIEW_NS_MAX: Final = 10 * S
"""Longest wait for fresh views of all hosts: twice an agent's longest reconnect back-off."""

SETTLE_NS_MAX: Final = 10 * S
"""Longest wait for the last answers to `go` and `release`; every lease of a hold is over by then."""

KILL_NS_MAX: Final = 30 * S
"""Longest wait for agents to end the processes."""

TRIES_MAX: Final = 3
"""Holds tried, each with twice the margin of the one before."""


PAUSED: Final = "paused"
"""The detail of an order whose ranks are paused."""


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
"""Phases in which no rank has acted."""


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
    """Rollback number of the attempt (LAUNCH.k) in which the ranks train after the order."""
    culprits: tuple[int, ...]
    phase_unix_ns: int
    """When this phase began."""
    lease_unix_ns: int
    """Until when this phase may last. For a hold: until when `do` may be written."""
    detail: str
    """Why this phase began. "held" in a hold at which a rank has arrived; `PAUSED` in a pause that is applied, and in a
    checkpoint that has taken over the ranks of one and becomes a pause afterwards."""
    version: int
    mode: str = ""
    """For rollback: full, or relaunch if the action is that instead."""
    refused: bool = False
    """A rank answered that it cannot do this."""

    @property
    def pause_applied(self) -> bool:
        """Whether all that the order still does is to keep the ranks paused."""
        return self.action == "pause" and self.detail == PAUSED

    @property
    def pauses(self) -> bool:
        """Whether its ranks are, or will be, paused until they are resumed."""
        return self.action == "pause" or self.detail == PAUSED

    def wire(self) -> OrderView:
        """The order as it is sent to agents."""
        return OrderView(
            order=self.id,
            job=self.job,
            attempt=self.attempt,
            phase=self.phase,
            action=self.action,
            step=self.step,
            lease_s=act_lease_s(self) if self.phase is Phase.DO else hold_lease_s(self),
            checkpoint=self.checkpoint,
            location=self.location,
            checkpoint_step=self.checkpoint_step,
            k=self.k,
            culprits=self.culprits,
            renewal=self.version,
        )


@dataclass(frozen=True, slots=True)
class HostView:
    """The newest view of one host's ranks."""

    at_unix_ns: int
    ranks: tuple[Progress, ...]

    def joined(self, other: HostView) -> HostView:
        """The view of a host that has two agents, each with ranks of its own."""
        return HostView(min(self.at_unix_ns, other.at_unix_ns), (*self.ranks, *other.ranks))


@dataclass(frozen=True, slots=True)
class OrderSituation:
    """Everything besides the order itself that decides on its next phase."""

    now_unix_ns: int
    expires_unix_ns: int
    """The command must not begin after this."""
    withdrawn: str
    """Why the command is no longer wanted; empty: it is."""
    resumed: bool
    """Whether a pause must end."""
    superseded: bool
    """Whether a newer attempt trains now."""
    hosts: Mapping[str, tuple[int, ...]]
    """Ranks of the attempt by host; empty while the topology is not known."""
    views: Mapping[str, HostView]
    step_time_s: float | None
    """None while unknown; no hold begins before it is known."""
    replicas: tuple[tuple[int, ...], ...]
    """Groups of ranks whose parameters must be bit-equal."""
    can_relaunch: bool

    def age_ns(self, host: str) -> int:
        """Age of a host's newest view; for a host without a view, more than every limit of silence."""
        view = self.views.get(host)
        return ACT_NS_MAX if view is None else self.now_unix_ns - view.at_unix_ns

    def silent(self, limit_ns: int) -> list[str]:
        """Hosts whose newest view is older than `limit_ns`, sorted."""
        return sorted(host for host in self.hosts if self.age_ns(host) > limit_ns)

    def ranks(self) -> dict[int, Progress]:
        """The newest progress of each rank of the attempt; ranks without a report are missing."""
        known = {rank for ranks in self.hosts.values() for rank in ranks}
        return {p.rank: p for view in self.views.values() for p in view.ranks if p.rank in known}

    def world_size(self) -> int:
        """How many ranks must answer."""
        return sum(len(ranks) for ranks in self.hosts.values())


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """A new state of a command."""

    state: str
    """One of those in `orders.commands`."""
    result: str = ""
    """Why, or where the checkpoint was saved; for people."""
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


def take_over(order: Order, pause: Order, now_unix_ns: int) -> Order:
    """The order of a checkpoint that begins in an applied pause: the paused ranks hold for it at the step where they
    are.
    """
    held = replace(order, step=pause.step)
    return enter(held, Phase.HOLD, now_unix_ns, PAUSED_HOLD_NS_MAX, PAUSED)


def hold_lease_s(order: Order) -> float:
    """Seconds for which a rank holds."""
    return PAUSE_LEASE_S if order.detail == PAUSED else HOLD_LEASE_S


def act_lease_s(order: Order) -> float:
    """Seconds for which a rank obeys `do` without a renewal."""
    return PAUSE_LEASE_S if order.action == "pause" else ACT_LEASE_S
