"""Fixtures that all tests may take."""

from tests.support.database import database_url, empty_database_url, engine
from tests.support.postgres import postgres

__all__ = ["database_url", "empty_database_url", "engine", "postgres"]
