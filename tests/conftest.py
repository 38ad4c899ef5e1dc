"""Fixtures that all tests may take."""

import gc
import signal
from collections.abc import Iterator

import pytest
import pytest_randomly
from hypothesis import settings

from tests.support.clock import FakeClock
from tests.support.kafka.broker import any_broker, apache, broker, shared_brokers
from tests.support.service.process import no_role_outlives_its_test, no_text_log_outlives_its_test
from tests.support.store.database import database_url, empty_database_url, engine
from tests.support.store.postgres import postgres

__all__ = [
    "any_broker",
    "apache",
    "broker",
    "database_url",
    "empty_database_url",
    "engine",
    "no_role_outlives_its_test",
    "no_text_log_outlives_its_test",
    "postgres",
    "shared_brokers",
]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, else one process would still run such a file when the others have ended."""
    slow = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("ci")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """What the test files import stays to the end, and need not be searched for garbage.

    With torch and the frameworks loaded each whole collection takes a second, and a Trainer asks for two.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def data_folder_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Roles that are given no data folder keep their secret key in one of this session, not in the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield


# A shell has its background jobs ignore SIGINT, which their children inherit; some tests are about it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# DeepSpeed brings a seeder of random states, which would import torch into every test process.
pytest_randomly.entrypoint_reseeds = []

# The same examples in every run, however slow the machine is at the moment: what fails here fails everywhere. New ones
# are looked for with `pytest --hypothesis-profile=default`.
settings.register_profile("same", deadline=None, derandomize=True, database=None)
settings.load_profile("same")
