"""Orders: their phases and limits, and what takes one through hold, do and go, on all ranks or on none. Pure.

`advance` takes an order and what agents have reported, and returns the order as it should be now. The caller stores it
by compare-and-set. The order's row and the ranks' answers are the whole state, so any api process can call `advance`,
and another one continues when it dies.

Safety rests on one rule: `do` is written once, and only while every rank of the attempt is known to hold at the
boundary of the same step. After a rollback, `go` is written only if every rank reports the same result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil
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


SAVED_LATER: Final = "the script has not said where; some frameworks save only once the job is resumed"
"""Result of a checkpoint in a pause whose hook returned no location."""

Advance = tuple[Order, CommandOutcome | None]


def advance(order: Order, now: OrderSituation) -> Advance:
    """The order as it should be now, and the new state of its command (None: no change).

    An order that need not change is returned as the same object. A released order leaves its command open, and the
    next try is another order, up to `TRIES_MAX`.
    """
    match order.phase:
        case Phase.VIEW:
            return _view(order, now)
        case Phase.HOLD:
            return _hold(order, now)
        case Phase.DO:
            return _do(order, now)
        case Phase.GO:
            return _settle(order, now, ("went",))
        case Phase.RELEASE:
            return _settle(order, now, ("released", "passed", "went"))
        case Phase.KILL:
            return _kill(order, now)
        case Phase.CLOSED:
            return order, None


def all_paused(order: Order, now: OrderSituation) -> bool:
    """Whether every rank answers that it stands in this pause."""
    standing = [p for p in now.ranks().values() if (p.order, p.answer, p.answer_detail) == (order.id, "done", PAUSED)]
    return order.phase is Phase.DO and order.pause_applied and len(standing) == now.world_size()


def _view(order: Order, now: OrderSituation) -> Advance:
    if (end := _ended(order, now, now.ranks().values())) is not None:
        return _close(order, now, end.result), end
    late = now.silent(FRESH_NS) or ["any host"] * (not now.hosts)
    ranks = now.ranks()
    # Ranks that an earlier order still holds must go on first: a slot has room for one order.
    held = [p.rank for p in ranks.values() if p.state == "held"]
    if not late and not held and len(ranks) == now.world_size() and now.step_time_s is not None:
        newest = max(p.step for p in ranks.values())
        reach_s = max(map(now.age_ns, now.hosts)) / S + REACH_S
        steps = ceil(reach_s * 2 ** (order.try_number - 1) / now.step_time_s) + 1
        order = replace(order, step=newest + steps)
        # The step may take twice the expected time, plus HOLD_LEASE_S for a slow step.
        timeout_s = 2 * steps * now.step_time_s + HOLD_LEASE_S
        return enter(order, Phase.HOLD, now.now_unix_ns, int(timeout_s * S)), None
    if now.now_unix_ns > order.lease_unix_ns:
        # Silent agents come first: what their old views say of held ranks may have changed.
        others = f"ranks {held} are still held by another order" if held else "ranks or the step time are not known yet"
        waited = f"no recent report from {', '.join(late)}" if late else others
        return _close(order, now, waited), _if_last_try(order, waited)
    return order, None


def _hold(order: Order, now: OrderSituation) -> Advance:
    ranks = now.ranks()
    in_pause = order.detail == PAUSED
    end = _ended(order, now, ranks.values())
    # Ranks of a pause hold first even if the checkpoint is not wanted any more: a release would end the pause.
    unwanted = end is not None and in_pause and end.state in ("cancelled", "expired")
    if end is not None and not unwanted:
        return _release(order, now, end.result), end
    answers = {rank: p.answer for rank, p in ranks.items() if p.order == order.id}
    if refusing := sorted(rank for rank, answer in answers.items() if answer == "failed"):
        why = f"rank {refusing[0]}: {ranks[refusing[0]].answer_detail or 'refused'}"
        return _release(replace(order, refused=True), now, why), CommandOutcome("refused", why)
    standing = [r for r, p in ranks.items() if answers.get(r) == "held" and p.answer_step == order.step]
    gone_on = sorted(
        r for r, p in ranks.items() if r not in standing and (r in answers or p.step > order.step) and p.state != "held"
    )
    silent = now.silent(PAUSE_SILENT_NS if in_pause else SILENT_NS)
    why = ""
    if gone_on:
        why = f"ranks {gone_on} had already passed step {order.step}"
    elif silent:
        why = f"no report from {', '.join(silent)}"
    elif now.now_unix_ns > order.lease_unix_ns:
        why = f"ranks {sorted(set(ranks) - set(standing))} did not reach step {order.step} in time"
    if why:
        return _release(order, now, why), _if_last_try(order, why)
    if len(standing) == now.world_size():
        if unwanted:
            return _pause_again(order, now), end
        order = enter(order, Phase.DO, now.now_unix_ns, int(act_lease_s(order) * S), PAUSED if in_pause else "")
        return order, CommandOutcome("accepted", step=order.step)
    # The first rank that holds goes on by itself when its own lease ends. Its report may be up to SILENT_NS old, so
    # `do` must be written that much earlier.
    soonest = now.now_unix_ns + int(HOLD_LEASE_S * S) - SILENT_NS
    if standing and not order.detail:
        until = min(order.lease_unix_ns, soonest)
        return replace(order, lease_unix_ns=until, detail="held", version=order.version + 1), None
    return order, None


def _do(order: Order, now: OrderSituation) -> Advance:
    ranks = now.ranks()
    mine = {rank: p for rank, p in ranks.items() if p.order == order.id}
    done = {rank: p for rank, p in mine.items() if p.answer == "done"}
    why = _trouble(order, now, ranks.values(), mine)
    if not why and order.pause_applied:
        return _paused(order, now)
    if not why and len(done) == now.world_size():
        if order.action == "pause":
            order = replace(order, detail=PAUSED, version=order.version + 1)
            return order, CommandOutcome("applied", "", order.step)
        why = _difference(order, now, done) if order.action == "rollback" else ""
        if not why:
            place = done[min(done)].answer_detail
            if order.detail == PAUSED:
                return _pause_again(order, now), CommandOutcome("applied", place or SAVED_LATER, order.step)
            return _go(order, now, ""), CommandOutcome("applied", place, order.step)
    if why:
        return _end_badly(order, now, why)
    return _renew(order, now), None


def _paused(order: Order, now: OrderSituation) -> Advance:
    silent = now.silent(PAUSE_SILENT_NS)
    if now.resumed or now.withdrawn:
        return _go(order, now, "resumed"), None
    if silent or now.now_unix_ns > order.lease_unix_ns:
        why = f"no report from {', '.join(silent)}" if silent else "its lease was not renewed in time"
        return _go(order, now, f"the pause was ended: {why}"), None
    return _renew(order, now), None


def _settle(order: Order, now: OrderSituation, last_words: tuple[str, ...]) -> Advance:
    """Wait for the last answers until the lease ends; a rank that the order does not reach follows its own lease."""
    ranks = now.ranks().values()
    settled = [p for p in ranks if _gone(p) or (p.order == order.id and p.answer in last_words)]
    if now.superseded or len(settled) == now.world_size() or now.now_unix_ns > order.lease_unix_ns:
        return _close(order, now, order.detail), None
    return order, None


def _kill(order: Order, now: OrderSituation) -> Advance:
    ranks = now.ranks()
    alive = sorted(rank for ranks_of_host in now.hosts.values() for rank in ranks_of_host if not _exited(rank, ranks))
    applied = CommandOutcome("applied", "the processes were ended") if order.action == "relaunch" else None
    if now.superseded or (now.hosts and not alive):
        return _close(order, now, order.detail), applied
    if now.now_unix_ns <= order.lease_unix_ns:
        return order, None
    # An agent exits soon after its last rank: one that reported during the order and then fell silent has ended them.
    began = order.phase_unix_ns - SILENT_NS
    obeyed = all(
        host in now.views and now.views[host].at_unix_ns >= began and now.age_ns(host) > SILENT_NS
        for host, ranks_of_host in now.hosts.items()
        if set(ranks_of_host) & set(alive)
    )
    if now.hosts and obeyed:
        return _close(order, now, order.detail), applied
    why = f"ranks {alive} may still be running"
    return _close(order, now, why), CommandOutcome("failed", why) if applied else None


def _ended(order: Order, now: OrderSituation, ranks: Iterable[Progress]) -> CommandOutcome | None:
    """Why an order on which no rank has acted must not go on; None if it may."""
    if now.withdrawn:
        return CommandOutcome("cancelled", now.withdrawn)
    if now.superseded:
        return CommandOutcome("refused", f"attempt {order.attempt} has ended")
    if now.now_unix_ns > now.expires_unix_ns:
        return CommandOutcome("expired", "it could not begin in time")
    if any(p.state == "left" for p in ranks):
        return CommandOutcome("refused", "the job is ending")
    if exited := sorted(p.rank for p in ranks if p.state == "exited"):
        return CommandOutcome("refused", f"the processes of ranks {exited} have ended")
    return None


def _trouble(order: Order, now: OrderSituation, ranks: Iterable[Progress], mine: Mapping[int, Progress]) -> str:
    """Why an order on which ranks act cannot succeed any more; empty while it can."""
    if now.superseded:
        return f"attempt {order.attempt} has ended"
    failed = {rank: p.answer_detail for rank, p in mine.items() if p.answer == "failed"}
    # A pause cannot fail: that was the checkpoint which became it.
    if failed and order.action != "pause":
        rank = min(failed)
        return f"rank {rank}: {failed[rank] or 'failed'}"
    if left := sorted(rank for rank, p in mine.items() if p.answer in ("released", "passed", "went")):
        return f"ranks {left} went on before the order had reached all ranks"
    # A rank that has done its part may leave: a `stop` ends its loop.
    if exited := sorted(p.rank for p in ranks if _gone(p) and p.answer != "done"):
        return f"the processes of ranks {exited} have ended"
    if now.now_unix_ns > order.lease_unix_ns and not order.pause_applied:
        return "not all ranks answered in time"
    return ""


def _difference(order: Order, now: OrderSituation, done: Mapping[int, Progress]) -> str:
    """How ranks differ after a rollback; empty if all went back to the same step with the same weights."""
    places = {(p.answer_step, p.answer_k) for p in done.values()}
    if len(places) > 1 or any(p.answer_k != order.k for p in done.values()):
        return f"ranks went back to different (step, rollback number): {sorted(places)}"
    for group in now.replicas:
        prints = {rank: done[rank].answer_fingerprint for rank in group}
        if len(set(prints.values())) > 1:
            return f"replicas {sorted(prints)} differ after the rollback"
    return ""


def _end_badly(order: Order, now: OrderSituation, why: str) -> Advance:
    """End an order that failed.

    After a rollback that is not the same on all ranks, none of them may go on: the agents end the processes, or the
    ranks do so themselves when their lease ends. After a checkpoint in a pause the ranks are paused again.
    """
    failed = None if order.pause_applied else CommandOutcome("failed", why, order.step)
    if failed is not None and order.detail == PAUSED:
        return _pause_again(order, now), failed
    if order.action != "rollback":
        return _go(order, now, why), failed
    if now.can_relaunch and not now.superseded:
        return enter(order, Phase.KILL, now.now_unix_ns, KILL_NS_MAX, why), failed
    return _close(order, now, why), failed


def _renew(order: Order, now: OrderSituation) -> Order:
    """Renew the lease of `do` when a third of it is over, while every agent answers."""
    lease_ns = int(act_lease_s(order) * S)
    worn = now.now_unix_ns > order.lease_unix_ns - lease_ns * 2 // 3
    endless = order.action == "pause" or now.now_unix_ns - order.phase_unix_ns < ACT_NS_MAX
    if worn and endless and not now.silent(SILENT_NS):
        return replace(order, lease_unix_ns=now.now_unix_ns + lease_ns, version=order.version + 1)
    return order


def _exited(rank: int, ranks: Mapping[int, Progress]) -> bool:
    return rank in ranks and ranks[rank].state == "exited"


def _gone(progress: Progress) -> bool:
    return progress.state in ("left", "exited")


def _go(order: Order, now: OrderSituation, why: str) -> Order:
    return enter(order, Phase.GO, now.now_unix_ns, SETTLE_NS_MAX, why)


def _pause_again(order: Order, now: OrderSituation) -> Order:
    """The order of a checkpoint in a pause as the pause that goes on after it."""
    return enter(replace(order, action="pause"), Phase.DO, now.now_unix_ns, int(PAUSE_LEASE_S * S), PAUSED)


def _release(order: Order, now: OrderSituation, why: str) -> Order:
    return enter(order, Phase.RELEASE, now.now_unix_ns, SETTLE_NS_MAX, why)


def _close(order: Order, now: OrderSituation, why: str) -> Order:
    return enter(order, Phase.CLOSED, now.now_unix_ns, 0, why)


def _if_last_try(order: Order, why: str) -> CommandOutcome | None:
    return CommandOutcome("failed", f"{why}; tried {order.try_number} times") if order.try_number >= TRIES_MAX else None
