"""An installation of real processes that can be killed one by one: roles, database and broker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import httpx2
from kafka import KafkaConsumer, TopicPartition
from kafka.errors import KafkaError
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from rankwatch.kafka.settings import KafkaSettings, client_options
from rankwatch_service.access.grants import Scope
from rankwatch_service.access.tokens import TokenKind, create_token
from rankwatch_service.clock import SystemClock
from rankwatch_service.notify.outbox import undelivered
from rankwatch_service.store.engine import StoreBusyError, open_engine, read, write
from rankwatch_service.store.migrate import upgrade
from rankwatch_service.store.models import LogPartition, StreamPosition
from tests.support.recordings.outcome import Outcome, outcome_of
from tests.support.service.process import Http, Role, free_port, until
from tests.support.trials.fleet import FleetSettings

ROOT = Path(__file__).parents[3]
RECEIVER = "oncall"
PARTITIONS = 6
START_S = 180.0
"""Five processes begin at once, on a machine that may have other things to do."""
END_S = 30.0


class Server(Protocol):
    """A database server or a broker."""

    @property
    def pid(self) -> int: ...
    def start(self) -> None: ...
    def kill(self) -> None: ...


class Cluster:
    """`api`, `notify` and some `stream-N` on one database. Everything with a name can be killed and started."""

    def __init__(
        self,
        folder: Path,
        database_url: str,
        streams: int = 1,
        servers: Mapping[str, Server] | None = None,
        kafka: KafkaSettings | None = None,
        notifiers: int = 1,
        replication: int = 1,
    ) -> None:
        """No process is started yet.

        Args:
            folder: for the processes' files.
            database_url: of a database that is migrated when the cluster starts.
            streams: number of stream processes; more than one only with Kafka.
            servers: other running servers that may be killed too, by name.
            kafka: the log; None = the log is in the database.
            notifiers: number of notifiers, of which one is active.
            replication: of the topics.
        """
        self.kafka = kafka
        self.folder = folder
        self.servers = dict(servers or {})
        self.engine = open_engine(database_url)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._environment = {
            "RANKWATCH_DATABASE_URL": database_url,
            "RANKWATCH_PORT": str(port),
            "RANKWATCH_DATA_DIR": str(folder / "data"),
            "RANKWATCH_NOTIFY_ALLOW": "127.0.0.1",
        }
        if kafka is not None:
            self._environment |= {
                "RANKWATCH_KAFKA": kafka.bootstrap,
                "RANKWATCH_KAFKA_PREFIX": kafka.prefix,
                "RANKWATCH_KAFKA_PARTITIONS": str(PARTITIONS),
                "RANKWATCH_KAFKA_REPLICATION": str(replication),
            }
        names = ["api"]
        names += [f"notify-{number}" for number in range(1, notifiers + 1)]
        names += [f"stream-{number}" for number in range(1, streams + 1)]
        self.roles = {
            name: Role(folder / name, name.partition("-")[0], environment=self._environment) for name in names
        }
        self.token = ""
        self._http: Http | None = None

    def start(self, webhook_url: str) -> None:
        """Start every role, with one receiver; returns when the api is ready."""
        upgrade(self.engine)
        with write(self.engine) as connection:
            now = SystemClock().unix_ns()
            _, self.token = create_token(connection, TokenKind.API, "test", [Scope.ADMIN], now)
        for role in self.roles.values():
            role.start()
        self._http = Http(self.url, self.token)
        until("the api is ready", self._ready, START_S)
        receiver = {"name": RECEIVER, "url": webhook_url, "severities": []}
        answer = self._http.ask("POST", "/api/v1/receivers", json=receiver)
        assert answer.status_code == 201, answer.text

    def end_roles(self) -> None:
        """Ask every role to end, so that nothing is held back in memory.

        Raises:
            AssertionError: some did not, and were killed.
        """
        running = {name: role.process for name, role in self.roles.items() if role.process is not None}
        for process in running.values():
            process.send_signal(signal.SIGCONT)
            process.terminate()
        stuck = []
        for name, process in running.items():
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                stuck.append(name)
        assert not stuck, f"{stuck} did not end when asked"

    def stop(self) -> None:
        """End everything that was started here."""
        if self._http is not None:
            self._http.close()
        for role in self.roles.values():
            if role.process is not None and role.process.poll() is None:
                role.process.kill()
                role.process.wait()
        self.engine.dispose()

    @property
    def names(self) -> list[str]:
        """Everything that can be killed."""
        return [*self.roles, *self.servers]

    def kill(self, name: str) -> None:
        """SIGKILL."""
        (self.servers.get(name) or self.roles[name]).kill()

    def restart(self, name: str) -> None:
        """Start it again; returns before it is ready."""
        (self.servers.get(name) or self.roles[name]).start()

    def pause(self, name: str) -> None:
        """SIGSTOP: it holds what it holds and says nothing."""
        os.kill(self._pid(name), signal.SIGSTOP)

    def resume(self, name: str) -> None:
        os.kill(self._pid(name), signal.SIGCONT)

    def died(self) -> dict[str, str]:
        """Roles that ended by themselves, and the end of what they said."""
        ended = {name: role for name, role in self.roles.items() if role.process is not None and role.process.poll()}
        return {name: f"status {role.process.returncode}: {role.said()[-4000:]}" for name, role in ended.items()}

    def play(self, scenario: str) -> subprocess.Popen[str]:
        """Start the agents of a scenario; the process ends when everything was accepted."""
        settings = FleetSettings(scenario, str(self.folder / "spool"), self.url, self.token)
        if self.kafka is not None:
            settings = replace(settings, kafka=self.kafka.bootstrap, kafka_prefix=self.kafka.prefix)
        (self.folder / "spool").mkdir(exist_ok=True)
        path = settings.write(self.folder / "fleet.json")
        command = [sys.executable, "-m", "tests.support.trials.fleet", str(path)]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def lag(self) -> int:
        """Records in the log that no stream has committed yet."""
        if self.kafka is not None:
            return self._kafka_lag(self.kafka)
        with read(self.engine) as connection:
            ends = connection.execute(select(LogPartition.partition, LogPartition.next_position)).all()
            done = dict(map(tuple, connection.execute(select(StreamPosition.partition, StreamPosition.position))))
        return sum(end - done.get(partition, 0) for partition, end in ends)

    def _kafka_lag(self, kafka: KafkaSettings) -> int:
        with read(self.engine) as connection:
            done = dict(map(tuple, connection.execute(select(StreamPosition.partition, StreamPosition.position))))
        consumer = KafkaConsumer(**client_options(kafka), bootstrap_timeout_ms=2_000)
        try:
            partitions = [TopicPartition(kafka.telemetry_topic, number) for number in range(PARTITIONS)]
            ends = consumer.end_offsets(partitions)
        finally:
            consumer.close(timeout_ms=1_000)
        return sum(end - done.get(one.partition, 0) for one, end in ends.items())

    def undelivered(self) -> int:
        """Messages that are still to be delivered, to whomever."""
        with read(self.engine) as connection:
            return undelivered(connection)[0]

    def outcome(self) -> Outcome:
        return outcome_of(self.engine, RECEIVER)

    def catch_up(self, within_s: float) -> None:
        """Wait until no record waits."""
        until("lag is zero", lambda: self._answers(self.lag) == 0, within_s)

    def settle(self, within_s: float = 60.0) -> float:
        """Wait until everything in the log is processed and every message delivered; returns the seconds it took."""
        began_s = time.monotonic()
        self.catch_up(within_s)
        until("outbox is empty", lambda: self._answers(self.undelivered) == 0, within_s)
        return time.monotonic() - began_s

    @staticmethod
    def _answers(ask: Callable[[], int]) -> int | None:
        """None while the database is away."""
        try:
            return ask()
        except (SQLAlchemyError, StoreBusyError, KafkaError):
            return None

    def _ready(self) -> bool:
        assert self._http is not None
        for name in self.died():
            raise AssertionError(f"{name} ended: {self.roles[name].said()[-2_000:]}")
        try:
            return self._http.client.get("/readyz").status_code == 200
        except httpx2.TransportError:
            return False

    def _pid(self, name: str) -> int:
        if name in self.servers:
            return self.servers[name].pid
        process = self.roles[name].process
        assert process is not None
        return process.pid
