import pytest

from rankwatch_service.clock import SystemClock
from tests.support.service.api import running_api


def pytest_generate_tests(metafunc):
    if "api" in metafunc.fixturenames and getattr(metafunc.module, "ON_BOTH_DATABASES", False):
        metafunc.parametrize("api", ["sqlite", "postgresql"], indirect=True)


@pytest.fixture
def api(request, tmp_path):
    """An api on SQLite. A module with `ON_BOTH_DATABASES` gets it on each in turn, one with a `CLOCK` on that clock."""
    clock = getattr(request.module, "CLOCK", SystemClock)()
    if getattr(request, "param", "sqlite") == "sqlite":
        with running_api(tmp_path, clock) as api:
            yield api
        return
    with (
        request.getfixturevalue("postgres").migrated() as url,
        running_api(tmp_path, clock, database_url=url) as api,
    ):
        yield api
