"""A real HTTP server that accepts what agents send and answers as a test wants: the api as an agent sees it."""

from __future__ import annotations

import contextlib
import http.server
import os
import socket
import ssl
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import numpy as np
import pytest
from kafka import KafkaConsumer, TopicPartition

from rankwatch import wire
from rankwatch.kafka.settings import KafkaSettings, client_options
from rankwatch.signed import Purpose, code_of, nonce_of, proof_of, split
from rankwatch_service.log.kafka_topics import ensure_topics
from rankwatch_service.settings import Settings
from tests.support.kafka.broker import Broker, new_prefix

TOKEN = "rankwatch_test_token"
KEY = bytes(range(16))
"""Its enrolment key."""


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until it holds; fail when it does not within this time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.01)


def decoded(body: bytes) -> wire.Batch:
    """A batch as an agent sends it, whether it has enrolled or not."""
    signed = split(body)
    return wire.decode_batch(signed.message if signed else body)


def rows(batch: wire.Batch) -> Iterator[tuple[str, int, int]]:
    """(attempt, step, rank) of every step record of a batch."""
    if batch.steps is not None:
        columns = batch.steps.columns
        steps, ranks = (
            np.frombuffer(columns[name].data, "<" + columns[name].dtype).astype(int) + columns[name].base
            for name in ("step", "rank")
        )
        for step, rank in zip(steps, ranks, strict=True):
            yield batch.attempt, int(step), int(rank)


class AgentService:
    """The server; `stop` and `start` are an outage, on the same port."""

    def __init__(self, tls: ssl.SSLContext | None = None, port: int = 0) -> None:
        self._tls = tls
        self.batches: list[wire.Batch] = []
        self.views: list[wire.View] = []
        self.tokens: list[str] = []
        self.status = 202
        self.retry_after: str | None = None
        self.silent = threading.Event()
        """Set: requests are accepted and never answered."""
        self.streaming = True
        """Whether the command stream is offered."""
        self.agents: dict[str, tuple[str, bytes]] = {}
        """(host, secret) of each agent that has enrolled, by its id."""
        self.host_keys: dict[str, str] = {}
        """Of each host, by its id."""
        self.enrolment_key = KEY
        """By which it proves itself to agents that enrol; empty: it gives no proof."""
        self.enrols = True
        """Whether agents can enrol; False: it knows no enrolment, and takes messages that are not signed."""
        self._orders = wire.Orders()
        self._changed = threading.Condition()
        self._port = port
        self._server: http.server.ThreadingHTTPServer | None = None
        self._sockets: set[socket.socket] = set()
        self._answering = threading.Lock()
        """Held from taking a request to its answer: an outage never falls between them."""

    @property
    def port(self) -> int:
        return self._port

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self._port}"

    @property
    def environment(self) -> dict[str, str]:
        return {"RANKWATCH_URL": self.url, "RANKWATCH_TOKEN": f"{TOKEN}.k{KEY.hex()}"}

    def start(self) -> AgentService:
        service = self

        class Handler(_Handler):
            api = service

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, request: Any, client_address: Any) -> None:
                return  # an agent that went away in mid-request

        self._server = Server(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_port
        if self._tls is not None:
            listener = self._server.socket
            # Each handler's thread shakes hands, so that a client that does not cannot stop the others.
            self._server.socket = self._tls.wrap_socket(listener, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def stop(self) -> None:
        if self._server is None:
            return
        self._server.shutdown()
        self._server.server_close()
        with self._answering:
            self._server = None
            for each in list(self._sockets):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        with self._changed:
            self._changed.notify_all()

    def order(self, *orders: wire.OrderView, **fields: Any) -> None:
        """Say this to all streams, and in every answer to a view, from now on."""
        with self._changed:
            self._orders = wire.Orders(orders, **fields)
            self._changed.notify_all()

    def reported(self, agent: str, nonce: str, sequence: int) -> str:
        """The orders as JSON, signed for this agent; without an agent as they are."""
        orders = msgspec.json.encode(self._orders).decode()
        if agent not in self.agents:
            return orders
        reported = wire.SignedOrders(orders, nonce, sequence, time.time_ns())
        code = code_of(Purpose.ORDERS, agent, self.agents[agent][1], reported.signed_part())
        return msgspec.json.encode(msgspec.structs.replace(reported, code=code.hex())).decode()

    def rows(self) -> Counter[tuple[str, int, int]]:
        return Counter(row for batch in list(self.batches) for row in rows(batch))

    def events(self, kind: str) -> list[wire.Event]:
        return [event for batch in list(self.batches) for event in batch.events if event.kind == kind]

    def lost(self) -> Counter[str]:
        total = Counter[str]()
        for event in self.events("records_lost"):
            total[event.fields["reason"]] += event.fields["count"]
        return total

    def __enter__(self) -> AgentService:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Handler(http.server.BaseHTTPRequestHandler):
    api: AgentService
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.api._sockets.add(self.connection)

    def finish(self) -> None:
        self.api._sockets.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        while self.api.silent.is_set():
            time.sleep(0.02)
        with self.api._answering:
            if self.api._server is not None:
                self._take(body)

    def _take(self, body: bytes) -> None:
        self.api.tokens.append(self.headers["Authorization"])
        if self.path.endswith("/agents/enrol"):
            self._enrol(msgspec.json.decode(body, type=wire.EnrolmentRequest))
            return
        views = self.path.endswith("/agents/view")
        signed = split(body)
        if self.api.enrols:
            # As strict as the api, so that every test of an agent is one of its signatures too.
            if signed is None or signed.agent not in self.api.agents:
                self._answer(409, b'{"detail": "enrol again"}')
                return
            secret = self.api.agents[signed.agent][1]
            if not signed.is_by(secret, Purpose.VIEW if views else Purpose.BATCH):
                self._answer(403, b'{"detail": "not the signature of this agent"}')
                return
        message = signed.message if signed else body
        if views:
            self.api.views.append(msgspec.msgpack.decode(message, type=wire.View))
            agent = signed.agent if signed else ""
            self._answer(200, self.api.reported(agent, nonce_of(body), 0).encode())
            return
        status = self.api.status
        if status == 202:
            self.api.batches.append(wire.decode_batch(message))
        self._answer(status, b'{"accepted": true}' if status == 202 else b'{"title": "no"}')

    def _enrol(self, asked: wire.EnrolmentRequest) -> None:
        if not self.api.enrols:
            self._answer(404, b'{"detail": "not found"}')
            return
        shown = bytes.fromhex(self.api.host_keys.get(asked.host_id, ""))
        is_known = bool(shown) and asked.host_proof == proof_of(shown, asked.nonce, asked.job, asked.host)
        host_id = asked.host_id if is_known else os.urandom(4).hex()
        host_key = self.api.host_keys.setdefault(host_id, os.urandom(32).hex())
        agent, secret = host_id + os.urandom(4).hex(), os.urandom(32)
        self.api.agents[agent] = (asked.host, secret)
        key = self.api.enrolment_key
        proof = proof_of(key, asked.nonce, agent, secret.hex()) if key else ""
        self._answer(201, msgspec.json.encode(wire.Enrolled(agent, secret.hex(), proof, host_key)))

    def do_GET(self) -> None:
        if not self.api.streaming:
            self._answer(503, b"")
            return
        asked = {name: value for name, [value] in parse_qs(urlsplit(self.path).query).items()}
        request = bytes.fromhex(asked.get("signed", ""))
        signed = split(request)
        agent = signed.agent if signed else ""
        if self.api.enrols and not (
            signed and agent in self.api.agents and signed.is_by(self.api.agents[agent][1], Purpose.LISTEN)
        ):
            self._answer(409, b'{"detail": "enrol again"}')
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.close_connection = True
        said: list[wire.Orders] = []
        sequence = 0
        server = self.api._server
        with contextlib.suppress(OSError):
            while self.api._server is server:
                with self.api._changed:
                    self.api._changed.wait_for(lambda: [self.api._orders] != said, 0.5)
                    said[:] = [self.api._orders]
                data = self.api.reported(agent, nonce_of(request), sequence)
                self.wfile.write(f"event: orders\ndata: {data}\n\n".encode())
                sequence += 1

    def log_message(self, *_: object) -> None:
        return

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        if self.api.retry_after is not None:
            self.send_header("Retry-After", self.api.retry_after)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def small_disk(folder: Path, size_kb: int) -> Iterator[Path]:
    """A folder in `folder` that holds no more; skips where we may not mount one, as in most containers."""
    disk = folder / "disk"
    disk.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={size_kb}k", "tmpfs"]
    mounted = subprocess.run(["mount", *options, disk], capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


class _Silence:
    """Set: connections are taken (by the kernel) and nothing is answered."""

    def __init__(self, broker: Broker) -> None:
        self.set = broker.pause
        self.clear = broker.resume


class KafkaSink:
    """The telemetry topic of a broker of the test's own."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._kafka = KafkaSettings(broker.bootstrap, new_prefix())
        ensure_topics(Settings(kafka=self._kafka.bootstrap, kafka_prefix=self._kafka.prefix, kafka_partitions=1))
        self._consumer = KafkaConsumer(**client_options(self._kafka), auto_offset_reset="earliest")
        self._consumer.assign([TopicPartition(self._kafka.telemetry_topic, 0)])
        self._batches: list[wire.Batch] = []
        self.silent = _Silence(broker)
        self.start, self.stop = broker.start, broker.kill

    @property
    def environment(self) -> dict[str, str]:
        # The service itself is not there: orders and views go nowhere.
        kafka = {"RANKWATCH_KAFKA": self._kafka.bootstrap, "RANKWATCH_KAFKA_PREFIX": self._kafka.prefix}
        return kafka | {"RANKWATCH_URL": "http://127.0.0.1:9", "RANKWATCH_TOKEN": TOKEN}

    @property
    def batches(self) -> list[wire.Batch]:
        """Every message so far, in order."""
        while found := self._consumer.poll(timeout_ms=200):
            self._batches += [decoded(message.value) for some in found.values() for message in some]
        return self._batches

    def close(self) -> None:
        self._consumer.close(autocommit=False, timeout_ms=2_000)
