"""`rankwatch follow FILE|DIR [--job NAME] [--step NAME] ...`, until it is stopped or the log says its job has ended.

Records what a log says as the steps of one rank, which an agent sends as any other.
"""

from __future__ import annotations

import argparse
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Final

from rankwatch import layout, startup
from rankwatch.agent.endpoint import configuration_path
from rankwatch.follow.hints import hints_of, remembered
from rankwatch.follow.rows import End, Entry, LoggedFailure, LoggedStep, LoggedValues, NotUnderstood, Understood
from rankwatch.follow.sources import NAMES, FollowedLog
from rankwatch.identity import JOB_VARIABLE
from rankwatch.notices import say
from rankwatch.run.command import NoTokenError, job_access
from rankwatch.watch import Watch

STEP_S_MAX: Final = 1e6
"""A longer step, of eleven days, is none: what a log says of its time is not believed."""
UNREPORTED: Final = "unreported"
"""The phase by which detectors know that only finished steps are reported, and nothing of what is between them."""
NOT_UNDERSTOOD: Final = "log_not_understood"
"""The phase as long as no line is read as a step, though there are many."""


class FollowedRank:
    """The rank of a log. What it cannot know, such as waits and busy time, is recorded as the step itself."""

    def __init__(self, watch: Watch, now: Callable[[], int] = time.monotonic_ns) -> None:
        """Declare that nothing can be ordered.

        Args:
            watch: started for this rank, with no step begun.
            now: monotonic nanoseconds.
        """
        self._meter = watch._meter
        self._recorder = watch._recorder
        self._now = now
        self._step = -1
        self._interval = 1
        """Steps from one row to the next."""
        self._k = 0
        self._rows = 0
        self._read_ns: int | None = None
        """When rows were last read that were as new as they can be; None: not yet, or older ones were read since."""
        self.row_s = 0.0
        """Seconds between two rows of the newest reading; 0 if unknown."""
        self._time_s: float | None = None
        self._step_s = 0.0
        self._recorded: set[str] = set()
        """Names of the values of the newest step."""
        self._recorder.declare({"can": [], "followed": True})
        self._unreported = self._recorder.phase(UNREPORTED)
        self._recorder.words[layout.PHASE] = self._unreported

    def not_understood(self) -> None:
        """Show that no step is found, until there is one."""
        self._recorder.words[layout.PHASE] = self._recorder.phase(NOT_UNDERSTOOD)

    @property
    def entries(self) -> int:
        """Entries of the recorder so far."""
        return int(self._recorder.words[layout.HEAD])

    def reading(self, rows: int, *, behind: bool) -> None:
        """Begin a reading. Its rows share the time since the reading before, since writers and file systems buffer.

        Args:
            rows: how many it has; without any it is none.
            behind: more rows are there already, so that the time between this reading and the next is not theirs.
        """
        if rows:
            now_ns = self._now()
            self.row_s = (now_ns - self._read_ns) * 1e-9 / rows if self._read_ns is not None else 0.0
            self._read_ns = None if behind else now_ns

    def take(self, row: LoggedStep) -> None:
        """Record a step. One that was recorded already adds nothing; an earlier one begins a new attempt."""
        if row.step == self._step:
            self.values_of_newest(row.values)
            return
        now_ns = self._now()
        if row.step < self._step and self._k < layout.K_MAX:
            self._k, self._step, self._time_s = self._k + 1, -1, None
        took_s = self._took_s(row)
        self._step, self._time_s = row.step, row.time_s
        self._rows += 1
        took_ns = int(took_s * 1e9)
        mask = self._put(row.values)
        self._recorded = set(row.values)
        self._recorder.write_step(
            step=row.step,
            k=self._k,
            kind=0,
            relative_step=self._rows,
            end_ns=now_ns,
            step_ns=took_ns,
            busy_ns=took_ns,
            busy_cpu_ns=took_ns,
            wait_ns=0,
            phases_ns=[],
            mask=mask,
        )
        self._meter.step, self._meter.k = row.step + 1, self._k  # that of whatever is noted from here on
        words = self._recorder.words
        words[layout.PHASE] = self._unreported
        words[layout.STEP_ENTERED] = words[layout.PHASE_ENTERED] = now_ns
        words[layout.POSITION] = self._k << 48 | row.step + 2

    def values_of_newest(self, values: Mapping[str, float]) -> None:
        """Record values of the newest step; those that it has already are only said once more."""
        if self._rows:
            put = {self._meter.metric(name): value for name, value in values.items() if name not in self._recorded}
            self._recorded |= values.keys()
            put = {index: value for index, value in put.items() if not self._recorder.is_exact(index)}
            self._recorder.write_values(self._step, self._k, self._now(), put)

    def _put(self, values: Mapping[str, float]) -> int:
        for name, value in values.items():
            index = self._meter.metric(name)
            if not self._recorder.is_exact(index):
                self._meter.put(index, value)
        mask, self._meter.mask = self._meter.mask, 0
        return mask

    def _took_s(self, row: LoggedStep) -> float:
        """Seconds of one step: as the log says, between two of its times, else between two rows; 0 if unknown."""
        if self._step >= 0:
            self._interval = max(row.step - self._step, 1)
        if row.step_time_s is not None:
            self._step_s = row.step_time_s
        elif row.time_s is None:
            self._step_s = self.row_s / self._interval
        elif self._time_s is not None and row.time_s > self._time_s:
            self._step_s = (row.time_s - self._time_s) / self._interval
        if not 0 <= self._step_s <= STEP_S_MAX:
            self._step_s = 0.0
        return self._step_s


READ_EVERY_S: Final = 0.2
"""Interval between two looks at the file; an agent's messages are as far apart."""
FAILED_QUIET_S: Final = 3.0
"""After this time, and twice that between two rows, without a line after a failure the job has ended by it; a launcher
may yet start it again. What failed before the first step was caught, or nothing was watched."""
COMPLAIN_EVERY_S: Final = 600.0
"""Interval between two complaints about a log that is not understood."""
QUIET_S: Final = 1.0
"""After this time without a further entry the newest one is taken as complete."""
ENTRIES_AT_ONCE: Final = layout.RING_ENTRIES // 2
"""A log that was long before it was followed is recorded in such parts, of half of what the recorder holds ..."""
PAUSE_S: Final = 0.5
"""... with so much time between two of them, in which an agent reads the recorder three times."""
SUCCESS: Final = 0
FINDINGS: Final = 1
USAGE: Final = 2
REMEMBERED: Final = "follow.json"
"""Names of fields by job, beside the user's configuration."""
STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Follow a log; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="rankwatch follow",
        description="Read the log of a training job while it grows, and watch the job by it as one rank.",
    )
    parser.add_argument("path", type=Path, metavar="FILE|DIR", help="a log, or the folder in which it is or will be")
    parser.add_argument("--job", help="name of the job; else RANKWATCH_JOB, or the name of the file or folder")
    parser.add_argument("--format", choices=NAMES, help="kind of file; else as its name shows")
    parser.add_argument("--step", metavar="NAME", help="what the log calls the step; else as its lines show")
    parser.add_argument("--loss", metavar="NAME", help="what it calls the loss")
    parser.add_argument("--time", metavar="NAME", help="what it calls the time of a step")
    parser.add_argument(
        "--pattern",
        metavar="REGEX",
        help="how its lines are read, with groups for numbers: '(?P<step>\\d+) .* loss (?P<loss>\\S+)'",
    )
    options = parser.parse_args(arguments)
    path = options.path.absolute()
    job = options.job or environment.get(JOB_VARIABLE) or path.stem
    given = {name: getattr(options, name) for name in ("step", "loss", "time", "pattern")}
    try:
        hints_of(given)
        hints = hints_of(remembered(configuration_path(environment).with_name(REMEMBERED), job, given))
    except re.error as error:
        say(f"follow: --pattern is no regular expression: {error}")
        return USAGE
    try:
        environment = {**environment, **job_access(job, environment)}
    except NoTokenError as error:
        say(f"job {job!r}: {error}")
    try:
        watch = startup.start(job, rank=0, world_size=1, relaunches=False, stack_signal=None, env=environment)
    except ValueError as error:
        say(f"follow: {error}")
        return USAGE
    stopping: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        stopping.append(number)

    for number in STOP_SIGNALS:
        signal.signal(number, stop)
    return FollowLoop(watch, FollowedLog(path, options.format, hints), say).run(lambda: bool(stopping))


class FollowLoop:
    """One log with its rank."""

    def __init__(
        self,
        watch: Watch,
        source: FollowedLog,
        say: Callable[[str], None],
        *,
        sleep: Callable[[float], None] = time.sleep,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watch = watch
        self._source = source
        self._rank = FollowedRank(watch)
        self._say = say
        self._sleep = sleep
        self._monotonic_s = monotonic_s
        self._rows = 0
        self._paused = 0
        """Entries of the recorder at the last pause."""
        self._understood = ""
        self._announced = False
        self._reported_passed_over = False
        self._complained_s: float | None = None
        self._end: End | LoggedFailure | None = None
        """How the job has ended, if the log says so and no step came after it."""
        self._has_failed = False

    def run(self, stopping: Callable[[], bool]) -> int:
        """Read until `stopping`, the end of the job, or a file that is not what it seemed.

        Returns:
            The exit status: 1 for such a file, and if the log ends with a failure of its job.
        """
        if not self._source.path.exists():
            self._say(f"waiting for {self._source.path}")
        changed_s = self._monotonic_s()
        try:
            while not stopping():
                entries = list(self._source.read())
                quiet_s = self._monotonic_s() - changed_s
                if entries:
                    changed_s = self._monotonic_s()
                elif quiet_s >= QUIET_S:
                    entries = list(self._source.flush())
                self._report_passed_over()
                self._take(entries)
                if self._has_ended(quiet_s):
                    break
                if not self._source.behind:
                    self._sleep(READ_EVERY_S)
            self._take(list(self._source.flush()))
        except (ValueError, OSError) as error:
            self._say(f"{self._source.path} cannot be read as {self._source.format}: {error}")
            return FINDINGS
        finally:
            if self._source.passed_over.count > 1:
                self._say(f"{self._source.passed_over.count:,} lines were passed over, since they could not be read")
            if isinstance(self._end, LoggedFailure):
                self._report_failure(self._end)
            self._watch.leave()
            self._watch.close()
        return FINDINGS if self._has_failed else SUCCESS

    def _has_ended(self, quiet_s: float) -> bool:
        """Whether the log says that its job has ended in order, and nothing came after it; tells of a failure."""
        if self._end is None or self._source.behind:
            return False
        if isinstance(self._end, End):
            self._say(f"{self._source.path} says that its job has ended")
            return True
        if quiet_s >= max(FAILED_QUIET_S, 2 * self._rank.row_s):
            self._report_failure(self._end)
            self._end = None
        return False

    def _report_failure(self, failure: LoggedFailure) -> None:
        self._say(f"{self._source.path} ends with: {failure.kind}: {failure.message}")
        self._watch.failed(failure.kind, failure.message)
        self._has_failed = True

    def _take(self, entries: Sequence[Entry]) -> None:
        """Record what was read."""
        rows = sum(isinstance(entry, LoggedStep) for entry in entries)
        self._rank.reading(rows, behind=self._source.behind)
        for entry in entries:
            if isinstance(entry, LoggedStep):
                self._rank.take(entry)
                self._announce(entry)
                self._end, self._has_failed, self._complained_s = None, False, None
                self._rows += 1
                if self._rank.entries >= self._paused + ENTRIES_AT_ONCE:
                    self._paused = self._rank.entries
                    self._sleep(PAUSE_S)
            elif isinstance(entry, LoggedValues):
                self._rank.values_of_newest(entry.values)
            elif isinstance(entry, Understood):
                if self._announced and entry.text != self._understood:
                    self._say(f"lines of {self._source.path} are now read otherwise: {entry.text}")
                self._understood = entry.text
            elif isinstance(entry, NotUnderstood):
                self._complain(entry)
            elif isinstance(entry, End):
                self._end = entry
            elif isinstance(entry, LoggedFailure) and self._rows:
                known = self._end.weight if isinstance(self._end, LoggedFailure) else 0
                self._end = entry if entry.weight > known else self._end

    def _complain(self, entry: NotUnderstood) -> None:
        """Say that no step is found, once in a while."""
        now_s = self._monotonic_s()
        if self._announced or (self._complained_s is not None and now_s - self._complained_s < COMPLAIN_EVERY_S):
            return
        self._complained_s = now_s
        self._rank.not_understood()
        self._say(
            f"LOG NOT UNDERSTOOD: no line of {self._source.path} is read as a step, and nothing is watched. Name what "
            "it prints with --step, --loss and --time, or give --pattern. The lines most like a step:"
        )
        for line in entry.lines:
            self._say(f"  {line}")

    def _report_passed_over(self) -> None:
        passed_over = self._source.passed_over
        if passed_over.count and not self._reported_passed_over:
            self._reported_passed_over = True
            self._say(
                f"a line of {self._source.path} cannot be read ({passed_over.first}); it is passed over, and others too"
            )

    def _announce(self, row: LoggedStep) -> None:
        if not self._announced:
            self._announced = True
            self._say(
                f"following {self._source.path} as job {self._watch.identity.job!r} from step {row.step}: "
                f"{self._understood}"
            )
