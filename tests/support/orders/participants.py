"""The simulated ranks and agents of `training_world`."""

from __future__ import annotations

from dataclasses import dataclass, field

from rankwatch.wire import OrderView, Progress


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

    of_older_version: bool = False
    """Its SDK does not say that it is paused."""

    def progress(self) -> Progress:
        return Progress(
            self.number,
            self.step,
            "",
            0.0,
            0.0,
            state=self.state,
            order=self.order,
            answer=self.answer,
            answer_step=self.answer_step,
            answer_k=self.k,
            answer_fingerprint=hash(self.weights) & 0xFFFF,
            answer_detail=self.answer_detail,
        )

    def reply(self, order: OrderView, answer: str, step: int, detail: str = "") -> None:
        self.order, self.answer, self.answer_step, self.answer_detail = order.order, answer, step, detail


@dataclass
class SimulatedAgent:
    host: int
    orders: dict[str, OrderView] = field(default_factory=dict)
    silent_until_ns: int = 0
    next_view_ns: int = 0
