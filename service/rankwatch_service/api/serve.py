"""The api process."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Final

import structlog
import uvicorn
from fastapi import FastAPI
from sqlalchemy import Engine

from rankwatch_service.access.secret_key import SecretKey, load_secret_key
from rankwatch_service.api.app import create_app
from rankwatch_service.api.dependencies import Context
from rankwatch_service.api.garbage import collect_in_parts
from rankwatch_service.api.http.connection import Connections, TlsServer
from rankwatch_service.api.http.turns import SWITCH_S
from rankwatch_service.api.ingest import Batcher
from rankwatch_service.api.people_process import PeopleProcess
from rankwatch_service.certificate import LOOK_EVERY_S, ServedCertificate
from rankwatch_service.clock import Clock, SystemClock
from rankwatch_service.log.sql_log import SqlLog
from rankwatch_service.settings import Settings
from rankwatch_service.store.engine import open_engine
from rankwatch_service.store.migrate import once_it_answers, upgrade
from rankwatch_service.text_log import configure

KEEP_ALIVE_S: Final = 75
DRAIN_S: Final = 5
"""How long running requests may take after SIGTERM. Event streams end at once."""

_log = structlog.get_logger(__name__)


class _Server(TlsServer):
    """Ends event streams on a signal; uvicorn would wait for them."""

    def __init__(
        self,
        config: uvicorn.Config,
        connections: Connections,
        certificate: ServedCertificate | None,
        context: Context,
        people: PeopleProcess,
    ) -> None:
        super().__init__(config, connections, (lambda: certificate.context) if certificate else None)
        self._context = context
        self._people = people

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop serving; gracefully at the first signal."""
        # Runs in the main thread, between two callbacks of the event loop.
        self._context.changes.stop()
        self._people.end()
        super().handle_exit(sig, frame)


def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        StoreBusyError: see `once_it_answers`.
        SecretKeyError: see `load_secret_key`.
        CertificateError: the certificate cannot be used.
    """
    configure(settings.log_level, "api")
    sys.setswitchinterval(SWITCH_S)
    engine = open_engine(settings.database_url, "api")
    clock = SystemClock()
    people = PeopleProcess(settings, clock)

    def begin() -> FastAPI:
        upgrade(engine)
        secret_key = load_secret_key(settings, engine, clock)
        return _application(settings, engine, clock, secret_key, people.socket)

    app = once_it_answers(begin, clock)
    certificate = _certificate(settings, clock)
    connections = Connections(
        lambda reason: app.state.context.counters.connections_closed.labels(reason).inc(), app.state.context.budgets
    )
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,  # its lines take the form of ours
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        http=connections.protocol,  # type: ignore[arg-type] # called like the class that uvicorn expects
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=DRAIN_S,
    )
    _log.info("api_started", host=settings.host, port=settings.port, tls=certificate is not None)
    server = _Server(config, connections, certificate, app.state.context, people)
    # uvicorn handles these signals, and raises them again after it has stopped: they must not kill us then.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.handle_exit)
    people.start()
    collect_in_parts(clock)
    server.run()
    people.stop()
    engine.dispose()


def _certificate(settings: Settings, clock: Clock) -> ServedCertificate | None:
    """The certificate of the settings, kept up to date by a thread; None without TLS."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    certificate = ServedCertificate(settings.tls_cert, settings.tls_key)

    def keep_current() -> None:
        while True:
            clock.sleep(LOOK_EVERY_S)
            certificate.look()

    threading.Thread(target=keep_current, name="certificate", daemon=True).start()
    return certificate


def _application(settings: Settings, engine: Engine, clock: Clock, secret_key: SecretKey, people: Path) -> FastAPI:
    kafka = settings.kafka_settings()
    if kafka is None:
        return create_app(settings, engine, Batcher("append", SqlLog(engine, clock).append), clock, secret_key, people)
    # Imported here because the Kafka client is an optional extra.
    from rankwatch_service.api.kafka_intake import KafkaIntake, ProducerCollector  # noqa: PLC0415
    from rankwatch_service.log.kafka_topics import ensure_topics_soon  # noqa: PLC0415

    ensure_topics_soon(settings, clock)
    intake = KafkaIntake(kafka)
    app = create_app(settings, engine, intake, clock, secret_key, people)
    app.state.context.counters.registry.register(ProducerCollector(intake.producer))
    return app
