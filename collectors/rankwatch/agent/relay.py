"""Carries the service's orders to the ranks of this host: into directive slots, or as SIGKILL.

Orders are state, not events, and arrive on two paths (the command stream, and answers to views), so an older state may
arrive after a newer one. The relay therefore never goes back to an earlier phase of an order, never writes an order to
a rank of another attempt, and reads from the slots what an earlier worker wrote.

Locations of checkpoints, which ranks would load, are passed on only if they are below a checkpoint root of this host.

Requests for traces are passed on too, and their answers taken from the files beside the recorders.
"""

from __future__ import annotations

import json
import logging
import os
import signal
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from rankwatch import layout, wire
from rankwatch.agent.clock import AgentClock
from rankwatch.agent.ranks import LocalRank
from rankwatch.layout import Directive, PersistentRequests

ORDERS_REMEMBERED: Final = 256
"""Orders whose newest phase is remembered; a job has one open at a time, and closed ones do not come back."""

FOLLOWED_BY: Final = {
    "view": {"hold", "do", "go", "release", "kill", "closed"},
    "hold": {"do", "go", "release", "kill", "closed"},
    "do": {"go", "kill", "closed"},
    "go": {"kill", "closed"},
    "release": {"kill", "closed"},
    "kill": {"closed"},
    "closed": set[str](),
}
"""Phases that may follow each phase; an agent may miss some in between."""
_IN_SLOT: Final = ("hold", "do", "go", "release")

_log = logging.getLogger(__name__)


class RefusedLocation(NamedTuple):
    """A location that was not passed on to the ranks."""

    checkpoint: str
    location: str
    reason: str


class Relay:
    """Applies orders of one job to its local ranks. Used by one thread."""

    def __init__(
        self, ranks: Iterable[LocalRank], resume_file: Path, job: str, why_not: Callable[[str], str | None]
    ) -> None:
        """See `CheckpointRoots.why_not`: why a location must not be passed on, or None while that is not known."""
        self._ranks = ranks
        self._resume_file = resume_file
        self._job = job
        self._why_not = why_not
        self._newest: OrderedDict[str, wire.OrderView] = OrderedDict()
        self._open: tuple[wire.OrderView, ...] = ()
        self._resume: wire.ResumeAdvice | None = None
        self.late = 0
        """Phases that arrived after a later one, and were not written."""
        self.trouble = ""
        """For people: why the newest advice for a relaunch is not written."""
        self._refused: dict[str, str] = {}
        """Why its location is not passed on, by open order."""
        self._refused_last: RefusedLocation | None = None
        self._untold: list[RefusedLocation] = []

    @property
    def urgent(self) -> bool:
        """True while an order is open: then views are due every 50 ms."""
        return bool(self._open)

    def ready(self, orders: wire.Orders) -> bool:
        """Whether the advice for a relaunch can be written or refused now: its file system has answered."""
        return orders.resume in (None, self._resume) or self._why_not(orders.resume.location) is not None

    def apply(self, orders: wire.Orders) -> None:
        """Carry out all open orders. Applying the same orders again changes nothing."""
        # The advice comes first: a kill below may be followed by a relaunch within milliseconds.
        if orders.resume is not None and orders.resume != self._resume:
            self._write_resume(orders.resume)
        self._supersede(orders)
        for view in orders.orders:
            if view.job == self._job and self._follows(view):
                self._newest[view.order] = view
                self._newest.move_to_end(view.order)
                self._carry_out(view)
        while len(self._newest) > ORDERS_REMEMBERED:
            self._newest.popitem(last=False)
        reported = (self._newest.get(view.order) for view in orders.orders)
        self._open = tuple(view for view in reported if view is not None and view.phase != "closed")
        self._refused = {view.order: self._refused[view.order] for view in self._open if view.order in self._refused}
        self._report_persistent(orders.proven)

    def take_refused(self) -> list[RefusedLocation]:
        """The locations refused since the last call, each once in a row."""
        refused, self._untold = self._untold, []
        return refused

    def seen_by_service(self, rank: LocalRank, progress: wire.Progress) -> wire.Progress:
        """A rank's progress for a view: an order that was not passed on to it because of its location has failed."""
        for view in self._open:
            why = self._refused.get(view.order)
            if why and rank.gone_since_s is None and progress.order != view.order and self._concerns(view, rank):
                return msgspec.structs.replace(
                    progress,
                    order=view.order,
                    answer="failed",
                    answer_step=progress.step,
                    answer_detail=why[: layout.DETAIL_CHARACTERS_MAX],
                )
        return progress

    def attempt_of(self, rank: LocalRank, k: int, answered: str) -> str:
        """The attempt under which this rank is shown to the service in views.

        While an order is open, this is the order's attempt, even if the rank has rolled back already and belongs to
        the next one: the service waits for the answer under the order's attempt.
        """
        written = rank.directive.order if rank.directive is not None else None
        for view in self._open:
            if view.order in (written, answered) and view.order:
                return view.attempt
        return rank.attempt(k)

    def _supersede(self, orders: wire.Orders) -> None:
        """Close the orders that a state with a new order no longer names, even if their end was never received."""
        named = {view.order for view in orders.orders if view.job == self._job}
        if named <= self._newest.keys():
            return
        for order in self._newest.keys() - named:
            self._newest[order] = msgspec.structs.replace(self._newest[order], phase="closed")

    def _follows(self, view: wire.OrderView) -> bool:
        if view.phase not in FOLLOWED_BY:
            _log.warning("order %s: unknown phase %r", view.order, view.phase)
            return False
        before = self._newest.get(view.order)
        if before is None:
            slots = [rank.directive for rank in self._ranks if rank.directive is not None]
            phases = {slot.phase for slot in slots if slot.order == view.order}
            late = any(view.phase != phase and view.phase not in FOLLOWED_BY[phase] for phase in phases)
        elif view.phase == before.phase:
            late = view.renewal < before.renewal
        else:
            late = view.phase not in FOLLOWED_BY[before.phase]
        self.late += late
        return not late

    def _carry_out(self, view: wire.OrderView) -> None:
        # Culprits first, so that the ranks that wait for them are not ended before them and blamed.
        for rank in sorted(self._ranks, key=lambda rank: (rank.rank not in view.culprits, rank.rank)):
            if rank.gone_since_s is not None or not self._concerns(view, rank):
                continue
            if view.phase == "kill":
                _kill(rank, view)
            elif view.phase == "closed":
                if rank.directive is not None and rank.directive.order == view.order:
                    rank.reader.directives.clear(view.order, view.attempt, rank.persistent)
                    rank.directive, rank.renewal = None, 0
            elif view.phase in _IN_SLOT and (_has_location(rank, view) or self._may_load(view)):
                _write(rank, view)

    def _may_load(self, view: wire.OrderView) -> bool:
        """Whether ranks may load from the location of an order; False as well while that is not known yet."""
        why = self._why_not(view.location)
        if why:
            self._refused[view.order] = f"this host does not load from {view.location!r}: {why}"
            self._refuse(RefusedLocation(view.checkpoint, view.location, why))
        return why == ""

    def _refuse(self, refused: RefusedLocation) -> None:
        if refused != self._refused_last:
            self._refused_last = refused
            self._untold.append(refused)
            _log.warning("checkpoint %s: %r is not passed on: %s", *refused)

    def _concerns(self, view: wire.OrderView, rank: LocalRank) -> bool:
        if rank.directive is not None and rank.directive.order == view.order:
            return True  # it has begun this order, even if a rollback has moved it to the next attempt
        return rank.attempt(rank.reader.progress().k) == view.attempt

    def _report_persistent(self, checkpoint: str) -> None:
        """Write which capture to keep and what to trace into slots without an order; a slot with one gets it later."""
        for rank in self._ranks:
            # TIER:LAUNCH.k:STEP. A capture in memory ended with the processes of its launch.
            mine = checkpoint if checkpoint.startswith(f"memory:{rank.launch}.") else ""
            asked = (
                PersistentRequests(mine)
                if rank.trace is None
                else PersistentRequests(mine, rank.trace.request, rank.trace.steps)
            )
            if rank.gone_since_s is None and rank.directive is None and rank.persistent != asked:
                rank.reader.directives.clear("", rank.attempt(rank.reader.progress().k), asked)
                rank.persistent = asked

    def _write_resume(self, advice: wire.ResumeAdvice) -> None:
        why = self._why_not(advice.location) if advice.checkpoint else ""
        if why is None:
            return  # the next orders come within a second
        self.trouble = f"the next launch does not get {advice.checkpoint} at {advice.location!r}: {why}" if why else ""
        if why:
            self._refuse(RefusedLocation(advice.checkpoint, advice.location, why))
            return
        text = json.dumps(
            {"job": advice.job, "checkpoint": advice.checkpoint, "location": advice.location, "step": advice.step}
        )
        fresh = self._resume_file.with_suffix(".new")
        try:
            if not advice.checkpoint:
                self._resume_file.unlink(missing_ok=True)
            else:
                fresh.write_text(text)
                os.replace(fresh, self._resume_file)
        except OSError as error:
            _log.warning("the advice for a relaunch was not written: %s", error)
            return
        self._resume = advice


def _has_location(rank: LocalRank, view: wire.OrderView) -> bool:
    """Whether the slot has this location already, from an earlier phase of the order."""
    slot = rank.directive
    return slot is not None and (slot.order, slot.location) == (view.order, view.location)


def _write(rank: LocalRank, view: wire.OrderView) -> None:
    directive = Directive(
        order=view.order,
        attempt=view.attempt,
        phase=view.phase,
        action=view.action,
        step=view.step,
        lease_s=view.lease_s,
        checkpoint=view.checkpoint,
        location=view.location,
        checkpoint_step=view.checkpoint_step,
        k=view.k,
        **rank.persistent._asdict(),
    )
    if rank.directive == directive and rank.renewal == view.renewal:
        return
    try:
        rank.reader.directives.write(directive)
    except ValueError as error:
        _log.warning("order %s does not fit into the slot of rank %d: %s", view.order, rank.rank, error)
        return
    rank.directive, rank.renewal = directive, view.renewal


def _kill(rank: LocalRank, view: wire.OrderView) -> None:
    # SIGKILL, because a blocked rank does not run Python handlers for SIGTERM.
    # The pidfd was opened with PID and start time compared, so this is our rank even if it lost its lock.
    if rank.process is None:
        _log.warning("order %s: rank %d is not killed: its process cannot be opened", view.order, rank.rank)
    elif rank.process.send(signal.SIGKILL):
        _log.info("order %s: killed rank %d", view.order, rank.rank)


def resume_file(directory: Path, job: str) -> Path:
    """The file in which the SDK looks for the advice for a relaunch."""
    return Path(layout.resume_path(str(directory), job))


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
        """Collect the answer of this rank, if it has one."""
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
