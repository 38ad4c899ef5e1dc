"""A job of simulated ranks, agents and api processes in discrete time, with all faults that can occur among them.

Ranks keep the SDK's side of docs/design.md, "Orders": they meet in a collective every step, hold at a boundary, act on
`do`, and end their process where a rollback is not followed by `go`. Agents carry phases down and answers up, late or
not at all. Each api process runs the real `advance` over a shared row with compare-and-set, and may stop at any moment.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rankwatch.wire import OrderView, Progress
from rankwatch_service.orders.order import CommandOutcome, HostView, Order, OrderSituation, Phase, advance

TICK_NS = 10 * 10**6
S = 10**9
START_NS = 1_000 * S
FOLLOWS = ["view", "hold", "do", "go", "release", "kill", "closed"]


@dataclass
class SimulatedRank:
    number: int
    host: int
    step: int = 0
    k: int = 0
    weights: str = "fresh"
    state: str = "running"
    """running, held, left, exited."""
    mode: str = "computing"
    """computing, collective, held, acting, paused."""
    until_ns: int = 0
    slot: OrderView | None = None
    seen: tuple[str, str, int] | None = None
    pending: OrderView | None = None
    order: str = ""
    answer: str = ""
    answer_step: int = -1
    answer_detail: str = ""
    over: set[str] = field(default_factory=set)
    acted: list[tuple[str, str, int]] = field(default_factory=list)
    """(order, action, step)"""
    lacks: set[str] = field(default_factory=set)
    """Checkpoints that it cannot load, whatever the ledger says."""

    """Its SDK does not say that it is paused."""

    def progress(self) -> Progress:
        reported = {"state": self.state, "order": self.order, "answer": self.answer, "answer_step": self.answer_step}
        reported |= {"answer_k": self.k, "answer_detail": self.answer_detail}
        return Progress(
            self.number, self.step, "", 0.0, 0.0, answer_fingerprint=hash(self.weights) & 0xFFFF, **reported
        )

    def reply(self, order: OrderView, answer: str, step: int, detail: str = "") -> None:
        self.order, self.answer, self.answer_step, self.answer_detail = order.order, answer, step, detail


@dataclass
class SimulatedAgent:
    host: int
    orders: dict[str, OrderView] = field(default_factory=dict)
    silent_until_ns: int = 0
    next_view_ns: int = 0


class World:
    """One job and one command. `run` plays it; afterwards the fields say what happened."""

    def __init__(self, seed: int, action: str, *, faults: bool = True) -> None:
        self.random = random.Random(seed)
        hosts, ranks_of_host = self.random.choice(((2, 2), (4, 1)))
        self.action = action
        self.now_ns = START_NS
        self.step_ns = int(self.random.choice((0.02, 0.05, 0.2, 0.6)) * S)
        self.ranks = [
            SimulatedRank(host * ranks_of_host + i, host) for host in range(hosts) for i in range(ranks_of_host)
        ]
        self.agents = [SimulatedAgent(host) for host in range(hosts)]
        self.views: dict[str, HostView] = {}
        self.orders: list[Order] = []
        self.command = "requested"
        self.result = ""
        self.expires_ns = self.now_ns + 30 * S
        self.resumed = False
        self.drivers_stop_until_ns = [0, 0]
        self.violations: list[str] = []
        self._in_transit: list[tuple[int, Callable[[], None]]] = []
        self._faults = faults
        self._rate = self.random.choice((1, 4, 16))
        self.faults_until_ns = self.now_ns + int(self.random.uniform(0.5, 12) * S)

    # ---- the whole ---------------------------------------------------------------------------------------------------

    def run(self, seconds: float, resume_at_s: float = 4.0) -> World:
        end_ns = self.now_ns + int(seconds * S)
        resume_ns = self.now_ns + int(resume_at_s * S)
        self._begin()
        while self.now_ns < end_ns and not self.over():
            self.now_ns += TICK_NS
            self.resumed = self.now_ns >= resume_ns
            if self._faults and self.now_ns < self.faults_until_ns:
                self._break_something()
            self._deliver()
            for driver, stopped_until_ns in enumerate(self.drivers_stop_until_ns):
                if self.now_ns >= stopped_until_ns and self.random.random() < 0.4:
                    self._drive(driver)
            for agent in self.agents:
                self._report(agent)
            for rank in self.ranks:
                self._live(rank)
            self._meet()
        return self

    def over(self) -> bool:
        """All is settled: the command has ended, its order is closed, and every rank trains on or has ended."""
        closed = all(order.phase is Phase.CLOSED for order in self.orders)
        free = all(rank.mode in ("computing", "collective") or rank.state in ("left", "exited") for rank in self.ranks)
        quiet_ns = max((order.phase_unix_ns for order in self.orders), default=0) + 2 * S
        return closed and free and self.command not in ("requested", "sent", "accepted") and self.now_ns > quiet_ns

    def acted_steps(self) -> dict[str, set[int]]:
        steps: dict[str, set[int]] = {}
        for rank in self.ranks:
            for order, _, step in rank.acted:
                steps.setdefault(order, set()).add(step)
        return steps

    # ---- faults ------------------------------------------------------------------------------------------------------

    def _break_something(self) -> None:
        if self.random.random() < 0.004 * self._rate:
            self.random.choice(self.agents).silent_until_ns = self.now_ns + int(
                self.random.expovariate(0.5 * self._rate) * S
            )
        if self.random.random() < 0.004 * self._rate:
            driver = self.random.randrange(2)
            self.drivers_stop_until_ns[driver] = self.now_ns + int(self.random.expovariate(0.3 * self._rate) * S)
        if self.random.random() < 0.0005 * self._rate:
            rank = self.random.choice(self.ranks)
            rank.until_ns += int(self.random.uniform(0.2, 8) * S)  # it is slow for once
        if self.random.random() < 0.0002:
            self.random.choice(self.ranks).state = "exited"

    def _strike(self) -> None:
        """Break something just when an order has entered a phase: when it hurts most."""
        until_ns = self.now_ns + int(self.random.choice((0.3, 1.0, 4.0, 30.0, 140.0)) * self.random.random() * S)
        match self.random.randrange(4):
            case 0:
                self.random.choice(self.agents).silent_until_ns = until_ns
            case 1:
                self.drivers_stop_until_ns = [until_ns, until_ns]
            case 2:
                self.random.choice(self.ranks).until_ns += min(until_ns - self.now_ns, 10 * S)
            case 3 if self.random.random() < 0.3:
                self.random.choice(self.ranks).state = "exited"

    # ---- api ---------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        tries = len(self.orders) + 1
        k = self.ranks[0].k + (self.action == "rollback")
        checkpoint = "memory:l.0:0" if self.action == "rollback" else ""
        order = Order(
            f"c.{tries}", "c", "j", "l.0", self.action, Phase.VIEW, -1, tries, checkpoint, "", 0, k, (),
            phase_unix_ns=self.now_ns, lease_unix_ns=self.now_ns + 10 * S, detail="", version=1,
        )  # fmt: skip
        self.orders.append(order)
        self.command = "sent"
        self._push()

    def _drive(self, driver: int) -> None:
        order = self.orders[-1]
        if order.phase is Phase.CLOSED:
            if self.command == "sent":
                self.command = "expired" if self.now_ns > self.expires_ns else self.command
                if self.command == "sent":
                    self._begin()
            return
        moved, outcome = advance(order, self._situation())
        if moved is order and outcome is None:
            return
        # A process may be stopped between reading and writing: the other one has moved the order by then.
        if self._faults and self.now_ns < self.faults_until_ns and self.random.random() < 0.1:
            late_ns = self.now_ns + int(self.random.expovariate(1.0) * S)
            self.drivers_stop_until_ns[driver] = late_ns
            self._in_transit.append((late_ns, lambda: self._store(order, moved, outcome)))
        else:
            self._store(order, moved, outcome)

    def _store(self, before: Order, order: Order, outcome: CommandOutcome | None) -> None:
        if self.orders[-1].id != before.id or self.orders[-1].version != before.version:
            return
        self.orders[-1] = replace(order, version=before.version + 1)
        if outcome is not None and self.command in ("sent", "accepted"):
            self.command, self.result = outcome.state, outcome.result
        if self._faults and order.phase is not before.phase and self.random.random() < 0.3:
            self._strike()
        self._push()

    def _push(self) -> None:
        """The command streams."""
        orders = self._reported()
        for agent in self.agents:
            self._carry(functools.partial(self._take_orders, agent, orders))

    def _reported(self) -> list[OrderView]:
        return [order.wire() for order in self.orders]

    def _carry(self, act: Callable[[], None]) -> None:
        """Between an agent and the service."""
        self._in_transit.append((self.now_ns + self._transit_ns(), act))

    def _situation(self) -> OrderSituation:
        hosts: dict[str, tuple[int, ...]] = {}
        for rank in self.ranks:
            hosts[str(rank.host)] = (*hosts.get(str(rank.host), ()), rank.number)
        replicas = (tuple(rank.number for rank in self.ranks),)
        return OrderSituation(
            self.now_ns, self.expires_ns, withdrawn="", resumed=self.resumed, superseded=False, hosts=hosts,
            views=dict(self.views), step_time_s=self.step_ns / S, replicas=replicas, can_relaunch=True,
        )  # fmt: skip

    # ---- agents ------------------------------------------------------------------------------------------------------

    def _report(self, agent: SimulatedAgent) -> None:
        if self.now_ns < max(agent.silent_until_ns, agent.next_view_ns):
            return
        agent.next_view_ns = self.now_ns + 50 * 10**6
        reported = HostView(0, tuple(rank.progress() for rank in self.ranks if rank.host == agent.host))
        self._carry(lambda: self._take_view(agent, reported))

    def _take_view(self, agent: SimulatedAgent, reported: HostView) -> None:
        self.views[str(agent.host)] = HostView(self.now_ns, reported.ranks)
        self._carry(functools.partial(self._take_orders, agent, self._reported()))

    def _take_orders(self, agent: SimulatedAgent, orders: list[OrderView]) -> None:
        if self.now_ns < agent.silent_until_ns:
            return
        for order in orders:
            before = agent.orders.get(order.order)
            if before is not None and FOLLOWS.index(order.phase) < FOLLOWS.index(before.phase):
                continue
            if before is not None and order.phase == before.phase and order.renewal <= before.renewal:
                continue
            agent.orders[order.order] = order
            for rank in self.ranks:
                if rank.host != agent.host or rank.state == "exited":
                    continue
                if order.phase == "kill":
                    rank.state = "exited"
                elif order.phase == "closed" and (rank.slot is None or rank.slot.order != order.order):
                    continue
                elif order.phase != "view":
                    rank.slot = order

    def _transit_ns(self) -> int:
        # A local network, and one under load.
        return int(self.random.uniform(0.002, 0.08 if self._faults else 0.03) * S)

    def _deliver(self) -> None:
        due = [entry for entry in self._in_transit if entry[0] <= self.now_ns]
        self._in_transit = [entry for entry in self._in_transit if entry[0] > self.now_ns]
        for _, act in sorted(due, key=lambda entry: entry[0]):
            act()

    # ---- ranks -------------------------------------------------------------------------------------------------------

    def _live(self, rank: SimulatedRank) -> None:
        if rank.state in ("left", "exited") or rank.mode == "collective":
            return
        if rank.mode == "computing":
            if self.now_ns >= rank.until_ns:
                rank.mode = "collective"
            return
        news = self._read(rank)
        if rank.mode == "held":
            self._held(rank, news)
        elif rank.mode == "acted":
            self._await_go(rank, news)
        elif rank.mode == "paused":
            self._paused(rank, news)

    def _read(self, rank: SimulatedRank) -> OrderView | None:
        slot = rank.slot
        if slot is None or rank.seen == (slot.order, slot.phase, slot.renewal):
            return None
        rank.seen = (slot.order, slot.phase, slot.renewal)
        return slot

    def _boundary(self, rank: SimulatedRank, news: OrderView | None = None) -> None:
        news = news or self._read(rank)
        if news is not None and news.order not in rank.over:
            if news.phase == "hold":
                if rank.step > news.step:
                    rank.over.add(news.order)
                    rank.reply(news, "passed", rank.step)
                else:
                    rank.pending = news
            elif news.phase in ("release", "closed"):
                rank.over.add(news.order)
                rank.reply(news, "released", rank.step)
                rank.pending = None
        if rank.pending is not None and rank.step >= rank.pending.step and rank.pending.checkpoint in rank.lacks:
            rank.over.add(rank.pending.order)
            rank.reply(rank.pending, "failed", rank.step)
            rank.pending = None
        if rank.pending is not None and rank.step >= rank.pending.step:
            rank.state = rank.mode = "held"
            rank.reply(rank.pending, "held", rank.step)
            rank.until_ns = self.now_ns + int(rank.pending.lease_s * S)
            return
        self._compute(rank)

    def _compute(self, rank: SimulatedRank) -> None:
        rank.state, rank.mode = "running", "computing"
        rank.until_ns = max(rank.until_ns, self.now_ns) + int(self.step_ns * self.random.uniform(0.6, 1.0))

    def _held(self, rank: SimulatedRank, news: OrderView | None) -> None:
        held = rank.pending
        assert held is not None
        if news is not None and news.order == held.order and news.phase == "do":
            rank.over.add(held.order)
            rank.pending = None
            rank.acted.append((held.order, held.action, rank.step))
            self._act(rank, news)
        elif self.now_ns >= rank.until_ns or (news is not None and news.phase in ("release", "closed")):
            rank.over.add(held.order)
            rank.pending = None
            rank.reply(held, "released", rank.step)
            rank.until_ns = self.now_ns
            self._compute(rank)

    def _act(self, rank: SimulatedRank, do: OrderView) -> None:
        rank.until_ns = self.now_ns + int(do.lease_s * S)
        if do.action == "stop":
            rank.reply(do, "done", rank.step)
            rank.state = "left"
        elif do.action == "pause":
            self._pause(rank, do)
        else:
            if do.action == "rollback":
                rank.k, rank.step, rank.weights = do.k, do.checkpoint_step, f"{do.checkpoint}@{do.k}"
            rank.reply(do, "done", rank.step)
            rank.mode = "acted"

    def _await_go(self, rank: SimulatedRank, news: OrderView | None) -> None:
        if self.now_ns >= rank.until_ns:
            rank.state = "exited"
        elif news is not None and news.order == rank.order:
            if news.phase == "go":
                rank.reply(news, "went", rank.step)
                rank.until_ns = self.now_ns
                self._compute(rank)
            elif news.phase == "do" and (news.action, rank.acted[-1][1]) == ("pause", "checkpoint"):
                self._pause(rank, news)
            elif news.phase == "do":
                rank.until_ns = self.now_ns + int(news.lease_s * S)

    def _pause(self, rank: SimulatedRank, do: OrderView) -> None:
        rank.reply(do, "done", rank.step, "paused")
        rank.mode = "paused"
        rank.until_ns = self.now_ns + int(do.lease_s * S)

    def _paused(self, rank: SimulatedRank, news: OrderView | None) -> None:
        if news is not None and news.order != rank.order:
            rank.answer = "went"
            rank.until_ns = self.now_ns
            self._boundary(rank, news)
        elif news is not None and news.phase in ("hold", "do"):
            rank.until_ns = self.now_ns + int(news.lease_s * S)
        elif news is not None or self.now_ns >= rank.until_ns:
            rank.answer = "went"
            rank.until_ns = self.now_ns
            self._compute(rank)

    def _meet(self) -> None:
        """The collective of a step: it ends only when all ranks are in it."""
        waiting = [rank for rank in self.ranks if rank.mode == "collective" and rank.state == "running"]
        if any(rank.state == "exited" for rank in self.ranks):
            # The launcher ends the rest of the attempt, once nobody stands by an order any more.
            if len(waiting) == len([rank for rank in self.ranks if rank.state == "running"]):
                for rank in waiting:
                    rank.state = "exited"
            return
        if len(waiting) < len(self.ranks):
            return
        if len({(rank.step, rank.k, rank.weights) for rank in waiting}) > 1:
            self.violations.append(f"mixed: {[(rank.step, rank.k, rank.weights) for rank in waiting]}")
        for rank in waiting:
            rank.step += 1
            self._boundary(rank)
