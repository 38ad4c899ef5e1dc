"""The rank's side of an order: hold at a step boundary, act, and go on when all ranks have acted or it is released.

All ranks act at the same step or none does, without a collective of rankwatch's own: each rank compares the directive
in its cell with its step, and writes its answer cell. Waiting is a loop of short sleeps, so signals work and no network
call is pending. A directive is valid for a lease: a rank whose agent fell silent goes on, or, if that could mix
weights, ends its process.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from rankwatch import layout
from rankwatch.layout import Answer, Directive
from rankwatch.recorder import Recorder

POLL_S: Final = 0.002
"""How long a held rank sleeps between two reads: costs 0.1 % of a core and delays it by at most 2 ms."""
EXIT_STATUS: Final = 75
"""EX_TEMPFAIL: the launcher starts the job again from its checkpoint."""
ORDERS_REMEMBERED: Final = 64
"""Finished orders that this rank remembers; an attempt has few, one after the other."""
NEVER: Final = 1 << 62
STOP: Final = -1
"""Returned instead of the next step: the loop ends."""


class Rollback(NamedTuple):
    """Result of a rollback on this rank."""

    step: int
    """The step to go on from."""
    fingerprint: int


class Actions(Protocol):
    """What an order can make a job do. `checkpoint` and `rollback` are called while every rank is held."""

    def proven(self, checkpoint: str) -> None:
        """Keep this capture, which proved good; "" if none did."""

    def trace(self, request: str, steps: int) -> None:
        """Trace the next steps, once for each request; "" withdraws the order."""

    def refusal(self, directive: Directive) -> str:
        """Why the job cannot do this, "" if it can. Asked before it holds."""

    def checkpoint(self, step: int) -> str:
        """Save the state at the boundary before this step; return where it went. May raise."""

    def rollback(self, directive: Directive) -> Rollback:
        """Go back to the directive's checkpoint and become attempt k of this launch. May raise."""


def end_process() -> None:
    """End the process at once, for a relaunch, without exit handlers, which could wait for ranks that wait for this
    one.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_STATUS)


class Follower:
    """Follows the directives of one rank. Called by the training thread at step boundaries.

    To keep a step cheap, the caller itself checks whether there is anything to do: the first word of the recorder's
    directive cell differs from `seen`, or the step is `hold_step`.
    """

    def __init__(
        self,
        recorder: Recorder,
        launch: str,
        actions: Actions,
        *,
        now: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
        end_process: Callable[[], None] = end_process,
    ) -> None:
        self.seen = 0
        self.hold_step = NEVER
        self._recorder = recorder
        self._launch = launch
        self._actions = actions
        self._now = now
        self._sleep = sleep
        self._end_process = end_process
        self._pending: Directive | None = None
        self._over: deque[str] = deque(maxlen=ORDERS_REMEMBERED)

    @property
    def k(self) -> int:
        """Number of rollbacks inside this process, from the progress block."""
        return int(self._recorder.words[layout.POSITION]) >> 48

    def obey(self, step: int) -> int:
        """Carry out what is due at the boundary before `step`; return the step to go on with, or STOP."""
        while True:
            directive = self._read()
            if directive is not None:
                self._consider(directive, step)
            pending = self._pending
            if pending is None or step < pending.step:
                if directive is None:
                    return step
                continue  # the cell may already hold the next order
            self._forget_pending()
            # Checked at the step, not when the order arrived: captures come and go in between.
            if refusal := self._actions.refusal(pending):
                self._finish(pending, "failed", step, refusal)
                continue
            self._recorder.words[layout.STATE] = layout.HELD
            try:
                step = self._hold(pending, step)
            finally:
                self._recorder.words[layout.STATE] = layout.RUNNING
            if step == STOP:
                return STOP

    # ---- before the hold ---------------------------------------------------------------------------------------------

    def _read(self) -> Directive | None:
        """The cell's directive if it is new and whole. A torn one is read again at the next call."""
        cell = self._recorder.directive
        if cell.words[0] == self.seen:
            return None
        found = cell.read()
        if found is None or found[0] == self.seen:
            return None
        self.seen, payload = found
        try:
            directive = layout.decode_directive(payload)
        except (ValueError, TypeError):
            self._recorder.drop("directives")
            return None
        self._actions.proven(directive.proven)
        self._actions.trace(directive.trace, directive.trace_steps)
        return directive

    def _consider(self, directive: Directive, step: int) -> None:
        """Process a directive while the rank is not held."""
        order = directive.order
        if not order or order in self._over or directive.attempt != f"{self._launch}.{self.k}":
            return
        if directive.phase == "hold":
            if step > directive.step:
                self._finish(directive, "passed", step)
            else:
                self._pending = directive
                self.hold_step = directive.step
        elif directive.phase in ("release", "closed"):
            self._finish(directive, "released", step)
            if self._pending is not None and self._pending.order == order:
                self._forget_pending()

    def _forget_pending(self) -> None:
        self._pending = None
        self.hold_step = NEVER

    # ---- held --------------------------------------------------------------------------------------------------------

    def _hold(self, held: Directive, step: int) -> int:
        self._answer(held, "held", step)
        lease_ends_ns = self._after(held.lease_s)
        while True:
            directive = self._await(lease_ends_ns)
            if directive is None:
                self._finish(held, "released", step, "the hold's lease ended")
                return step
            if directive.order != held.order:
                self._finish(held, "released", step, f"order {directive.order} replaced it")
                self._consider(directive, step)
                return step
            if directive.phase in ("release", "closed"):
                self._finish(held, "released", step)
                return step
            if directive.phase == "do":
                # Remembered before it acts, so that the rank never acts twice on an order, even after an error.
                self._over.append(held.order)
                return self._act(directive, step)

    def _act(self, directive: Directive, step: int) -> int:
        if directive.action == "pause":
            return self._pause(directive, step)
        if directive.action == "stop":
            self._answer(directive, "done", step)
            return STOP
        fingerprint = 0
        goes_on = step
        try:
            if directive.action == "rollback":
                goes_on, fingerprint = self._actions.rollback(directive)
                detail = directive.checkpoint
            else:
                detail = self._actions.checkpoint(step)
        except Exception as error:  # noqa: BLE001 - the hooks are the user's; the answer carries the error
            self._answer(directive, "failed", step, detail=f"{type(error).__name__}: {error}")
            failed = True
        else:
            self._answer(directive, "done", goes_on, fingerprint=fingerprint, detail=detail)
            failed = False
        pause = self._await_go(directive, may_go=not (failed and directive.action == "rollback"))
        if pause is not None:
            return self._pause(pause, step)
        self._answer(directive, "went", goes_on, fingerprint=fingerprint)
        return goes_on

    def _await_go(self, done: Directive, *, may_go: bool) -> Directive | None:
        """Wait for `go`; end the process if it does not come, since others may have rolled back and this rank not.

        Returns:
            The pause that follows a checkpoint which was taken in a pause; None: go.
        """
        lease_ends_ns = self._after(done.lease_s)
        while True:
            directive = self._await(lease_ends_ns)
            if directive is None:
                self._end_process()
            elif directive.order != done.order:
                continue
            elif directive.phase == "go" and may_go:
                return None
            elif directive.phase == "do" and directive.action == "pause" and done.action == "checkpoint":
                return directive
            elif directive.phase == "do":
                lease_ends_ns = self._after(directive.lease_s)  # other ranks are still acting

    def _pause(self, pause: Directive, step: int) -> int:
        self._answer(pause, "done", step, detail="paused")
        lease_ends_ns = self._after(pause.lease_s)
        detail = ""
        while True:
            directive = self._await(lease_ends_ns)
            if directive is None:
                detail = "the pause's lease ended"
            elif directive.order == pause.order and directive.phase in ("hold", "do"):
                lease_ends_ns = self._after(directive.lease_s)
                continue
            self._answer(pause, "went", step, detail=detail)
            if directive is not None and directive.order != pause.order:
                self._consider(directive, step)
            return step

    # ---- waiting and answering ---------------------------------------------------------------------------------------

    def _await(self, until_ns: int) -> Directive | None:
        """The next directive; None when the time is over."""
        while True:
            directive = self._read()
            if directive is not None:
                return directive
            if self._now() >= until_ns:
                return None
            self._sleep(POLL_S)

    def _after(self, seconds: float) -> int:
        return self._now() + int(seconds * 1e9)

    def _finish(self, directive: Directive, answer: str, step: int, detail: str = "") -> None:
        self._over.append(directive.order)
        self._answer(directive, answer, step, detail=detail)

    def _answer(self, directive: Directive, answer: str, step: int, *, fingerprint: int = 0, detail: str = "") -> None:
        text = layout.encode_answer(Answer(directive.order, answer, step, self.k, fingerprint, detail))
        self._recorder.answer.write(text)
