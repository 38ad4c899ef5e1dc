"""What the demo stands on: servers of its own that end with it, or given ones that keep nothing of it."""

from __future__ import annotations

import base64
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from kafka import KafkaAdminClient
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url
from standardwebhooks import Webhook
from typer.testing import CliRunner

from rankwatch.kafka.client import opened
from rankwatch.kafka.settings import from_environment
from rankwatch_service.cli.app import app
from rankwatch_service.demo import processes, servers
from rankwatch_service.demo.servers import OWN, POSTGRES, Backing, BackingError, Postgres, PostgresError, stand_on
from rankwatch_service.demo.service import WebhookReceiver
from rankwatch_service.log.kafka_topics import ensure_topics
from rankwatch_service.settings import Settings
from tests.support.service.process import free_port, until
from tests.support.store.postgres import let_others_through


def topics(bootstrap: str) -> set[str]:
    admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    try:
        return set(admin.list_topics())
    finally:
        admin.close()


def test_nothing_is_started_where_sqlite_and_the_sql_log_will_do(tmp_path: Path) -> None:
    with stand_on(Backing(), tmp_path, {"RANKWATCH_KAFKA": "elsewhere:9092"}) as environment:
        assert environment == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.integration
def test_a_broker_and_a_database_of_its_own_run_as_long_as_the_demo(tmp_path: Path) -> None:
    folder = tmp_path / "rankwatch-demo-backing"
    folder.mkdir(mode=0o700)
    let_others_through(tmp_path)
    with stand_on(Backing(OWN, OWN), folder, {}) as environment:
        address = make_url(environment["RANKWATCH_DATABASE_URL"]).set(drivername="postgresql+psycopg")
        engine = create_engine(address)
        with engine.connect() as connection:
            assert connection.scalar(text("SELECT 1")) == 1
        engine.dispose()
        settings = Settings(kafka=environment["RANKWATCH_KAFKA"], kafka_partitions=3)
        assert ensure_topics(settings) == 3
        assert processes.working_for(folder.name)
    assert processes.await_none(folder.name, 10.0)


@pytest.mark.integration
def test_a_given_kafka_has_no_topic_of_the_demo_afterwards(tmp_path: Path, any_broker) -> None:
    before = topics(any_broker.bootstrap)
    with stand_on(Backing(any_broker.bootstrap), tmp_path / "demo-x", {}) as environment:
        kafka = from_environment(environment)
        assert kafka is not None
        assert kafka.prefix == "demo-x"
        ensure_topics(Settings(kafka=kafka.bootstrap, kafka_prefix=kafka.prefix, kafka_partitions=2))
        assert topics(any_broker.bootstrap) - before == {
            f"demo-x.{name}" for name in ("telemetry", "incidents", "dead-letters")
        }
    until("its topics are gone", lambda: topics(any_broker.bootstrap) == before)


def test_a_kafka_that_does_not_answer_is_reported_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankwatch_service.log.kafka_topics.opened", lambda kind, kafka: opened(kind, kafka, 0.5))
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(BackingError) as reported, stand_on(Backing(address), tmp_path, {}):
        pass
    assert address in str(reported.value)
    assert "\n" not in str(reported.value)


def test_a_missing_package_is_named_with_the_way_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "BROKER", "no_such_package")
    with pytest.raises(BackingError, match=r"pip install noida-db"), stand_on(Backing(OWN), tmp_path, {}):
        pass


def test_settings_of_a_given_kafka_are_handed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankwatch_service.log.kafka_topics.remove_topics", lambda _kafka: None)
    given = {"RANKWATCH_KAFKA_COMPRESSION": "lz4", "RANKWATCH_TOKEN": "secret"}
    with stand_on(Backing("k:9092"), tmp_path, given) as environment:
        assert environment["RANKWATCH_KAFKA_COMPRESSION"] == "lz4"
        assert "RANKWATCH_TOKEN" not in environment


def test_an_address_without_its_option_is_a_mistake() -> None:
    result = CliRunner().invoke(app, ["demo", "127.0.0.1:9092"])
    assert result.exit_code != 0
    assert "--kafka HOST:PORT" in str(result.exception)


@pytest.fixture
def private_programs(tmp_path: Path) -> Path:
    """The package as pip lays it out, in a folder of mode 0700 with a space in its name."""
    installed = servers._programs()
    site = tmp_path / "site packages"
    site.mkdir(mode=0o700)
    shutil.copytree(installed.parent, site / POSTGRES / installed.parent.name)
    libraries = installed.parents[2] / f"{POSTGRES}.libs"
    shutil.copytree(libraries, site / libraries.name)
    return site / POSTGRES / installed.parent.name / installed.name


@pytest.mark.integration
def test_a_server_runs_from_programs_that_only_their_owner_may_read(tmp_path, private_programs, monkeypatch):
    let_others_through(tmp_path)
    monkeypatch.setattr(servers, "_programs", lambda: private_programs)
    server = Postgres(tmp_path / "server", {"fsync": "off"})
    server.start()
    try:
        engine = create_engine(make_url(server.url()).set(drivername="postgresql+psycopg"))
        with engine.connect() as connection:
            assert connection.scalar(text("SELECT 1")) == 1
        engine.dispose()
    finally:
        server.stop()


def test_a_folder_that_the_servers_user_cannot_enter_is_named(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    with pytest.raises(PostgresError, match=r"cannot enter .*: set TMPDIR to a folder"):
        servers._require_way_through(private / "server")


SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef01234567").decode()
BODY = json.dumps({"type": "incident.opened", "data": {"id": "inc_1", "transition": {"number": 1}}})


@pytest.fixture
def receiver() -> Iterator[WebhookReceiver]:
    receiver = WebhookReceiver(SECRET)
    yield receiver
    receiver.close()


def signed(body: str, *, age_s: int = 0) -> dict[str, str]:
    from datetime import UTC, datetime

    stamp = int(time.time()) - age_s
    signature = Webhook(SECRET).sign("msg_1", datetime.fromtimestamp(stamp, UTC), body)
    return {"webhook-id": "msg_1", "webhook-timestamp": str(stamp), "webhook-signature": signature}


def post(receiver: WebhookReceiver, body: str, headers: dict[str, str]) -> None:
    assert httpx2.post(receiver.url, content=body, headers=headers).status_code == 204


def test_a_webhook_signed_by_the_reference_library_is_verified(receiver: WebhookReceiver) -> None:
    post(receiver, BODY, signed(BODY))
    (received,) = receiver.received
    assert received.verified
    assert (received.webhook_id, received.type, received.incident) == ("msg_1", "incident.opened", "inc_1")
    assert received.transition == 1


def test_one_of_several_signatures_is_enough(receiver: WebhookReceiver) -> None:
    headers = signed(BODY)
    headers["webhook-signature"] = "v1,bm9wZQ== " + headers["webhook-signature"]
    post(receiver, BODY, headers)
    assert receiver.received[0].verified


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        pytest.param(BODY.replace("inc_1", "inc_2"), signed(BODY), id="another body than the signed one"),
        pytest.param(BODY, signed(BODY) | {"webhook-id": "msg_2"}, id="another id than the signed one"),
        pytest.param(BODY, signed(BODY, age_s=3600), id="an hour old"),
        pytest.param(BODY, {}, id="no signature at all"),
        pytest.param(BODY, signed(BODY) | {"webhook-timestamp": "soon"}, id="a time that is no number"),
        pytest.param("no JSON", signed("no JSON"), id="a signed body that is no JSON"),
        pytest.param("[]", signed("[]"), id="a signed body of another shape"),
    ],
)
def test_a_webhook_is_not_verified_when_it_has(receiver: WebhookReceiver, body: str, headers: dict[str, str]) -> None:
    post(receiver, body, headers)
    assert not receiver.received[0].verified
