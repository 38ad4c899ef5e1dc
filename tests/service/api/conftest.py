import pytest

from tests.support.service.api import running_api


def pytest_generate_tests(metafunc):
    if "api" in metafunc.fixturenames and getattr(metafunc.module, "ON_BOTH_DATABASES", False):
        metafunc.parametrize("api", ["sqlite", "postgresql"], indirect=True)


@pytest.fixture
def api(request, tmp_path):
    """An api on SQLite; a module that says `ON_BOTH_DATABASES` gets it on each in turn."""
    if getattr(request, "param", "sqlite") == "sqlite":
        with running_api(tmp_path) as api:
            yield api
        return
    with (
        request.getfixturevalue("postgres").migrated() as url,
        running_api(tmp_path, database_url=url) as api,
    ):
        yield api
