"""The one partition of a log in the store: one process reads it, and must be the only one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rankwatch_service.clock import Clock
from rankwatch_service.log.sql_log import PARTITION, SqlLog
from rankwatch_service.store.change_watch import ChangeWatch

POLL_S: Final = 0.01
"""Between looks at whether the store has changed (3 us each) while nothing comes."""

IDLE_S: Final = 0.25
"""A wait ends after so long, so that a tick is at most so late."""


class SoleReader:
    """A `stream.member.Source` over the log in the store."""

    sole = True

    def __init__(self, log: SqlLog, clock: Clock) -> None:
        self._log = log
        self._clock = clock

    @property
    def assigned(self) -> frozenset[int]:
        """The only one."""
        return frozenset({PARTITION})

    def wait(self, idle: bool, changes: ChangeWatch) -> bool:
        """Where `idle`, until the store changes, for a moment at most; returns whether it has."""
        deadline_s = self._clock.monotonic_s() + IDLE_S
        while not (changed := changes.changed()) and idle and self._clock.monotonic_s() < deadline_s:
            self._clock.sleep(POLL_S)
        return changed

    def end(self, partition: int, position: int) -> int:  # noqa: ARG002
        """Where the partition ends."""
        return self._log.end(partition)

    def processed(self, positions: Mapping[int, int]) -> None:
        """The store knows."""

    @property
    def counts(self) -> Mapping[str, int]:
        """None."""
        return {}

    def lost(self, partition: int) -> int:  # noqa: ARG002
        """Nothing is lost that was not trimmed by our leave."""
        return 0

    def close(self) -> None:
        """Nothing is held."""
