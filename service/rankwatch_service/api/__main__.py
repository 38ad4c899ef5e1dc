"""`python -m rankwatch_service.api` prints the OpenAPI description."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from rankwatch_service.access.secret_key import load_secret_key
from rankwatch_service.api.app import create_app
from rankwatch_service.api.ingest import Batcher
from rankwatch_service.api.openapi import text
from rankwatch_service.clock import SystemClock
from rankwatch_service.log.sql_log import SqlLog
from rankwatch_service.settings import Settings
from rankwatch_service.store.engine import open_engine
from rankwatch_service.store.migrate import upgrade


def main() -> None:
    """Describe the api over an empty database."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(data_dir=Path(folder), database_url=f"sqlite:///{folder}/empty.db")
        engine, clock = open_engine(settings.database_url), SystemClock()
        upgrade(engine)
        intake, secret_key = Batcher("append", SqlLog(engine, clock).append), load_secret_key(settings, engine, clock)
        sys.stdout.write(text(create_app(settings, engine, intake, clock, secret_key)))
        engine.dispose()


if __name__ == "__main__":
    main()
