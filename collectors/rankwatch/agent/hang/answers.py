"""What the ranks of a host are asked when their job hangs: stacks and native frames."""

from __future__ import annotations

from rankwatch import wire
from rankwatch.agent.clock import AgentClock
from rankwatch.agent.exits import RankProcess
from rankwatch.agent.hang.native_stacks import NativeStacks, StackedRank
from rankwatch.agent.hang.stacks import Stacks
from rankwatch.agent.ranks import LocalRank


class HangAnswers:
    """Asks local ranks; no call waits for an answer."""

    def __init__(self, clock: AgentClock) -> None:
        self._stacks = Stacks(clock)
        self._native_stacks = NativeStacks(clock)
        self._processes: dict[int, RankProcess] = {}
        """By rank, the process that was asked last."""

    @property
    def pending(self) -> bool:
        """True while a stack is outstanding."""
        return self._stacks.pending

    def begin(self, request: wire.StackRequest, rank: LocalRank) -> None:
        """Ask a rank, once for each request."""
        self._stacks.begin(request.request, rank)
        if rank.process is not None:
            self._processes[rank.rank] = rank.process

    def take(self) -> list[tuple[str, wire.Event]]:
        """Attempts with the events that have become ready."""
        stacks = self._stacks.take()
        for attempt, event in stacks:
            # The first rank of a place has sent its text.
            if event.fields["stack"] and event.rank in self._processes:
                order, process = str(event.fields["order"]), self._processes[event.rank]
                self._native_stacks.begin(StackedRank(order, attempt, event.rank, event.step, process))
        return [*stacks, *self._native_stacks.take()]
