"""A stolen database, a receiver in a private network and a page that rebinds its name reveal and reach nothing."""

import shutil
import socket
import time
from pathlib import Path

import pytest
from sqlalchemy import insert, select

from rankwatch_service.access.scopes import Scope
from rankwatch_service.access.tokens import TokenKind, create_token
from rankwatch_service.settings import Settings
from rankwatch_service.store.engine import open_engine, read, write
from rankwatch_service.store.models import Delivery, Outbox
from rankwatch_service.store.rows import outbox_row
from tests.support.service.process import LOGIN, Http, Role, free_port, until
from tests.support.service.webhook_receiver import Answer, webhook_receiver
from tests.support.store.database import new_database
from tests.support.values.incidents import notified

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SECRET_PATH = "T00SECRET/B00SECRET"
REFUSED = 2
"""Exit status of a role that does not start."""


@pytest.fixture(scope="module")
def up(tmp_path_factory):
    role = up_in(tmp_path_factory.mktemp("up"))
    role.start()
    role.url = until("login link", lambda: LOGIN.findall(role.said()))[-1][0]
    yield role
    role.stop()


def up_in(folder: Path, **environment: str) -> Role:
    return Role(folder, "up", "--data", str(folder / "data"), "--port", "0", environment=environment)


class Roles:
    """`api` and `notify` on their own, over one database."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.engine = new_database(folder)
        port = free_port()
        named = {"RANKWATCH_DATA_DIR": str(folder), "RANKWATCH_PORT": str(port)} | environment
        self.api, self.notify = (Role(folder / name, name, environment=named) for name in ("api", "notify"))
        with write(self.engine) as connection:
            _, token = create_token(connection, TokenKind.API, "test", [Scope.ADMIN], time.time_ns())
        self.http = Http(f"http://127.0.0.1:{port}", token)

    def add(self, url: str, name: str = "pager"):
        return self.http.ask("POST", "/api/v1/receivers", json={"name": name, "url": url})

    def outcome(self, receiver: str = "pager") -> tuple[int | None, str]:
        """Status and error of the first try to send this receiver a message."""
        rows = [
            outbox_row(one)
            for one in notified("opened", 1, (receiver,), now_unix_ns=time.time_ns(), id=f"inc_{receiver}")
        ]
        with write(self.engine) as connection:
            connection.execute(insert(Outbox), rows)
        query = select(Delivery.status, Delivery.error).where(Delivery.outbox_id == rows[0]["id"])

        def first():
            with read(self.engine) as connection:
                return connection.execute(query).first()

        return tuple(until("a try", first))

    def stop(self) -> None:
        self.http.close()
        for role in (self.api, self.notify):
            if role.process is not None:
                role.stop()
        self.engine.dispose()


@pytest.fixture
def roles(tmp_path):
    started = []

    def start(**environment: str) -> Roles:
        one = Roles(tmp_path, **environment)
        started.append(one)
        one.api.start()
        return one

    yield start
    for one in started:
        one.stop()


@pytest.fixture
def asking():
    opened = []

    def ask(url: str, token: str) -> Http:
        opened.append(Http(url, token))
        return opened[-1]

    yield ask
    for one in opened:
        one.close()


def head(url: str, *lines: str) -> bytes:
    """The answer to a request with exactly these headers."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as one:
        one.sendall("\r\n".join(["GET /livez HTTP/1.1", *lines, "Connection: close", "", ""]).encode())
        received = b""
        while data := one.recv(65_536):
            received += data
    return received


def test_what_lies_in_the_data_folder_reveals_no_receiver_without_the_secret_key(up, asking):
    http = asking(up.url, up.token())
    body = {"name": "chat", "url": f"https://127.0.0.1:9999/{SECRET_PATH}"}
    made = http.ask("POST", "/api/v1/receivers", json=body, headers={"Idempotency-Key": "once"})
    assert made.status_code == 201, "`rankwatch up` sends webhooks to private addresses"
    secret = made.json()["secret"]
    moved = {"url": f"https://127.0.0.1:9999/{SECRET_PATH}/moved"}
    assert http.ask("PUT", "/api/v1/receivers/chat", json=moved).status_code == 200
    files = [file for file in (up.folder / "data").iterdir() if file.is_file()]
    assert {"rankwatch.db", "rankwatch.db-wal", "secret.key"} <= {file.name for file in files}
    content = b"".join(file.read_bytes() for file in files)
    assert b"receiver.add" in content
    for plain in (SECRET_PATH, secret, secret.removeprefix("whsec_")):
        assert plain.encode() not in content
        assert plain not in up.said()
    assert all(file.stat().st_mode & 0o077 == 0 for file in files)


def test_a_stolen_database_starts_nowhere_without_its_key(tmp_path):
    first = up_in(tmp_path / "first")
    first.start()
    until("login link", lambda: LOGIN.findall(first.said()))
    assert first.stop() == 0
    data = tmp_path / "first" / "data"
    for name, spoil, told in (
        ("without", lambda file: file.unlink(), "is missing"),
        ("other", lambda file: file.write_text("0123456789abcdef" * 4), "is not the one of this database"),
        ("loose", lambda file: file.chmod(0o644), "run `chmod 600 "),
    ):
        shutil.copytree(data, tmp_path / name / "data")
        spoil(tmp_path / name / "data" / "secret.key")
        stolen = up_in(tmp_path / name)
        stolen.start()
        assert stolen.process.wait(60) == REFUSED
        assert told in stolen.said().splitlines()[-1]
    key = (data / "secret.key").read_text().strip()
    (data / "secret.key").unlink()
    again = up_in(tmp_path / "first", RANKWATCH_SECRET_KEY=key)
    again.start()
    until("login link", lambda: len(LOGIN.findall(again.said())) == 2)
    assert again.stop() == 0
    assert key not in again.said()


@pytest.mark.parametrize("mode", [0o755, 0o701])
def test_a_data_folder_that_others_can_enter_is_refused_before_anything_is_stored(tmp_path, mode):
    (tmp_path / "data").mkdir()
    (tmp_path / "data").chmod(mode)
    role = up_in(tmp_path)
    role.start()
    assert role.process.wait(60) == REFUSED
    assert f"chmod 700 {tmp_path / 'data'}" in role.said()
    assert list((tmp_path / "data").iterdir()) == []


def test_an_api_on_its_own_takes_no_receiver_in_a_private_network_by_whatever_name(roles):
    one = roles()
    for host in ("127.0.0.1", "localhost", "127.1", "2130706433", "[::1]", "[::ffff:10.0.0.1]", "10.0.0.1"):
        answer = one.add(f"http://{host}:8080/hook")
        assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json"), host
        assert "RANKWATCH_NOTIFY_ALLOW" in answer.json()["detail"]
    for host in ("169.254.169.254", "[fd00:ec2::254]", "100.100.100.200", "0.0.0.0", "[fe80::1]"):
        assert "must never go" in one.add(f"http://{host}/latest").json()["detail"]
    assert one.http.ask("GET", "/api/v1/receivers").json()["items"] == []


def test_the_list_allows_what_it_names_and_never_a_metadata_service(roles):
    one = roles(RANKWATCH_NOTIFY_ALLOW="127.0.0.0/8, metadata.internal, 169.254.0.0/16")
    assert one.add("http://127.0.0.1:8080/hook").status_code == 201
    assert one.add("http://10.0.0.1/hook", "other").status_code == 422
    assert one.add("http://169.254.169.254/latest", "metadata").status_code == 422


def test_a_name_that_leads_to_a_private_address_later_is_refused_when_it_is_sent_to(roles):
    one = roles(RANKWATCH_NOTIFY_ALLOW="localhost")
    with webhook_receiver() as inside:
        assert one.add(inside.url.replace("127.0.0.1", "localhost")).status_code == 201
        one.notify = Role(one.notify.folder, "notify", environment={"RANKWATCH_DATA_DIR": str(one.api.folder.parent)})
        one.notify.start()
        status, error = one.outcome()
    assert (status, inside.calls) == (None, [])
    assert error.startswith("refused: ")
    assert "is a private address" in error


def test_a_redirect_into_a_private_network_is_not_followed(roles):
    one = roles(RANKWATCH_NOTIFY_ALLOW="127.0.0.1")
    one.notify.start()
    with webhook_receiver() as inside, webhook_receiver(lambda *_: Answer(302, {"location": inside.url})) as outside:
        assert one.add(outside.url).status_code == 201
        assert one.outcome() == (302, "answered 302")
        assert len(outside.calls) == 1
    assert inside.calls == []


def test_a_request_for_another_name_is_refused_as_it_comes_from_a_rebound_page(up):
    port = up.url.rpartition(":")[2]
    for host in (f"evil.example:{port}", "localhost.evil.example", "127.0.0.1.evil.example", f"127.0.0.1:{port}.evil"):
        answer = head(up.url, f"Host: {host}", f"Authorization: Bearer {up.token()}")
        assert answer[:12] in (b"HTTP/1.1 421", b"HTTP/1.1 400"), host
        assert b"application/problem+json" in answer
    assert head(up.url, "Host: evil.example")[:12] == b"HTTP/1.1 421"


def test_a_request_without_a_host_or_with_two_is_refused(up):
    for lines in ((), ("Host:",), ("Host: 127.0.0.1", "Host: evil.example"), ("Host: a@127.0.0.1",)):
        answer = head(up.url, *lines)
        assert answer[:12] == b"HTTP/1.1 400", lines
        assert b"application/problem+json" in answer


def test_requests_by_address_or_by_the_names_of_this_machine_go_on(up):
    port = up.url.rpartition(":")[2]
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}", "10.3.4.5", socket.gethostname()):
        assert head(up.url, f"Host: {host}")[:12] == b"HTTP/1.1 200", host


def test_settings_show_no_secret_in_any_description(tmp_path):
    secrets = {
        "database_url": "postgresql://rankwatch:PASSWORD1@db/rankwatch",
        "kafka_sasl_password": "PASSWORD2",
        "secret_key": "PASSWORD3" * 4,
    }
    settings = Settings(data_dir=tmp_path, **secrets)
    assert "PASSWORD" not in f"{settings!r} {settings}"
    assert "PASSWORD" not in repr(open_engine(settings.database_url))
