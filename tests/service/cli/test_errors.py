"""What a command line with a mistake is answered with: one line, in our words, with what was probably meant."""

import json
import threading
from http.server import HTTPServer, SimpleHTTPRequestHandler

import pytest

from rankwatch_service.store.models import Job
from tests.support.store.database import add, job_row

LIBRARIES = ("Errno", "Input should", "Value error", "Traceback", "Expecting value", "Usage:", "is not a valid", "Enum")


@pytest.fixture(scope="module", autouse=True)
def filled(api):
    add(api.engine, Job, job_row("gpt-small"))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("incident", "there is no command 'incident'; did you mean 'incidents'?"),
        ("jobs shwo", "there is no command 'shwo'; did you mean 'show'?"),
        ("jobs --limti 3", "there is no option --limti; did you mean '--limit'?"),
        ("jobs --limit", "--limit needs a value"),
        ("jobs --limit 0", "--limit: must be 1 or more; `rankwatch jobs --help` shows how"),
        ("jobs --limit foo", "--limit: must be a number; `rankwatch jobs --help` shows how"),
        ("jobs show", "JOB is missing; `rankwatch jobs show --help` shows how"),
        ("jobs show a b", "there is no place for b; `rankwatch jobs show --help` shows how"),
        ("incidents resolve x", "--reason is missing; `rankwatch incidents resolve --help` shows how"),
        ("health strem", "'strem' is not one of 'stream', 'notify'; did you mean 'stream'?"),
        ("token create x --scope reed", "there is no scope 'reed'; did you mean 'read'?"),
        ("tuning set /nosuch", "FILE: there is no such file; `rankwatch tuning set --help` shows how"),
        ("jobs show gpt-smal", "there is no job 'gpt-smal' (404); did you mean 'gpt-small'?"),
        ("checkpoints gpt-smal", "there is no job 'gpt-smal' (404); did you mean 'gpt-small'?"),
        ("incidents --job gpt-smal", "there is no job 'gpt-smal' (404); did you mean 'gpt-small'?"),
        ("incidents watch --job gpt-smal", "there is no job 'gpt-smal' (404); did you mean 'gpt-small'?"),
        ("commands --job x", "there is no job 'x' (404); `rankwatch jobs` lists all"),
        ("receivers remove x", "there is no receiver 'x' (404); `rankwatch receivers` lists all"),
        ("incidents --kind stragler", "kind: did you mean 'straggler'? It must be 'nonfinite', 'loss_spike'"),
        ("incidents --state foo", "state: must be 'open', 'acknowledged', 'resolved' or 'unresolved' (422)"),
        ("silences add --comment x --kind hung", "not valid; kind: did you mean 'hang'? It must be 'nonfinite'"),
        ("jobs --url http://127.0.0.1:1", "http://127.0.0.1:1 does not answer: Connection refused; start a service"),
    ],
)
def test_a_mistake_is_answered_with_what_was_probably_meant(terminal, api, monkeypatch, line, told):
    monkeypatch.setenv("RANKWATCH_URL", api.url)
    monkeypatch.setenv("RANKWATCH_TOKEN", api.admin)
    status, out, err = terminal.run(*line.split())
    assert (status in (2, 3), out, err.count("\n"), told in err) == (True, "", 1, True), err
    assert err.startswith("rankwatch: ")
    assert not [words for words in LIBRARIES if words in err]


@pytest.mark.parametrize("command", [("policy", "set"), ("tuning", "set")])
def test_a_file_that_is_not_json_is_reported_with_the_place(rankwatch, tmp_path, command):
    file = tmp_path / "x.json"
    file.write_text('{"a": 1,\n b}')
    assert rankwatch(*command, str(file)) == (
        2,
        "",
        f"rankwatch: {file} is not JSON: it cannot be read from line 2, column 2 on\n",
    )


def test_another_program_at_the_url_is_not_taken_for_rankwatch(terminal):
    server = HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        status, out, err = terminal.run("jobs", "--url", f"http://127.0.0.1:{server.server_port}", "--token", "x")
    finally:
        server.shutdown()
        server.server_close()
    assert (status, out, "what answers there is not rankwatch (404)" in err) == (2, "", True), err


def test_the_help_is_the_answer_to_a_command_without_arguments(terminal):
    status, out, err = terminal.run()
    assert (status, "Usage: rankwatch" in out, err) == (2, True, "")


def test_the_answer_to_a_list_stays_json_where_nothing_is_found(rankwatch):
    status, out, _ = rankwatch("incidents", "--json")
    assert (status, [json.loads(line) for line in out.splitlines()]) == (0, [])
