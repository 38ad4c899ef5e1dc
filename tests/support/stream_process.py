"""A stream process over a recorded log: `python -m tests.support.stream_process DATABASE END_UNIX_NS RECORDS_MAX`.

The wall clock stands where the recording ends, so that every tick comes from the records.
"""

import signal
import sys
import time

from sqlalchemy import event

from rankwatch_service.log.sql import SqlLog
from rankwatch_service.store.engine import open_engine
from rankwatch_service.stream import loop, serve
from rankwatch_service.stream.loop import Stream


class StandingClock:
    def __init__(self, unix_ns: int) -> None:
        self._unix_ns = unix_ns

    def unix_ns(self) -> int:
        return self._unix_ns

    def monotonic_s(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def main(database: str, end_unix_ns: int, records_max: int) -> None:
    loop.SNAPSHOT_S = 5.0
    Stream.step.__defaults__ = (records_max,)
    stop = serve.Stop()
    signal.signal(signal.SIGTERM, stop.ask)
    engine = open_engine(f"sqlite:///{database}")
    event.listen(engine, "connect", lambda connection, _record: connection.execute("PRAGMA synchronous=OFF"))
    clock = StandingClock(end_unix_ns)
    serve.follow(engine, SqlLog(engine, clock), clock, lambda job, incident: {"incident": incident}, stop)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
