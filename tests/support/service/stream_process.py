"""A stream process over a recorded log.

`python -m tests.support.service.stream_process DATABASE_URL END_UNIX_NS RECORDS_MAX [BOOTSTRAP PREFIX]` reads the log
in the store or, with the last two arguments, as a member of the consumer group, a topic that `record_topic` filled. The
wall clock stands where the recording ends, so that every tick comes from the records, whatever happens to the
processes.
"""

import signal
import sys
import time
from collections.abc import Sequence

from kafka import KafkaProducer
from sqlalchemy import event

from rankwatch.kafka.settings import partition_of
from rankwatch_service.log.kafka_topics import ensure_topics
from rankwatch_service.settings import Settings
from rankwatch_service.store.engine import open_engine
from rankwatch_service.stream import kafka_source, loop, serve
from rankwatch_service.stream.loop import Stream
from rankwatch_service.stream.process import Stop
from tests.support.recordings.recording import START_NS, Timed

SESSION_MS = 2_000
"""Apache Kafka in a test allows it."""


class StandingClock:
    def __init__(self, unix_ns: int) -> None:
        self._unix_ns = unix_ns

    def unix_ns(self) -> int:
        return self._unix_ns

    def monotonic_s(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def record_topic(settings: Settings, entries: Sequence[Timed]) -> None:
    """Fill the telemetry topic; each message has the time at which it was recorded, which the topic does not keep."""
    kafka = settings.kafka_settings()
    partitions = ensure_topics(settings)
    producer = KafkaProducer(bootstrap_servers=kafka.brokers, linger_ms=20)
    sent = [
        producer.send(
            kafka.telemetry_topic,
            timed.entry.value,
            key=timed.entry.key.encode(),
            partition=partition_of(timed.entry.key, partitions),
            headers=[("recorded", str(START_NS + round(timed.time_s * 1e9)).encode())],
        )
        for timed in entries
        if not timed.control
    ]
    for one in sent:
        one.get(30)
    producer.close(5)


def recorded_unix_ns(message, _now_unix_ns: int) -> int:
    return int(dict(message.headers)["recorded"])


def links(_job: str, incident: str) -> dict[str, str]:
    return {"incident": incident}


def main(database_url: str, end_unix_ns: int, records_max: int, bootstrap: str = "", prefix: str = "") -> None:
    loop.SNAPSHOT_S = 5.0
    Stream.step.__defaults__ = (records_max,)
    kafka_source.appended_unix_ns = recorded_unix_ns
    stop = Stop()
    signal.signal(signal.SIGTERM, stop.ask)
    engine = open_engine(database_url)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", lambda connection, _record: connection.execute("PRAGMA synchronous=OFF"))
    clock = StandingClock(end_unix_ns)
    if bootstrap:
        settings = Settings(kafka=bootstrap, kafka_prefix=prefix)
        serve.follow_kafka(engine, settings, clock, links, stop, session_ms=SESSION_MS)
    else:
        serve.follow_sql(engine, clock, links, stop)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
