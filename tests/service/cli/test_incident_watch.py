"""`rankwatch incidents watch`, in a pipe and at a real terminal."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import insert

from rankwatch_service.cli.client import CliClient
from rankwatch_service.cli.errors import CliError, Status
from rankwatch_service.orders import commands
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Incident
from tests.support.service.api import served_api
from tests.support.values.incidents import incident_row

WITHIN_S = 60.0


@pytest.fixture
def api(tmp_path) -> Iterator[Any]:
    with served_api(tmp_path) as (api, url):
        api.url = url
        yield api


def open_incident(api: Any, name: str, kind: str = "hang", what: str = "opened") -> None:
    """As stream commits it: the row, and what the feed says of it."""
    with write(api.engine) as connection:
        row = incident_row(id=name, job="gpt", kind=kind, summary=f"{kind} of rank 3", severity="critical")
        connection.execute(insert(Incident).values(**row))
        change = {"id": name, "kind": kind, "state": "open", "what": what, "severity": "critical"}
        commands.publish(connection, "incident", "gpt", change, 2 * 10**18)


@pytest.fixture
def happening(api, monkeypatch):
    """Opens incidents once a watcher listens, and interrupts it when it has received all of them."""
    listening = CliClient.events

    def happening(*kinds: str) -> None:
        def events(client: CliClient, after: int | None) -> Iterator[tuple[str, int, dict[str, Any]]]:
            heard = 0
            for topic, at, data in listening(client, after):
                yield topic, at, data
                if topic == "hello":
                    for number, kind in enumerate(kinds):
                        open_incident(api, f"inc_000{number}", kind)
                heard += topic == "incident"
                if heard == len(kinds):
                    raise KeyboardInterrupt

        monkeypatch.setattr(CliClient, "events", events)

    return happening


def test_in_a_pipe_each_change_is_a_line(rankwatch, happening):
    happening("hang", "straggler")
    status, out, _ = rankwatch("incidents", "watch")
    assert status == 0
    first, second = out.splitlines()
    assert first.startswith("2033-05-18 03:33:20Z opened critical")
    assert first.endswith("gpt: hang of rank 3")
    assert "straggler of rank 3" in second


def test_of_other_kinds_and_jobs_nothing_is_printed(rankwatch, happening):
    happening("hang", "straggler")
    status, out, _ = rankwatch("incidents", "watch", "--kind", "straggler", "--json")
    (line,) = map(json.loads, out.splitlines())
    assert (status, line["what"], line["incident"]["kind"]) == (0, "opened", "straggler")


def test_a_wrong_token_ends_it(terminal, api):
    status, _, err = terminal.run("incidents", "watch", "--url", api.url, "--token", "rankwatch_api_wrong")
    assert (status, "401" in err) == (4, True)


def test_changes_that_came_while_the_connection_was_broken_follow(rankwatch, api, happening, monkeypatch):
    happening("hang")
    whole = CliClient.events
    calls: list[int | None] = []

    def breaking(client: CliClient, after: int | None) -> Iterator[tuple[str, int, dict[str, Any]]]:
        calls.append(after)
        if len(calls) == 1:
            yield "hello", 0, {}
            open_incident(api, "inc_0009", "corruption")
            raise CliError(Status.UNREACHABLE, "reset by peer")
        if len(calls) == 2:
            raise CliError(Status.UNREACHABLE, "does not answer")
        yield from whole(client, after)

    monkeypatch.setattr(CliClient, "events", breaking)
    monkeypatch.setattr("rankwatch_service.cli.commands.incidents.RETRY_S", 0.0)
    status, out, err = rankwatch("incidents", "watch")
    assert (status, calls) == (0, [None, 0, 0])
    assert err.count("trying again") == 1, "an outage is told once"
    assert "reset by peer; trying again" in err
    assert "the service answers again" in err
    assert "corruption of rank 3" in out


@pytest.mark.integration
def test_at_a_terminal_the_list_is_kept_up_to_date(api, to, tmp_path):
    ours, theirs = pty.openpty()
    environment = os.environ | {"XDG_CONFIG_HOME": str(tmp_path), "COLUMNS": "160", "TERM": "xterm"}
    command = [sys.executable, "-m", "rankwatch_service", "incidents", "watch", *to]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = ""

        def until(text: str) -> None:
            nonlocal shown
            deadline_s = time.monotonic() + WITHIN_S
            while text not in shown:
                assert time.monotonic() < deadline_s, shown
                shown += os.read(ours, 4096).decode(errors="replace")

        until("no unresolved incidents")
        open_incident(api, "inc_0001")
        until("1 critical · 0 warning")
        until("hang of rank 3")
        process.send_signal(signal.SIGINT)
        assert process.wait(WITHIN_S) == 0
    os.close(ours)
