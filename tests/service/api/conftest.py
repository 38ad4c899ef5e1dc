import pytest

from tests.support.api import running_api


@pytest.fixture
def api(tmp_path):
    with running_api(tmp_path) as api:
        yield api
