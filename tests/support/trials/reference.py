"""The fault-free run of a fleet's scenario: the same messages, at their times, through a stream of this process."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from rankwatch import wire
from rankwatch_detectors.base import Frame
from rankwatch_detectors.catalogue import detectors
from rankwatch_service.log.base import Entry
from rankwatch_service.log.control_log import ControlLog
from rankwatch_service.names import ALL_JOBS
from rankwatch_service.policy.control_records import ReceiverRoute, ReceiversSet, encode_control
from rankwatch_service.store.engine import write
from rankwatch_service.stream.loop import Stream
from tests.support.clock import FakeClock
from tests.support.recordings.log import RecordedLog
from tests.support.recordings.outcome import Outcome, outcome_of
from tests.support.store.database import new_database
from tests.support.trials.cluster import RECEIVER
from tests.support.trials.fleet import sent

START_NS = 1_700_000_000_000_000_000


class NoCharts:
    def add(self, job: str, frame: Frame) -> None:
        pass

    def flush(self, job: str) -> None:
        pass

    def delete(self, job: str) -> None:
        pass

    def close(self, job: str) -> None:
        pass

    def flush_due(self) -> None:
        pass


@cache
def reference(scenario: str) -> Outcome:
    """What the scenario leads to while nothing fails."""
    clock = FakeClock(START_NS)
    with tempfile.TemporaryDirectory() as folder:
        engine = new_database(Path(folder))
        controls = ControlLog(engine, clock)
        with write(engine) as connection:
            routes = ReceiversSet((ReceiverRoute(RECEIVER),))
            controls.append_in(connection, [Entry(ALL_JOBS, encode_control(routes))])
        log = RecordedLog()
        for message in sent(scenario, START_NS):
            clock.now_ns = START_NS + round(message.time_s * 1e9)
            log.record(Entry(message.batch.job, wire.encode(message.batch)), clock.now_ns)
        stream = Stream(engine, log, controls, clock, detectors, lambda _job, _incident: {}, NoCharts())
        stream.start()
        while stream.step():
            pass
        outcome = outcome_of(engine)
        engine.dispose()
    return outcome
