"""Fixtures that all tests may take."""

from tests.support.database import database_url, empty_database_url, engine
from tests.support.kafka_broker import any_broker, apache, broker, shared_brokers
from tests.support.postgres import postgres

__all__ = [
    "any_broker",
    "apache",
    "broker",
    "database_url",
    "empty_database_url",
    "engine",
    "postgres",
    "shared_brokers",
]
