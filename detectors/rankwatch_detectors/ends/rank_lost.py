"""Reports a process that ended before it had left its training loop, which one ended first, and a job that was ended.

The first mover decides (`teardown`). If it was asked to end (SIGINT, SIGTERM, KeyboardInterrupt) and all ranks end
within the launcher's grace, the finding is one piece of information: the job was ended on request. Otherwise the first
mover is lost, and the ranks that end soon after it are consequences: a lost peer breaks their collectives, and
launchers end the rest. Processes that an order ends are expected. An exit whose status could not be read is reported a
little later, from the progress block. If ranks go at their own pace, no rank waits for one that is done: its end is
information, and any other end later has a first mover of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rankwatch_detectors.base import AttemptStart, Bools, Finding, Kind, Occurrence, Presence, Severity
from rankwatch_detectors.dispatch import DispatchingDetector
from rankwatch_detectors.ends.teardown import (
    LEFT,
    UNREAD,
    End,
    Teardown,
    end_of,
    evidence_of,
    first_error,
    how_ended,
    is_broken_connection,
    is_closed_terminal,
    is_near,
    is_request,
)
from rankwatch_detectors.episodes import EPISODES_MAX
from rankwatch_detectors.scope import IncidentScope


@dataclass(frozen=True, slots=True)
class RankLostConfig:
    """Settings of the rank_lost detector. An exit is exact evidence, so there is nothing to calibrate."""

    grace_s: float = 30.0
    """How long a launcher waits between SIGTERM and SIGKILL if the job does not say; torchrun and Slurm wait 30 s."""
    after_grace_s: float = 15.0
    """Large processes take a while to die after SIGKILL, and their exits a while to arrive. Ranks that end within grace
    and this time after the first one belong to the same teardown."""
    exit_unread_s: float = 3.0
    """How long to wait for an exit's code before it is reported without one; and, if only broken connections were
    reported, for the end that broke them."""
    goes_on_s: float = 5.0
    """A rank that ended with code 0 counts as missing if this long afterwards others are still working in a later
    step."""
    steps_alone: int = 4
    """Ranks that have trained for so many steps without a rank that ended normally do not need it while they go on. In
    lockstep they stand in the first or second one."""
    silent_s: float = 10.0
    """A rank without telemetry for this long at the end of the grace has ended together with its host's agent."""


class RankLostDetector(DispatchingDetector):
    """One episode for each first mover, scope "rank:N". Memory: one entry for each rank that ended."""

    kind: Kind = Kind.RANK_LOST
    STATE: ClassVar[str] = "lockstep _gone _left _finished _expected _quiet _unread _ends _scope _closed _began_s _said"

    def __init__(self, config: RankLostConfig) -> None:
        super().__init__()
        self.name = "rank_lost"
        self.version = 10
        self._config = config
        self._ends = Teardown()
        self._forget()

    def _forget(self) -> None:
        self._gone: Bools = np.zeros(self.world_size, dtype=np.bool_)
        """Ranks whose exit was reported."""
        self._left: Bools = np.zeros(self.world_size, dtype=np.bool_)
        """Ranks that have left their loop normally."""
        self._finished: Bools = np.zeros(self.world_size, dtype=np.bool_)
        """Those of them whose loop was over: no step was left to make."""
        self._expected = False
        """An order ends the processes."""
        self._quiet: dict[str, End] = {}
        """The first ranks that ended with code 0 or left their loop by break; they count as missing if others go on."""
        self._unread: dict[str, float] = {}
        self._begin_teardown()

    def _begin_teardown(self) -> None:
        self._ends = Teardown()
        self._scope = ""
        """Scope of the episode about these ends; "" if there is none."""
        self._closed = False
        """They have all ended on request, as far as is known: an end that is heard later may show that it was none."""
        self._began_s = self.now_s
        self._said: list[Any] = []
        """The last report: first mover, severity, how its process ended, how many others; empty before it."""

    def _on_attempt(self, start: AttemptStart, *, new_attempt: bool, new_launch: bool) -> Sequence[Finding]:  # noqa: ARG002
        if new_attempt:
            self._forget()
        return ()

    def _on_occurrence(self, occurrence: Occurrence) -> Sequence[Finding]:
        if occurrence.attempt.rpartition(".")[0] != self.attempt.rpartition(".")[0]:
            return ()
        fields = occurrence.fields
        if occurrence.kind == "order" and (fields.get("phase") == "kill" or fields.get("action") == "stop"):
            self._expected = True
        rank = occurrence.rank
        if rank is None or not 0 <= rank < self._gone.size:
            return ()
        if occurrence.kind == "rank_left":
            self._left[rank] = True
            self._finished[rank] = fields.get("reason") != "break"
            if fields.get("reason") == "break" and len(self._quiet) < EPISODES_MAX:
                # The process may be ending, with Python's shutdown still to come.
                self._quiet[str(rank)] = end_of(occurrence, self.now_s)
        if occurrence.kind == "exception" and not (self._gone[rank] or fields.get("left")):
            return self._ended(rank, end_of(occurrence, self.now_s))
        if occurrence.kind == "process_exit" and (not self._gone[rank] or self._is_unread(rank)):
            self._gone[rank] = True
            # A loop that was left by break counts as left, unless the exit code is not 0.
            self._left[rank] &= fields.get("left") is not False or fields.get("code") == 0
            return self._ended(rank, end_of(occurrence, self.now_s))
        return ()

    def _ended(self, rank: int, end: End) -> list[Finding]:
        self._unread.pop(str(rank), None)
        if self._expected:
            return []
        noted = self._ends.has_noted(rank)
        quiet = self._left[rank] or (end["code"] == 0 and not is_request(end))
        missed = any(self._is_missed_by(other, end) for other in (self._ends.first, self._ends.victim) if other)
        if quiet and not noted and not missed:
            if len(self._quiet) < EPISODES_MAX or str(rank) in self._quiet:
                self._quiet[str(rank)] = end
            return self._report()
        self._quiet.pop(str(rank), None)
        apart = end["code"] != 0 if self._done_alone else self.now_s - self._began_s > self._window_s()
        if not noted and self._ends.first and apart and not self._closed:
            self._begin_teardown()
        if not self._ends.first:
            self._began_s = self.now_s
        if not self._ends.first or is_broken_connection(end):
            self._miss([quiet for quiet in self._quiet.values() if self._is_missed_by(end, quiet)])
        self._ends.hear(end)
        return self._report()

    def _is_unread(self, rank: int) -> bool:
        """Whether it was told without its exit, which may yet come."""
        return self._ends.has_noted(rank) or self._quiet.get(str(rank), {}).get("how") == UNREAD

    def _miss(self, quiet: list[End]) -> None:
        for end in quiet:
            del self._quiet[str(end["rank"])]
            self._ends.hear(end)

    def _is_missed(self, quiet: End, step: int | None) -> bool:
        """Whether a rank that ended normally ended too early, as others are in this step."""
        if not self._left[quiet["rank"]]:
            return True
        return quiet["step"] is not None and step is not None and step > quiet["step"]

    def _is_missed_by(self, end: End, quiet: End) -> bool:
        """Whether a rank that ended normally was missed by one that ended.

        A broken connection misses one whose loop was not over in whatever step, if it ended at about that time, and at
        any time in the step that it left.
        """
        broken = is_broken_connection(end) and not self._finished[quiet["rank"]]
        near = broken and is_near(end, quiet)
        return near or self._is_missed(quiet, None if end["step"] is None else end["step"] + broken)

    def _on_tick(self, presence: Presence | None) -> Sequence[Finding]:
        if presence is None:
            return ()
        if self._quiet and (not self._ends.first or self._done_alone):
            self._miss(self._passed_by(presence))
        findings = self._read_unread(presence) if "exited" in presence.reported("state") else []
        if not self._ends.first or self._expected:
            return findings
        if self._requested and self.now_s - self._began_s > self._window_s():
            absent = ~presence.has_reported | (self.now_s - presence.received_s > self._config.silent_s)
            return [*findings, *self._report(over=True, absent=absent)]
        return [*findings, *self._report(quietly=True)]

    def _passed_by(self, presence: Presence) -> list[End]:
        """Ranks that ended normally a while ago, while others go on, unless these have long trained without them."""
        running = presence.has_reported & presence.where("state", "running") & ~self._gone
        running &= self.now_s - presence.received_s <= self._config.goes_on_s
        if not running.any():
            return []
        furthest = int(presence.step[running].max())
        at_work = running & (presence.step == furthest) & (presence.outside_s < 0)
        # A rank that left by break and is still shutting down is reported sooner, before the others' wait is a hang.
        timeout_s = {True: self._config.goes_on_s, False: self._config.exit_unread_s}
        quiet = [end for end in self._quiet.values() if self.now_s - end["received_s"] >= timeout_s[end["exited"]]]
        if self.lockstep:
            stood_s = float(np.fmin.reduce((presence.step_age_s + self.now_s - presence.received_s)[running]))
            quiet = [one for one in quiet if not self._train_on(one, furthest, stood_s)]
        # One that left a loop that was not over has not done the step that others are at work in.
        ahead = {True: furthest, False: furthest + int(at_work.any())}
        return [end for end in quiet if self._is_missed(end, ahead[bool(self._finished[end["rank"]])])]

    def _train_on(self, quiet: End, furthest: int, stood_s: float) -> bool:
        """Whether the others train without it: they have made some steps, and do not stand in one for as long as three.

        They may stand later, where ranks meet only now and then.
        """
        made = furthest - (furthest if quiet["step"] is None else quiet["step"])
        usual_s = (self.now_s - quiet["received_s"]) / max(made, 1)
        return made >= self._config.steps_alone and stood_s < max(3 * usual_s, self._config.goes_on_s)

    def _read_unread(self, presence: Presence) -> list[Finding]:
        findings: list[Finding] = []
        for rank in np.flatnonzero(presence.where("state", "exited") & presence.has_reported & ~self._gone).tolist():
            since = self._unread.setdefault(str(rank), self.now_s)
            if self.now_s - since >= self._config.exit_unread_s and not self._ends.has_noted(rank):
                self._gone[rank] = True
                fields = {"how": UNREAD}
                unknown = Occurrence("process_exit", self.attempt, "", since, rank, int(presence.step[rank]), fields)
                findings.extend(self._ended(rank, end_of(unknown, self.now_s)))
        return findings

    # ---- findings ----------------------------------------------------------------------------------------------------

    @property
    def _requested(self) -> bool:
        """Whether the last report was that the job ends on request."""
        return bool(self._said) and self._said[1] != Severity.CRITICAL and is_request(self._ends.first)

    @property
    def _done_alone(self) -> bool:
        """Whether only ranks that were done have ended, in a job without lockstep."""
        first = self._ends.first
        return not self.lockstep and bool(first) and not is_request(first) and self._is_harmless()

    def _is_harmless(self) -> bool:
        first = self._ends.first
        harmless = first["code"] == 0 or first["how"] == LEFT
        return harmless and all(end["code"] == 0 or is_request(end) for end in self._ends.also)

    def _window_s(self) -> float:
        sent_s = self._ends.first.get("grace_s")
        if isinstance(sent_s, int | float) and 0 <= sent_s < math.inf:
            return sent_s + self._config.after_grace_s
        return self._config.grace_s + self._config.after_grace_s

    def _report(self, *, quietly: bool = False, over: bool = False, absent: Bools | None = None) -> list[Finding]:
        """Open, update or close the episode of these ends.

        Args:
            quietly: no rank ended just now; report even if only the list of others has grown.
            over: the time within which all ranks must end on request is over.
            absent: ranks without telemetry.
        """
        first = self._ends.first
        if not first or (self._closed and is_request(first) and not self._is_open()):
            return []
        gone = self._gone | self._finished
        if over and absent is not None:
            gone |= self._left | absent
        all_gone = bool(gone.all())
        if not self._scope and self.now_s < self._due_s(first) and not all_gone:
            return []
        severity = self._severity(all_gone=all_gone, over=over)
        on_request = severity is not Severity.CRITICAL and all_gone and is_request(first)
        saying = [
            first["rank"],
            severity.value,
            first["exited"] and first["how"],
            len(self._ends.alike),
            self._ends.count,
        ]
        # Only the first and the last of the other ends are reported at once; the rest waits for the next tick.
        news = saying[:4] != self._said[:4] or self._ends.count in (1, self.world_size - 1)
        findings = []
        if on_request or ((news or quietly) and saying != self._said):
            self._said = saying
            findings = self._say(first, severity, missing=int((~gone).sum()))
        if on_request and self._is_open():
            self._closed = True
            scope = IncidentScope.parse(self._scope)
            summary = self.episodes.reported(scope)["summary"]
            findings += self.episodes.close(scope, first["step"], self.now_s, summary, {"ended_on_request": True})
        return findings

    def _is_open(self) -> bool:
        """Whether these ends have an open episode."""
        return self._scope != "" and IncidentScope.parse(self._scope) in self.episodes

    def _due_s(self, first: End) -> float:
        """When to report: at once if the exit itself shows the cause."""
        if first["exited"] and not is_broken_connection(first):
            return float(first["received_s"])
        return float(first["received_s"]) + self._config.exit_unread_s

    def _severity(self, *, all_gone: bool, over: bool) -> Severity:
        first = self._ends.first
        if is_request(first):
            given_up = bool(self._said) and self._said[:2] == [first["rank"], Severity.CRITICAL.value]
            if given_up or (over and not all_gone):
                return Severity.CRITICAL
            return Severity.WARNING if is_closed_terminal(first) else Severity.INFO
        if self._done_alone:
            return Severity.INFO
        return Severity.WARNING if self._is_harmless() else Severity.CRITICAL

    def _say(self, first: End, severity: Severity, *, missing: int) -> list[Finding]:
        reported_now: dict[str, Any] = {
            "severity": severity,
            "ranks": (first["rank"], *self._ends.alike),
            "onset_step": first["step"],
            "onset_time_s": first["time_s"],
            "detected_step": first["step"],
            "detected_time_s": self.now_s,
            # Low, so that no policy acts while the end may turn out to be a request.
            "confidence": 0.5 if severity is Severity.INFO else 1.0,
            "summary": self._sentence(first, severity, missing),
            "evidence": {
                **evidence_of(first),
                "requested": is_request(first),
                **self._printed(first),
                **({"standing": True} if self._done_alone else {}),
                "also_ended": [evidence_of(end) for end in self._ends.also],
                "also_ended_count": self._ends.count,
            },
        }
        if self._is_open():
            return self.episodes.update(IncidentScope.parse(self._scope), **reported_now)
        scope = IncidentScope.of_rank(first["rank"])
        self._scope = str(scope)
        if scope in self.episodes:
            return []
        return self.episodes.open(scope, attempt=self.attempt, score=math.inf, **reported_now)

    def _printed(self, first: End) -> dict[str, Any]:
        """Evidence of what was wrong first, and of what that rank has printed of it; {} where nothing is known."""
        printed = first["output"]
        reported = {
            "first_error": first_error(first),
            "output": printed.get("lines"),
            "output_files": [f"{first['host']}:{path}" for path in printed.get("files", ())],
        }
        return {name: value for name, value in reported.items() if value}

    def _sentence(self, first: End, severity: Severity, missing: int) -> str:
        where = f"rank {first['rank']}" + (f" on {first['host']}" if first["host"] else "")
        capital = f"R{where[1:]}"
        if self._done_alone:
            return f"{capital} {how_ended(first)}; the others go on at their own pace."
        asked = is_request(first) and severity is not Severity.CRITICAL
        if asked and missing:
            return f"The job is being ended on request: {where} {how_ended(first)}."
        if asked:
            lasted_s = self.now_s - self._began_s
            all_ranks = f"; all {self.world_size} ranks ended within {lasted_s:.0f} s" if self.world_size > 1 else ""
            if first["signal"] is not None and not first["error"]:
                return f"The job {how_ended(first)}{all_ranks.replace(';', ':')}."
            return f"The job was ended on request: {where} {how_ended(first)}{all_ranks}."
        if is_request(first):
            window_s = self._window_s()
            still = f"{missing} of {self.world_size} ranks did not end within {window_s:g} s"
            return f"{capital} {how_ended(first)}, and {still}."
        if first["code"] == 0:
            return f"{capital} ended with exit code 0 at step {first['step']}, before the others were done."
        alike = self._ends.alike
        too = f"; so did rank {alike[0]}" if len(alike) == 1 else f"; so did {len(alike)} other ranks" if alike else ""
        return f"{capital} {how_ended(first)}{too}{self._ends.followed}."
