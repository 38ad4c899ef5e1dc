"""Says at the end of a run which databases and brokers there were for the fault tests."""

import os
import sqlite3
import subprocess
from importlib.metadata import version

import pytest

from rankwatch_service.demo.servers import PostgresError, _programs
from tests.support.kafka.broker import _kafka_node, missing


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each."""
    terminalreporter.section("databases and brokers of the fault tests")
    for line in (f"SQLite {sqlite3.sqlite_version}", postgres(), apache(), noida()):
        terminalreporter.line(line)


def postgres() -> str:
    given = os.environ.get("RANKWATCH_TEST_POSTGRES", "")
    try:
        told = subprocess.run([_programs() / "postgres", "--version"], capture_output=True, text=True, check=True)
    except (PostgresError, OSError, subprocess.CalledProcessError) as error:
        return f"no PostgreSQL: {error}"
    return told.stdout.strip() + (" and a given server" if given else "")


def apache() -> str:
    given = os.environ.get("RANKWATCH_TEST_KAFKA", "")
    if why := missing("apache"):
        return why
    (jar,) = (_kafka_node().parent / "lib").glob("kafka-clients-*.jar")
    return f"Apache Kafka {jar.stem.removeprefix('kafka-clients-')}" + (f" and the one at {given}" if given else "")


def noida() -> str:
    return missing("noida") or f"noida-db {version('noida-db')}"
