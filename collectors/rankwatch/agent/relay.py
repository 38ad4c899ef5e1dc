"""Carries the service's orders to the ranks of this host: into directive slots, or as SIGKILL.

Orders are state, not events, and come by two ways (the stream, and answers to views), so an older state may arrive
after a newer one. The relay therefore never goes back within an order, never writes an order to a rank of another
attempt, and finds out from the slots themselves what the worker before it had written.
"""

from __future__ import annotations

import json
import logging
import os
import signal
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from rankwatch import layout, wire
from rankwatch.agent.ranks import LocalRank
from rankwatch.layout import Directive

ORDERS_REMEMBERED: Final = 256
"""Orders whose newest phase is kept in mind; a job has one open at a time, and closed ones do not come back."""

FOLLOWED_BY: Final = {
    "view": {"hold", "do", "go", "release", "kill", "closed"},
    "hold": {"do", "go", "release", "kill", "closed"},
    "do": {"go", "kill", "closed"},
    "go": {"kill", "closed"},
    "release": {"kill", "closed"},
    "kill": {"closed"},
    "closed": set[str](),
}
"""What may come after each phase, seen from an agent, which may have missed some in between."""
_IN_SLOT: Final = ("hold", "do", "go", "release")

_log = logging.getLogger(__name__)


class Relay:
    """Applies orders of one job to its local ranks. Used by one thread."""

    def __init__(self, ranks: Iterable[LocalRank], resume_file: Path, job: str) -> None:
        self._ranks = ranks
        self._resume_file = resume_file
        self._job = job
        self._newest: OrderedDict[str, wire.OrderView] = OrderedDict()
        self._open: tuple[wire.OrderView, ...] = ()
        self._resume: wire.ResumeAdvice | None = None
        self.late = 0
        """Phases that came after a later one, and were not written."""

    @property
    def urgent(self) -> bool:
        """True while an order is open: then views are wanted every 50 ms."""
        return bool(self._open)

    def apply(self, orders: wire.Orders) -> None:
        """Obey everything that is open now. Applying the same again changes nothing."""
        # The advice first: a kill below may be followed by a relaunch within milliseconds.
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
        told = (self._newest.get(view.order) for view in orders.orders)
        self._open = tuple(view for view in told if view is not None and view.phase != "closed")
        self._tell_proven(orders.proven)

    def attempt_of(self, rank: LocalRank, k: int, answered: str) -> str:
        """The attempt under which this rank is shown to the service in views.

        While an order is open that is the order's attempt, also when the rank has gone back already and counts as
        the next one: it is under the order's attempt that the service waits for its answer.
        """
        written = rank.directive.order if rank.directive is not None else None
        for view in self._open:
            if view.order in (written, answered) and view.order:
                return view.attempt
        return rank.attempt(k)

    def _supersede(self, orders: wire.Orders) -> None:
        """Where an order is new, those that are not named beside it have ended, whether or not that was heard."""
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
        # Culprits first: what they hold up must not look like their doing to the others.
        for rank in sorted(self._ranks, key=lambda rank: (rank.rank not in view.culprits, rank.rank)):
            if rank.gone_since_s is not None or not self._concerns(view, rank):
                continue
            if view.phase == "kill":
                _kill(rank, view)
            elif view.phase == "closed":
                if rank.directive is not None and rank.directive.order == view.order:
                    rank.reader.directives.clear(view.order, view.attempt, rank.proven)
                    rank.directive, rank.renewal = None, 0
            elif view.phase in _IN_SLOT:
                _write(rank, view)

    def _concerns(self, view: wire.OrderView, rank: LocalRank) -> bool:
        if rank.directive is not None and rank.directive.order == view.order:
            return True  # it has begun this order; a rollback has moved it to the next attempt
        return rank.attempt(rank.reader.progress().k) == view.attempt

    def _tell_proven(self, checkpoint: str) -> None:
        """Say which capture is to be kept, to ranks whose slot holds no order: one that does is told afterwards."""
        for rank in self._ranks:
            # TIER:LAUNCH.k:STEP; what other processes of the job had in memory is not this rank's.
            mine = checkpoint if checkpoint.startswith(f"memory:{rank.launch}.") else ""
            if rank.gone_since_s is None and rank.directive is None and rank.proven != mine:
                rank.reader.directives.clear("", rank.attempt(rank.reader.progress().k), mine)
                rank.proven = mine

    def _write_resume(self, advice: wire.ResumeAdvice) -> None:
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
        mode=view.mode,
        proven=rank.proven,
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
    # SIGTERM would be no use: blocked ranks do not run Python handlers.
    # The pidfd was taken with PID and start time compared: it is our rank, whatever became of its lock.
    if rank.process is None:
        _log.warning("order %s: rank %d cannot be held, and is not killed", view.order, rank.rank)
    elif rank.process.send(signal.SIGKILL):
        _log.info("order %s: killed rank %d", view.order, rank.rank)


def resume_file(directory: Path, job: str) -> Path:
    """Where the SDK looks for the advice."""
    return Path(layout.resume_path(str(directory), job))
