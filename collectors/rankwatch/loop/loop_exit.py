"""How a rank's loop is left, and what ends the process: recorded once, by whichever hook sees it first."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from rankwatch import layout
from rankwatch.faults import Faults
from rankwatch.loop.ending import ENDS_PROCESS, breaking, described
from rankwatch.meter import StepMeter
from rankwatch.recorder import Recorder


class LoopExit:
    """Knows whether the loop runs, and why it does not. Its methods catch all errors of the SDK."""

    def __init__(
        self,
        recorder: Recorder,
        meter: StepMeter,
        faults: Faults,
        tell_lost: Callable[[], None],
        cut_short: Callable[[], None],
        left: Callable[[str], None],
    ) -> None:
        """The loop has not begun.

        Args:
            recorder: whose progress block shows whether the loop runs.
            meter: records events.
            faults: counts errors of the SDK.
            tell_lost: records what was dropped, before the loop's last event.
            cut_short: records what was not finite in the running step, before an exception that ends the process.
            left: called with the reason when the loop is left, or a step by an exception; does not raise.
        """
        self._recorder = recorder
        self._meter = meter
        self._faults = faults
        self._tell_lost = tell_lost
        self._cut_short = cut_short
        self._left = left
        self._reason = ""
        self._broken_by: dict[str, Any] = {}
        self.runs = False
        """The loop has begun and is not left."""
        self.grace_s: float | None = None
        """The launcher's grace in seconds; recorded with the exception that ends the process."""

    def enter(self) -> None:
        """The loop begins."""
        self.tell()
        self._reason = ""
        self._broken_by = {}
        self.runs = True
        self._recorder.words[layout.STATE] = layout.RUNNING

    def leave(self, reason: str) -> None:
        """The loop is over; `reason` is end, break or stop. No further orders are taken.

        A break may also be an exception that ends the process, which is known only in `process_ends` or `crashed`.
        """
        if not self._reason:
            self._reason = reason
            self.runs = False
            self._recorder.words[layout.STATE] = layout.LEFT
            self._left("the loop ended")
            if reason != "break":
                self.tell()

    def broken_off(self, holder: FrameType | None) -> None:
        """The loop in this frame is left before its end: remember why, in case that ends the process."""
        if self._reason:
            return
        with self._faults:
            self._broken_by = breaking(holder)
        self.leave("break")

    def cut_short(self, error: BaseException, trace: TracebackType | None) -> None:
        """An exception leaves a step, which is then not recorded: remember it, in case it ends the process."""
        with self._faults:
            self._broken_by = described(error, trace)
        self._left("an exception left a step")

    def process_ends(self, in_step: bool) -> None:
        """Python shuts down, perhaps within a step: note the exception that ended the loop, if no hook has noted it."""
        by, broken = self._broken_by, in_step and not self._reason
        broken |= self._reason == "break" and by.get("type") in ENDS_PROCESS
        if broken and by.get("type") and by.get("code") != 0:
            self._note_end(by)

    def crashed(self, error: BaseException, trace: TracebackType | None) -> None:
        """An exception ends the process. If it ended the loop as well, the loop does not count as left."""
        try:
            self._note_end(described(error, trace))
        except KeyboardInterrupt:
            # Ctrl-C arrives twice, from the terminal and from the launcher; the second must not lose the note.
            self._note_end(described(error, trace))
        except Exception as ours:  # noqa: BLE001 - the boundary
            self._faults.caught(ours)

    def tell(self) -> None:
        """Record once that the loop was left."""
        if self._reason and self._reason != "told":
            with self._faults:
                self._tell_lost()
                by = self._broken_by if self._reason == "break" else {}
                self._meter.note("rank_left", {"reason": self._reason, **by})
            self._reason = "told"

    def _note_end(self, by: dict[str, Any]) -> None:
        with self._faults:
            self._cut_short()
        if self._reason == "break":
            self._recorder.words[layout.STATE] = layout.RUNNING
        self._reason = "told"
        left = self._recorder.words[layout.STATE] == layout.LEFT
        grace = {} if self.grace_s is None else {"grace_s": self.grace_s}
        self._meter.note("exception", {**by, "left": left, **grace})
