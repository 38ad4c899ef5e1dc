import pytest

from tests.support.service.api import running_api


@pytest.fixture(params=["sqlite", "postgresql"])
def api(request, tmp_path):
    """An api on each database in turn."""
    if request.param == "sqlite":
        with running_api(tmp_path) as api:
            yield api
        return
    with request.getfixturevalue("postgres").migrated() as url, running_api(tmp_path, database_url=url) as api:
        yield api
