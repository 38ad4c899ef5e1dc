"""A stream over SQLite; deleted jobs, on both databases, have a `service` of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rankwatch_service.stream.loop import Stream
from tests.support.service.stream import Service
from tests.support.store.database import new_database


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    service = Service(new_database(tmp_path))
    yield service
    service.engine.dispose()


@pytest.fixture
def stream(service: Service) -> Stream:
    """It has begun with an empty log."""
    return service.started()
