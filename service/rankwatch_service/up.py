"""`rankwatch up`: starts all roles of the service on this machine, without configuration and by default on SQLite."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Final

from rankwatch import children
from rankwatch.trust import Trust, pin_of
from rankwatch_service.access.secret_key import load_secret_key
from rankwatch_service.access.sessions import LOGIN_S, issue_login
from rankwatch_service.access.token_files import ensure_token_file, write_secret
from rankwatch_service.access.tokens import TokenKind
from rankwatch_service.clock import Clock, SystemClock
from rankwatch_service.settings import Settings, as_environment, local_config
from rankwatch_service.store.engine import open_engine, write
from rankwatch_service.store.migrate import upgrade
from rankwatch_service.supervise import Supervisor
from rankwatch_service.text_log import configure

ROLES: Final = ("api", "stream", "notify")
START_S: Final = 30.0
"""How long to wait for the api before the addresses are printed anyway."""


LOCK_NAME: Final = "up.lock"
"""File in the data folder that a running `up` has locked."""


class UpError(Exception):
    """The service cannot be started; the message says why and what to do."""


def run(settings: Settings) -> None:
    """Start all roles and supervise them until SIGTERM or SIGINT.

    Raises:
        UpError: the data folder is in use or cannot be written, or the port is taken.
        SecretKeyError: see `load_secret_key`.
    """
    configure(settings.log_level, "up")
    clock = SystemClock()
    with data_folder(settings.data_dir):
        settings = _with_private_targets(_with_port(settings))
        login = prepare(settings, clock)
        roles = {role: children.python_module("rankwatch_service", role) for role in ROLES}
        supervisor = Supervisor(roles, {**os.environ, **as_environment(settings)}, clock)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: supervisor.stop())
        supervisor.start()
        _wait_until_live(settings, clock)
        # To stdout only, since the text log may be stored elsewhere and this is a secret.
        sys.stdout.write(
            f"rankwatch is up at {settings.public_url}\n"
            f"log in once at     {settings.public_url}/login#{login}\n"
            f"                   within {LOGIN_S // 60} minutes; `rankwatch token login` prints another link\n"
            f"data folder        {settings.data_dir}\n"
        )
        sys.stdout.flush()
        supervisor.run()


def prepare(settings: Settings, clock: Clock) -> str:
    """Migrate the database, and write the files by which agents and commands find the service.

    Returns:
        A new login token.
    """
    engine = open_engine(settings.database_url, "up")
    upgrade(engine)
    load_secret_key(settings, engine, clock)
    ingest = ensure_token_file(engine, settings.ingest_token_path, clock, TokenKind.INGEST)
    if settings.ingest_config is not None:
        local = ensure_token_file(engine, settings.local_token_path, clock, TokenKind.LOCAL)
        address = {"url": settings.public_url, "token": ingest} | _trust(settings)
        _write_address(settings.ingest_config, address)
        places = {"database_url": settings.database_url, "data_dir": str(settings.data_dir)}
        _write_address(local_config(settings.ingest_config), address | {"token": local} | places)
    with write(engine) as connection:
        login = issue_login(connection, "up", clock.unix_ns())
    engine.dispose()
    return login


def _trust(settings: Settings) -> dict[str, object]:
    """What clients on this machine need besides: the certificate to expect, or that none is wanted."""
    if settings.tls_cert is not None:
        return {"certificate": str(settings.tls_cert)}
    return {"insecure": True} if settings.insecure else {}


def _write_address(path: Path, content: Mapping[str, object]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_secret(path, json.dumps(content) + "\n")
    except OSError as error:
        raise UpError(
            f"{path} cannot be written ({error.strerror}); agents and commands on this machine find the service by it;"
            " set RANKWATCH_INGEST_CONFIG to a file in a writable folder"
        ) from error


@contextmanager
def data_folder(path: Path) -> Iterator[None]:
    """Create the data folder, and lock it against another `rankwatch up`.

    Raises:
        UpError: it cannot be used, others can read it, or another `rankwatch up` uses it.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (mode := stat.S_IMODE(path.stat().st_mode)) & 0o077:
            raise UpError(
                f"other users of this machine can read the data folder {path} (mode {mode:04o}), which holds tokens "
                f"and the secrets of receivers: run `chmod 700 {path}`"
            )
        lock = open(os.open(path / LOCK_NAME, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), "w")  # noqa: SIM115
    except OSError as error:
        raise UpError(f"the data folder {path} cannot be used: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UpError(f"`rankwatch up` is already running on {path}; choose another folder with --data") from error
        yield


def _with_port(settings: Settings) -> Settings:
    """The settings with a port that is free; for port 0 the system chooses one."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            where = f"{settings.host}:{settings.port}"
            raise UpError(
                f"cannot listen on {where} ({error.strerror}); choose another with --host or --port"
            ) from error
        port = probe.getsockname()[1]
    if port == settings.port:
        return settings
    changes: Mapping[str, object] = {
        "port": port,
        "public_url": settings.public_url.removesuffix(f":{settings.port}") + f":{port}",
    }
    return settings.model_copy(update=dict(changes))


def _with_private_targets(settings: Settings) -> Settings:
    """The settings, with webhooks to private addresses allowed by default: Alertmanager usually has one."""
    if "notify_allow_private" in settings.model_fields_set:
        return settings
    return settings.model_copy(update={"notify_allow_private": True})


def _wait_until_live(settings: Settings, clock: Clock) -> None:
    deadline_s = clock.monotonic_s() + START_S
    while clock.monotonic_s() < deadline_s:
        connection = _connection(settings)
        try:
            connection.request("GET", "/livez")
            if connection.getresponse().status == 200:
                return
        except (OSError, HTTPException):
            clock.sleep(0.05)
        finally:
            connection.close()


def _connection(settings: Settings) -> HTTPConnection:
    """A connection to the api that was just started."""
    if settings.tls_cert is None:
        return HTTPConnection(settings.host, settings.port, timeout=1.0)
    context = Trust(pin_of(settings.tls_cert)).context()
    return HTTPSConnection(settings.host, settings.port, timeout=1.0, context=context)
