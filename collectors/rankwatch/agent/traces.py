"""Passes requests for traces to local ranks, and takes their answers from the files beside their recorders."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from rankwatch import layout, wire
from rankwatch.agent.clock import AgentClock
from rankwatch.agent.ranks import LocalRank

REQUESTS_REMEMBERED: Final = 4_096
"""Answered (request, rank) pairs; a worker that is restarted answers again, and the service takes the first."""


class Traces:
    """Knows which traces the ranks of this host still have to answer. No call waits for a rank."""

    def __init__(self, clock: AgentClock) -> None:
        self._clock = clock
        self._answered: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._ready: list[tuple[str, wire.Event]] = []

    def ask(self, requests: Sequence[wire.TraceRequest], ranks: Iterable[LocalRank]) -> None:
        """Set what each rank is to trace by the newest orders; the relay writes it into its slot.

        A request that a rank was given stays until it is answered or withdrawn, over a rollback too.
        """
        for rank in ranks:
            self._look(rank)
            mine = [
                one for one in requests if rank.rank in one.ranks and (one.request, rank.path) not in self._answered
            ]
            attempt = rank.attempt(rank.reader.progress().k) if mine else ""
            rank.trace = next((one for one in mine if one == rank.trace or one.attempt == attempt), None)

    def take(self, ranks: Iterable[LocalRank]) -> list[tuple[str, wire.Event]]:
        """Attempts with `trace` events: answers that have come, and that none can come any more."""
        for rank in ranks:
            self._look(rank)
        ready, self._ready = self._ready, []
        return ready

    def _look(self, rank: LocalRank) -> None:
        """Take the answer of this rank, if it has one."""
        if rank.trace is None:
            return
        fields = _answer(rank.path, rank.trace.request)
        if fields is None and rank.gone_since_s is not None:
            fields = {"error": "its process is gone"}
        if fields is None:
            return
        fields["request"] = rank.trace.request
        step = fields.get("step")
        event = wire.Event("trace", self._clock.unix_ns(), rank.rank, step if type(step) is int else None, fields)
        self._ready.append((rank.trace.attempt, event))
        self._answered[rank.trace.request, rank.path] = None
        if len(self._answered) > REQUESTS_REMEMBERED:
            self._answered.popitem(last=False)
        rank.trace = None


def _answer(ring_path: str, request: str) -> dict[str, Any] | None:
    """What the rank answered to a request; None if it has not."""
    try:
        with Path(layout.trace_path(ring_path)).open("rb") as file:
            answer = layout.plain_json(file.read(layout.TRACE_BYTES_MAX + 1))
    except (OSError, ValueError):
        return None
    return answer if isinstance(answer, dict) and answer.get("request") == request else None
