"""docker-compose.yml by hand: every service's own command, environment and health check, on this machine's addresses,
until the incidents of its job can be read where a person would read them."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from kafka import KafkaConsumer, TopicPartition
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url

from rankwatch.kafka.settings import partition_of
from rankwatch_service.demo import processes
from tests.support.kafka.broker import Broker, _kafka_node, kafka_broker, missing
from tests.support.service.process import free_port, until
from tests.support.store.postgres import postgres_server
from tests.support.store.postgres_server import Postgres
from tests.support.trials.compose import Container, services

pytestmark = [pytest.mark.integration, pytest.mark.ci, pytest.mark.timeout(400)]

OF_THE_PLACE = (
    "NODE_ID",
    "PROCESS_ROLES",
    "LISTENERS",
    "ADVERTISED",
    "PROTOCOL_MAP",
    "LISTENER_NAMES",
    "VOTERS",
    "LOG_DIRS",
)
"""Settings of Kafka that say where its container is; all others are tried."""

SPEED = 10
"""How fast the simulated job lives here; its faults are minutes apart in the file."""


def broker_settings(service: dict[str, Any]) -> dict[str, str]:
    """The environment of the image as settings of the broker: KAFKA_A_B is a.b."""
    return {
        name.removeprefix("KAFKA_").lower().replace("_", "."): str(value)
        for name, value in service["environment"].items()
        if not any(word in name for word in OF_THE_PLACE)
    }


def make_database(server: Postgres, service: dict[str, Any]) -> str:
    """What the image makes of its environment: a user and a database. Returns HOST:PORT."""
    named = service["environment"]
    where = make_url(server.url()).set(drivername="postgresql+psycopg")
    engine = create_engine(where, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE ROLE {named['POSTGRES_USER']} LOGIN PASSWORD '{named['POSTGRES_PASSWORD']}'"))
        connection.execute(text(f"CREATE DATABASE {named['POSTGRES_DB']} OWNER {named['POSTGRES_USER']}"))
    engine.dispose()
    return f"{where.host}:{where.port}"


class Installation:
    """All of the file's services that are ours, by name."""

    def __init__(self, folder: Path, broker: Broker, database: str, parsed: dict[str, Any]) -> None:
        port = free_port()
        here = {
            "@postgres:5432": f"@{database}",
            "kafka:9092": broker.bootstrap,
            "8770": str(port),
            "0.0.0.0": "127.0.0.1",
            "/var/lib/rankwatch": str(folder / "lib"),
        }
        (folder / "lib").mkdir()
        ours = {name: service for name, service in parsed.items() if service["image"].startswith("rankwatch")}
        self.containers = {name: Container(name, service, folder, here) for name, service in ours.items()}
        self.folder = folder
        self.broker = broker
        self.url = f"http://127.0.0.1:{port}"

    def stop(self) -> dict[str, int]:
        """Stop everything, jobs first; the exit statuses."""
        order = ["simulated", "notify", "stream-1", "stream-2", "api"]
        return {name: self.containers[name].stop() for name in order}


@pytest.fixture
def installation() -> Iterator[Installation]:
    if why := missing("apache"):
        pytest.skip(why)
    parsed = services({"POSTGRES_PASSWORD": secrets.token_hex(24)})
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="rankwatch-compose-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        broker = stack.enter_context(kafka_broker("apache", broker_settings(parsed["kafka"])))
        server = stack.enter_context(postgres_server())
        assert kafka_is_healthy(parsed["kafka"], broker)
        assert postgres_is_healthy(parsed["postgres"], server)
        made = Installation(folder, broker, make_database(server, parsed["postgres"]), parsed)
        stack.callback(processes.end_all, folder.name)
        yield made
        made.stop()


def telemetry_of(job: str, bootstrap: str) -> int:
    """Messages in the partition of a job."""
    consumer = KafkaConsumer(bootstrap_servers=bootstrap, group_id=None)
    partitions = len(consumer.partitions_for_topic("rankwatch.telemetry"))
    place = TopicPartition("rankwatch.telemetry", partition_of(job, partitions))
    end = consumer.end_offsets([place])[place]
    consumer.close()
    return end


def test_the_services_of_the_file_show_the_incidents_of_its_job(installation: Installation) -> None:
    containers = installation.containers
    for _ in range(2):  # it runs at every `up`
        done = containers["migrate"].run()
        assert done.returncode == 0, done.stderr
    for name in ("api", "stream-1", "stream-2", "notify"):
        containers[name].start()
    until("the api is healthy", containers["api"].healthy)
    for name in ("stream-1", "stream-2", "notify"):
        until(f"{name} is healthy", containers[name].healthy)
    containers["simulated"].start(f"--speed={SPEED}")
    token = containers["api"].exec("rankwatch", "token", "create", "me", "--scope", "admin", "--for", "12h").strip()
    client = httpx2.Client(
        base_url=installation.url, headers={"Authorization": f"Bearer {token}"}, trust_env=False, timeout=60
    )

    def incidents(job: str) -> set[tuple[str, tuple[int, ...]]]:
        for container in containers.values():
            if container.name != "migrate":
                container.lives()
        items = client.get("/api/v1/incidents", params={"job": job, "limit": 100}).raise_for_status().json()["items"]
        return {(item["kind"], tuple(item["ranks"])) for item in items}

    wanted = {("straggler", (17,)), ("nonfinite", (40,))}
    until("the simulated job's incidents", lambda: wanted <= incidents("simulated"), 120)
    assert "<title>" in client.get("/", follow_redirects=True).text
    assert telemetry_of("simulated", installation.broker.bootstrap) > 0
    client.close()
    assert installation.stop() == dict.fromkeys(["simulated", "notify", "stream-1", "stream-2", "api"], 0)


def kafka_is_healthy(service: dict[str, Any], broker: Broker) -> bool:
    """Its health check; the image's script runs this class of Kafka's jars."""
    _, script, *arguments = service["healthcheck"]["test"]
    assert Path(script).name == "kafka-broker-api-versions.sh"
    jars = _kafka_node().parent / "lib" / "*"
    main = "org.apache.kafka.tools.BrokerApiVersionsCommand"
    mapped = [part.replace("localhost:9092", broker.bootstrap) for part in arguments]
    return (
        subprocess.run(
            ["java", "-cp", str(jars), main, *mapped], check=False, capture_output=True, timeout=60
        ).returncode
        == 0
    )


def postgres_is_healthy(service: dict[str, Any], server: Postgres) -> bool:
    """Its health check, with this server's port."""
    _, program, *arguments = service["healthcheck"]["test"]
    port = str(make_url(server.url()).port)
    command = [str(server._programs / program), *(part.replace("5432", port) for part in arguments)]
    return subprocess.run(command, check=False, capture_output=True, timeout=5).returncode == 0
