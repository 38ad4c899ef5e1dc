"""What the ranks of a host are asked when their job hangs: stacks, and dumps of torch's flight recorder."""

from __future__ import annotations

from rankwatch import wire
from rankwatch.agent.clock import AgentClock
from rankwatch.agent.hang.flight_recorder import FlightRecorders
from rankwatch.agent.hang.stacks import Stacks
from rankwatch.agent.ranks import LocalRank


class HangAnswers:
    """Asks local ranks; no call waits for an answer."""

    def __init__(self, clock: AgentClock) -> None:
        self._stacks = Stacks(clock)
        self._flight_recorders = FlightRecorders(clock)

    @property
    def pending(self) -> bool:
        """True while an answer is outstanding."""
        return self._stacks.pending or self._flight_recorders.pending

    def begin(self, request: wire.StackRequest, rank: LocalRank) -> None:
        """Ask a rank, once for each request."""
        self._stacks.begin(request.request, rank)
        if request.flight_recorder:
            self._flight_recorders.begin(request.request, rank)

    def take(self) -> list[tuple[str, wire.Event]]:
        """Attempts with the events that have become ready."""
        return [*self._stacks.take(), *self._flight_recorders.take()]
