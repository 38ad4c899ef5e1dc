"""A migrated database of a test's own."""

from pathlib import Path

from sqlalchemy import Engine

from rankwatch_service.store.engine import open_engine
from rankwatch_service.store.migrate import upgrade


def new_database(folder: Path) -> Engine:
    engine = open_engine(f"sqlite:///{folder}/rankwatch.db")
    upgrade(engine)
    return engine
