"""A migrated database of a test's own."""

import tempfile
from functools import cache
from pathlib import Path

from sqlalchemy import Engine

from rankwatch_service.store.engine import open_engine
from rankwatch_service.store.migrate import upgrade


def new_database(folder: Path) -> Engine:
    file = folder / "rankwatch.db"
    if not file.exists():
        file.write_bytes(_migrated())
    return open_engine(f"sqlite:///{file}")


@cache
def _migrated() -> bytes:
    """The content of a new database. Made once for all tests of a process: migrating takes half a second."""
    with tempfile.TemporaryDirectory() as folder:
        engine = open_engine(f"sqlite:///{folder}/new.db")
        upgrade(engine)
        with engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
        engine.dispose()
        return Path(folder, "new.db").read_bytes()
