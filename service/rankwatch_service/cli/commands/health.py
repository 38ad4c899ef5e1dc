"""`rankwatch health`: whether a role on this machine works, for health checks of containers."""

from __future__ import annotations

import socket
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final

import typer

from rankwatch_service.cli import output
from rankwatch_service.cli.errors import CliError, Status
from rankwatch_service.cli.options import DATA, DATABASE_URL

if TYPE_CHECKING:
    from sqlalchemy import Engine

SILENT_S: Final = 30.0
"""A stream process reports every few seconds; one that has been silent for this long does not work."""


class Role(StrEnum):
    """Roles without a port; the api has `/readyz`."""

    STREAM = "stream"
    NOTIFY = "notify"


def health(
    role: Annotated[Role, typer.Argument(help="stream: a process on this host; notify: a process on any host.")],
    data: DATA = None,
    database_url: DATABASE_URL = None,
) -> None:
    """Check that a role works, by its last report in the database; exit with 1 if not."""
    from rankwatch_service.cli.configuration import configured_settings
    from rankwatch_service.store.engine import open_engine
    from rankwatch_service.store.errors import StoreError

    engine = open_engine(configured_settings(data_dir=data, database_url=database_url).database_url)
    try:
        silent_s = _stream_silent_s(engine, socket.gethostname()) if role is Role.STREAM else _notify_silent_s(engine)
    except StoreError as error:
        raise CliError(Status.FINDINGS, f"{role}: {error}") from error
    finally:
        engine.dispose()
    if silent_s is None:
        raise CliError(Status.FINDINGS, f"{role}: has never reported")
    if silent_s > SILENT_S:
        raise CliError(Status.FINDINGS, f"{role}: last reported {silent_s:.0f} s ago")
    output.note(f"{role}: reported {max(silent_s, 0.0):.0f} s ago")


def _stream_silent_s(engine: Engine, host: str) -> float | None:
    from sqlalchemy import func, select

    from rankwatch_service.clock import SystemClock
    from rankwatch_service.store.engine import read
    from rankwatch_service.store.models import StreamProcess

    newest = select(func.max(StreamProcess.at_unix_ns)).where(
        StreamProcess.owner.startswith(f"{host}:", autoescape=True)
    )
    with read(engine) as connection:
        at_unix_ns = connection.scalar(newest)
    return None if at_unix_ns is None else (SystemClock().unix_ns() - at_unix_ns) / 1e9


def _notify_silent_s(engine: Engine) -> float | None:
    from sqlalchemy import select

    from rankwatch_service.clock import SystemClock
    from rankwatch_service.notify.lease import LEASE_S
    from rankwatch_service.store.engine import read
    from rankwatch_service.store.models import Lease

    with read(engine) as connection:
        expires_unix_ns = connection.scalar(select(Lease.expires_unix_ns).where(Lease.name == "notify"))
    return None if expires_unix_ns is None else (SystemClock().unix_ns() - expires_unix_ns) / 1e9 + LEASE_S
