"""A partition of the stream without log and database: it takes records as its test portions them."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from rankwatch_detectors.base import OBSERVATIONS, Finding, Observation
from rankwatch_service.job.effects import Effects
from rankwatch_service.log.base import Record, Saved, StoredTick
from rankwatch_service.names import ALL_JOBS
from rankwatch_service.stream.partition import Partition
from rankwatch_service.stream.saved import pack, unpack


class Listener:
    """A detector that finds nothing and keeps what it observes, or what `told` makes of it."""

    name, version, reads = "listener", 1, OBSERVATIONS

    def __init__(
        self, heard: list[Any], reported: Callable[[Observation], Any] = lambda observation: observation
    ) -> None:
        self._heard, self._reported = heard, reported

    def observe(self, observation: Observation) -> Sequence[Finding]:
        self._heard.append(self._reported(observation))
        return ()

    def snapshot(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Any) -> None: ...

    def inherit(self, before: Any) -> None: ...


class PlayedPartition:
    """Records of the job gpt, and ticks; `how`: further arguments of the partition."""

    def __init__(self, make_detectors: Callable[..., list[Any]], **how: Any) -> None:
        self._new = lambda: Partition(make_detectors, lambda job, incident: {}, **how)
        self.partition = self._new()
        self.effects = Effects()
        self._position = 0
        self._ticks = 0

    def tick_at(self, now_s: float) -> None:
        self._ticks += 1
        self.partition.tick(StoredTick(self._ticks, self._position, 0, int(now_s * 1e9)), [], self.effects)

    def records(self, bodies: Sequence[bytes], portions: Sequence[int] = (10**6,)) -> None:
        """Take records, so many at a time, repeated as often as needed."""
        waiting = list(bodies)
        for portion in itertools.cycle(portions):
            if not waiting:
                break
            some, waiting = waiting[:portion], waiting[portion:]
            records = [Record(0, self._position + index, "gpt", body, 0) for index, body in enumerate(some)]
            self.partition.records(records, self.effects)
            self._position += len(records)

    def restart(self) -> None:
        """Go on from snapshots in another process."""
        before = self.partition
        names = [ALL_JOBS, *before.jobs]
        saved = [Saved(name, before.offsets, unpack(pack(before.snapshot(name)))) for name in names]
        self.partition = self._new()
        self.partition.restore(saved, idle={}, known=set(before.jobs))
        self.partition.offsets, self.partition.now_ns = before.offsets, before.now_ns
        self.partition.end_replay()
