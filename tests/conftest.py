"""Fixtures that all tests may take."""

from hypothesis import settings

from tests.support.database import database_url, empty_database_url, engine
from tests.support.kafka_broker import any_broker, apache, broker, shared_brokers
from tests.support.postgres import postgres
from tests.support.service_process import no_role_outlives_its_test
from tests.support.text_log import no_text_log_outlives_its_test

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

# The same examples in every run, however slow the machine is at the moment: what fails here fails everywhere. New ones
# are looked for with `pytest --hypothesis-profile=default`.
settings.register_profile("same", deadline=None, derandomize=True, database=None)
settings.load_profile("same")
