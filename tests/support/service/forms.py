"""The forms in which the service runs: on SQLite, on PostgreSQL, and on Kafka with PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rankwatch.kafka.settings import KafkaSettings
from tests.support.kafka.broker import Broker, kafka_broker, kafka_nodes, new_prefix
from tests.support.store.database import new_database
from tests.support.store.postgres import postgres_server
from tests.support.trials.cluster import Cluster, Server

FORMS = ("sqlite", "postgresql", "kafka", "kafka of three nodes")


class Unhurried:
    """A broker whose start does not wait until it is ready, since other things go on meanwhile."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    @property
    def pid(self) -> int:
        return self._broker.pid

    def start(self) -> None:
        self._broker.start(ready=False)

    def kill(self) -> None:
        self._broker.kill()


@contextmanager
def cluster_of(
    form: str, folder: Path, *, streams: int = 3, notifiers: int = 1, kind: str = "apache"
) -> Iterator[Cluster]:
    """A cluster that has not been started, with servers of its own that may be killed; skips where there are none.

    Args:
        form: one of `FORMS`.
        folder: for the processes' files.
        streams: how many with Kafka; without it there is one.
        notifiers: how many.
        kind: of the broker.
    """
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        kafka = None
        if form == "sqlite":
            new_database(folder).dispose()
            url = f"sqlite:///{folder}/rankwatch.db"
        else:
            postgres = stack.enter_context(postgres_server())
            servers["postgresql"] = postgres
            url = postgres.url()
        replication = 1
        if form == "kafka of three nodes":
            nodes = stack.enter_context(kafka_nodes())
            servers |= {f"broker-{number}": Unhurried(node) for number, node in enumerate(nodes, 1)}
            kafka = KafkaSettings(",".join(node.bootstrap for node in nodes), new_prefix())
            replication = len(nodes)
        elif form == "kafka":
            broker = stack.enter_context(kafka_broker(kind))
            servers["broker"] = Unhurried(broker)
            kafka = KafkaSettings(broker.bootstrap, new_prefix())
        cluster = Cluster(folder, url, streams if kafka else 1, servers, kafka, notifiers, replication)
        try:
            yield cluster
        finally:
            cluster.stop()
