"""`rankwatch follow FILE|DIR [--job NAME] [--format FORMAT]`, until it is stopped or the log says its job has ended."""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Final

from rankwatch import startup
from rankwatch.follow.followed_rank import FollowedRank
from rankwatch.follow.rows import End, Entry, LoggedStep, LoggedValues
from rankwatch.follow.sources import NAMES, FollowedLog
from rankwatch.identity import JOB_VARIABLE
from rankwatch.notices import say
from rankwatch.run.job_token import NoTokenError, job_access
from rankwatch.watch import Watch

READ_EVERY_S: Final = 0.2
"""Interval between two looks at the file; an agent's messages are as far apart."""
QUIET_S: Final = 1.0
"""After this time without a further entry the newest one is taken as complete."""
ROWS_AT_ONCE: Final = 1_000
"""Rows of a log that was long before it was followed are recorded in such parts, since each takes up to four of the
recorder's 7,936 entries ..."""
ROWS_PAUSE_S: Final = 0.5
"""... with so much time between two of them, in which an agent reads the recorder three times."""
SUCCESS: Final = 0
FINDINGS: Final = 1
USAGE: Final = 2
STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Follow a log; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="rankwatch follow",
        description="Read the log of a training job while it grows, and watch the job by it as one rank.",
    )
    parser.add_argument("path", type=Path, metavar="FILE|DIR", help="a log, or the folder in which it is or will be")
    parser.add_argument("--job", help="name of the job; else RANKWATCH_JOB, or the name of the file or folder")
    parser.add_argument("--format", choices=NAMES, help="format of the log; else as its name and its lines show")
    options = parser.parse_args(arguments)
    path = options.path.absolute()
    job = options.job or environment.get(JOB_VARIABLE) or path.stem
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
    return FollowLoop(watch, FollowedLog(path, options.format), say).run(lambda: bool(stopping))


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
        self._told = False

    def run(self, stopping: Callable[[], bool]) -> int:
        """Read until `stopping`, the end of the job, or a file that is not what it seemed; returns the exit status."""
        if not self._source.path.exists():
            self._say(f"waiting for {self._source.path}")
        changed_s = self._monotonic_s()
        try:
            while not stopping():
                entries = list(self._source.read())
                if entries:
                    changed_s = self._monotonic_s()
                elif self._monotonic_s() - changed_s >= QUIET_S:
                    entries = list(self._source.flush())
                if self._take(entries):
                    self._say(f"{self._source.path} says that its job has ended")
                    break
                if not self._source.behind:
                    self._sleep(READ_EVERY_S)
        except ValueError as error:
            self._say(f"{self._source.path} cannot be read as {self._source.format}: {error}")
            return FINDINGS
        finally:
            self._watch.leave()
            self._watch.close()
        return SUCCESS

    def _take(self, entries: Sequence[Entry]) -> bool:
        """Record what was read; True if the log says that its job has ended."""
        rows = sum(isinstance(entry, LoggedStep) for entry in entries)
        self._rank.reading(rows, behind=self._source.behind)
        for entry in entries:
            if isinstance(entry, LoggedStep):
                self._rank.take(entry)
                self._tell(entry)
                self._rows += 1
                if self._rows % ROWS_AT_ONCE == 0:
                    self._sleep(ROWS_PAUSE_S)
            elif isinstance(entry, LoggedValues):
                self._rank.values_of_newest(entry.values)
        return any(isinstance(entry, End) for entry in entries)

    def _tell(self, row: LoggedStep) -> None:
        if not self._told:
            self._told = True
            names = ", ".join(row.values) or "steps only"
            self._say(
                f"following {self._source.path} as job {self._watch.identity.job!r} from step {row.step}: {names}"
            )
