"""What a shell offers after a Tab."""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import insert

from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Incident, Job
from tests.support.service.served_api import served_api
from tests.support.values.incidents import NOON_UNIX_NS, incident_row


@pytest.fixture(scope="module")
def api(tmp_path_factory) -> Iterator[Any]:
    with served_api(tmp_path_factory.mktemp("api")) as (api, url):
        api.url = url
        times = {"first_seen_unix_ns": NOON_UNIX_NS, "last_seen_unix_ns": NOON_UNIX_NS}
        columns = {"state": "running", "attempt": "a.0", "world_size": 4, "ranks_reporting": 4, "loss": None}
        with write(api.engine) as connection:
            for name in ("gpt-small", "gpt-large", "vit"):
                connection.execute(insert(Job).values(name=name, step=5, step_time_s=0.1, **columns, **times))
            connection.execute(insert(Incident).values(**incident_row(id="inc_77aa", summary="rank 3 hangs")))
        yield api


def offered(url: str, token: str, typed: str, **more: str) -> str:
    """What bash is told for a line that is not complete."""
    environment = os.environ | {
        "RANKWATCH_URL": url,
        "RANKWATCH_TOKEN": token,
        "_RANKWATCH_COMPLETE": "complete_zsh",
        "_TYPER_COMPLETE_ARGS": typed,
    }
    script = "import sys; sys.argv[0] = 'rankwatch'; from rankwatch_service.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", script], env=environment | more, capture_output=True, text=True, timeout=60, check=False
    ).stdout


@pytest.mark.parametrize("command", ["pause", "jobs show", "checkpoints"])
def test_jobs_are_offered_by_their_names(api, command):
    found = offered(api.url, api.admin, f"rankwatch {command} gpt")
    assert ("gpt-small" in found, "gpt-large" in found, "vit" in found) == (True, True, False)


def test_incidents_are_offered_with_their_summaries(api):
    assert "rank 3 hangs" in offered(api.url, api.admin, "rankwatch incidents show ")


def test_a_service_that_is_away_offers_nothing(tmp_path):
    assert "gpt" not in offered("http://127.0.0.1:1", "x", "rankwatch pause ", XDG_CONFIG_HOME=str(tmp_path))
