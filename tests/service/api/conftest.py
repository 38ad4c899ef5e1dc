from contextlib import ExitStack

import pytest

from rankwatch_service.clock import SystemClock
from tests.support.service.api import running_api
from tests.support.trials.selection import in_ci


def pytest_generate_tests(metafunc):
    if "api" in metafunc.fixturenames and getattr(metafunc.module, "ON_BOTH_DATABASES", False):
        metafunc.parametrize("api", ["sqlite", *in_ci(["postgresql"])], indirect=True)


@pytest.fixture
def api_settings():
    """Settings of the service that are not the usual ones."""
    return {}


@pytest.fixture
def api(request, tmp_path, api_settings):
    """An api on SQLite. A module with `ON_BOTH_DATABASES` gets it on each, one with a `CLOCK` on that clock."""
    clock = getattr(request.module, "CLOCK", SystemClock)()
    with ExitStack() as stack:
        url = ""
        if getattr(request, "param", "sqlite") == "postgresql":
            url = stack.enter_context(request.getfixturevalue("postgres").migrated())
        yield stack.enter_context(running_api(tmp_path, clock, database_url=url, **api_settings))
