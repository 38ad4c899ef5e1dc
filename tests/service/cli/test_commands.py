"""The command line against a real api on a real port."""

import io
import json
import re
import socket
import sys

import pytest
from sqlalchemy import delete, insert, update

from rankwatch.notices import Notice, notice_path, write_notice
from rankwatch.wire import Progress, View
from rankwatch_service.access.scopes import Scope
from rankwatch_service.clock import SystemClock
from rankwatch_service.orders.running_attempt import ReceivedView, store_views
from rankwatch_service.short_ids import short
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Attempt, Checkpoint, Command, Incident, Job
from tests.support.values.incidents import NOON_UNIX_NS, incident_row


@pytest.fixture(scope="module", autouse=True)
def filled(api):
    with write(api.engine) as connection:
        fill(connection)
    # An agent that tells of itself and obeys nothing.
    store_views(api.engine, [ReceivedView(View("gpt-small", "launch.0", "h", "b", 0, ()))], 2**62)


def fill(connection):
    times = {"first_seen_unix_ns": NOON_UNIX_NS, "last_seen_unix_ns": NOON_UNIX_NS}
    connection.execute(
        insert(Job).values(
            name="gpt-small",
            state="running",
            attempt="launch.0",
            world_size=4,
            ranks_reporting=4,
            step=500,
            step_time_s=0.1,
            loss=2.5,
            **times,
        )
    )
    connection.execute(
        insert(Attempt).values(
            job="gpt-small",
            attempt="launch.0",
            started_unix_ns=NOON_UNIX_NS,
            ended_unix_ns=None,
            world_size=4,
            first_step=0,
            last_step=500,
            topology={
                "ranks": [],
                "can": ["pause", "rollback", "rollback_memory", "rollback_disk"],
                "replicated": True,
            },
            number=1,
        )
    )
    connection.execute(insert(Incident).values(**incident_row()))
    connection.execute(
        insert(Checkpoint).values(
            id="memory:launch.0:450",
            job="gpt-small",
            attempt="launch.0",
            step=450,
            tier="memory",
            location="",
            shards_expected=4,
            shards=[0, 1, 2, 3],
            seconds=0.1,
            bytes=1_000_000,
            verdict="good",
            verdict_reason="",
            saved_unix_ns=NOON_UNIX_NS,
        )
    )


def test_jobs_are_listed_for_people_and_for_programs(terminal, to):
    status, out, _ = terminal.run("jobs", *to)
    assert status == 0
    assert "gpt-small" in out
    assert "4/4" in out
    status, out, err = terminal.run("jobs", "--json", *to)
    assert (status, json.loads(out)["step"], err) == (0, 500, "")


def test_one_job_is_shown_with_its_attempts(terminal, to):
    status, out, _ = terminal.run("jobs", "show", "gpt-small", *to)
    assert status == 0
    assert "launch.0" in out
    assert "0 to 500" in out


def test_incidents_are_listed_filtered_and_shown(terminal, to):
    status, out, _ = terminal.run("incidents", *to)
    assert (status, "Rank 3 runs at 0.62" in out) == (0, True)
    assert terminal.run("incidents", "--exit-code", *to)[0] == 1
    assert terminal.run("incidents", "--state", "resolved", "--exit-code", *to)[0] == 0
    status, out, _ = terminal.run("incidents", "show", "inc_1", *to)
    assert status == 0
    assert "; peers: " in out
    assert "pause" in out


def test_the_stacks_of_a_hang_are_shown_for_each_group_of_ranks(terminal, api, to):
    stacks = [{"ranks": "3", "count": 1, "rank": 3, "stack": "File a.py\nFile b.py"}]
    stacks += [{"ranks": "0-2,4", "count": 4, "rank": 0, "stack": "", "reason": "stopped by a signal"}]
    apart = {"rank": 3, "phases": {"forward": 0.25, "backward": None}}
    late = [{"rank": rank, "step": 24, "phase": "", "os_state": "T"} for rank in (1, 2)]
    row = incident_row(id="inc_hung", evidence={"stands_apart": apart, "stacks": stacks, "missing": late})
    with write(api.engine) as connection:
        connection.execute(insert(Incident).values(**row))
    status, out, _ = terminal.run("incidents", "show", "inc_hung", *to)
    with write(api.engine) as connection:
        connection.execute(delete(Incident).where(Incident.id == "inc_hung"))
    lines = [line.split() for line in out.splitlines()]
    assert status == 0
    assert ["stack", "of", "3", "File", "a.py"] in lines
    assert ["File", "b.py"] in lines
    assert ["stack", "of", "0-2,4", "stopped", "by", "a", "signal"] in lines
    assert ["stands", "apart", "rank", "3,", "phases", "(forward", "0.25)"] in lines
    for rank in ("1,", "2,"):
        assert f"missing rank {rank} step 24, process state stopped by a signal".split() in lines


def test_checkpoints_are_listed_with_their_verdicts(terminal, to):
    status, out, _ = terminal.run("checkpoints", "gpt-small", *to)
    assert (status, "good" in out, "4/4" in out) == (0, True, True)


def test_a_command_is_requested_listed_and_cancelled(terminal, to):
    status, out, err = terminal.run("pause", "gpt-small", "--reason", "a look", "--json", *to)
    command = json.loads(out)
    assert (status, command["action"], command["reason"]) == (0, "pause", "a look"), err
    status, out, _ = terminal.run("commands", "--job", "gpt-small", *to)
    assert short(command["id"]) in out
    assert command["short_id"] == short(command["id"])
    status, _, err = terminal.run("commands", "cancel", command["id"], *to)
    assert (status, err.strip()) == (0, f"{command['short_id']} is cancelled")
    status, _, err = terminal.run("pause", "gpt-small", *to)
    assert re.fullmatch(r"pause gpt-small: \w+ \([0-9a-f]{10}\)", err.strip())
    newest = json.loads(terminal.run("commands", "--json", "--limit", "1", *to)[1])
    assert re.fullmatch(r"cmd_[0-9a-f]{24}", newest["id"])
    terminal.run("commands", "cancel", newest["short_id"], *to)


def test_waiting_ends_with_1_where_a_command_is_not_applied_in_time(terminal, to, api):
    status, _, err = terminal.run("rollback", "gpt-small", "--wait", "--timeout", "0.3", *to)
    assert status == 1
    assert "rollback" in err or "still" in err
    with write(api.engine) as connection:
        connection.execute(update(Command).values(state="cancelled"))


def test_two_jobs_with_one_name_are_reported_below_the_list_of_jobs(terminal, to, api):
    for launch in ("launch", "other"):
        ranks = (Progress(0, 7, "", 0.0, 0.0),)
        store_views(api.engine, [ReceivedView(View("gpt-small", f"{launch}.0", f"of-{launch}", "b", 0, ranks))], 2**62)
    assert "launches launch and other run under the same name" in terminal.run("jobs", *to)[2]
    store_views(api.engine, [ReceivedView(View("gpt-small", "other.0", "of-other", "b", 0, ()))], 1)
    assert "at once" not in terminal.run("jobs", *to)[2]


def test_the_mode_of_a_rollback_is_requested_and_shown_beside_applied(terminal, to, api):
    status, out, err = terminal.run("rollback", "gpt-small", "--mode", "relaunch", *to)
    assert (status, "the job does not support mode relaunch" in err) == (2, True)
    status, out, err = terminal.run("rollback", "gpt-small", "--mode", "full", "--json", *to)
    (command,) = [json.loads(out)] if out.startswith("{") else json.loads(out)
    assert (status, command["params"]) == (0, {"mode": "full"}), err
    with write(api.engine) as connection:
        mine = update(Command).where(Command.id == command["id"])
        connection.execute(mine.values(state="applied", mode="full", applied_step=480))
    assert "applied (full)" in terminal.run("commands", "--job", "gpt-small", *to)[1]


def test_silences_are_added_listed_and_ended(terminal, to):
    matchers = ("host=node-a", "severity!=critical")
    silenced = ("--comment", "drill", "--for", "30m", "--job", "gpt-small", *matchers)
    status, out, err = terminal.run("silences", "add", *silenced, *to)
    assert status == 0, err
    silence = out.strip()
    (found,) = map(json.loads, terminal.run("silences", "--json", *to)[1].splitlines())
    assert re.fullmatch(r"sil_[0-9a-f]{24}", found["id"])
    assert silence == found["short_id"] == short(found["id"])
    assert found["matchers"] == ['host="node-a"', 'severity!="critical"']
    assert 'host="node-a"' in terminal.run("silences", *to)[1]
    assert terminal.run("silences", "expire", silence, *to)[0] == 0


def test_receivers_are_added_with_a_secret_listed_and_removed(terminal, to):
    status, out, err = terminal.run("receivers", "add", "pager", "https://hooks.example/hook", "--kind", "hang", *to)
    assert (status, out.startswith("whsec_")) == (0, True), err
    status, out, _ = terminal.run("receivers", *to)
    assert "hang" in out
    assert "whsec_" not in out
    assert terminal.run("receivers", "remove", "pager", *to)[0] == 0


def test_login_stores_a_valid_token_for_other_commands(terminal, api):
    status, _, err = terminal.run("login", api.url, "--token", "rankwatch_api_x_y")
    assert status == 4, err
    assert terminal.run("login", api.url, "--token", api.admin)[0] == 0
    status, out, _ = terminal.run("jobs")
    assert (status, "gpt-small" in out) == (0, True)


def test_a_missing_or_weak_token_ends_with_4(terminal, api):
    assert terminal.run("jobs", "--url", api.url)[0] == 4
    reader = api.token(Scope.READ)
    status, _, err = terminal.run("stop", "gpt-small", "--url", api.url, "--token", reader)
    assert (status, "scope command" in err) == (4, True)


def test_a_malformed_url_ends_with_2(terminal):
    status, _, err = terminal.run("jobs", "--url", "nonsense")
    assert (status, "http://" in err) == (2, True)


def test_a_service_that_does_not_answer_ends_with_3(terminal):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    status, _, err = terminal.run("jobs", "--url", f"http://127.0.0.1:{port}")
    assert (status, "does not answer" in err) == (3, True)


@pytest.fixture
def ended_job(api):
    """A job that ended long ago."""
    times = {"first_seen_unix_ns": NOON_UNIX_NS, "last_seen_unix_ns": NOON_UNIX_NS}
    row = {"state": "ended", "attempt": "l.0", "world_size": 1, "ranks_reporting": 0, "step": 9, **times}
    with write(api.engine) as connection:
        connection.execute(insert(Job).values(name="of-old", **row))
    yield "of-old"
    with write(api.engine) as connection:
        connection.execute(delete(Job).where(Job.name == "of-old"))


def test_a_job_is_deleted_only_if_its_name_is_typed(terminal, to, api, ended_job, monkeypatch):
    position = api.controls.end()
    monkeypatch.setattr("sys.stdin", io.StringIO("of-new\n"))
    status, _, err = terminal.run("jobs", "delete", ended_job, *to)
    assert (status, "nothing was deleted" in err) == (2, True)
    assert "of-old will be deleted for good; the audit" in err
    assert ended_job not in [record.key for record in api.controls.read(position, 10)]
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{ended_job}\n"))
    status, _, err = terminal.run("jobs", "delete", ended_job, *to)
    assert (status, "as soon as stream runs" in err) == (0, True), err
    assert [record.key for record in api.controls.read(position, 10)].count(ended_job) == 1


def test_a_job_that_reports_is_not_deleted_and_its_name_not_asked_for(terminal, to, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("gpt-small\n"))
    status, _, err = terminal.run("jobs", "delete", "gpt-small", *to)
    assert (status, "it can be deleted when it has reported nothing for 300 s" in err) == (2, True)
    assert "Type the name" not in err


@pytest.mark.parametrize(("number", "words"), [(1, "1 incident that is not"), (2, "2 incidents that are not")])
def test_who_deletes_a_job_is_told_of_its_incidents(terminal, to, api, ended_job, monkeypatch, number, words):
    with write(api.engine) as connection:
        for at in range(number):
            connection.execute(insert(Incident).values(**incident_row(id=f"inc_of_old{at}", job=ended_job)))
    monkeypatch.setattr("sys.stdin", io.StringIO("no\n"))
    try:
        assert (
            f"of-old will be deleted for good, with {words} resolved"
            in terminal.run("jobs", "delete", ended_job, *to)[2]
        )
    finally:
        with write(api.engine) as connection:
            connection.execute(delete(Incident).where(Incident.job == ended_job))


@pytest.mark.parametrize(
    "arguments",
    [
        ("jobs", "show", "nope"),
        ("jobs", "delete", "nope"),
        ("incidents", "--state", "odd"),
        ("incidents", "show", "nope"),
        ("silences", "add", "--comment", "x", "--for", "soon"),
    ],
)
def test_wrong_use_ends_with_2_and_says_why(terminal, to, arguments):
    status, out, err = terminal.run(*arguments, *to)
    assert (status, out) == (2, "")
    assert err.strip()


@pytest.mark.parametrize(
    ("arguments", "module", "extra"),
    [(("up", "--kafka", "127.0.0.1:1"), "kafka", "kafka"), (("demo",), "torch", "torch")],
)
def test_what_needs_an_extra_that_is_not_installed_says_how_to_get_it(
    terminal, monkeypatch, tmp_path, arguments, module, extra
):
    monkeypatch.setenv("RANKWATCH_DATA_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, module, None)
    status, _, err = terminal.run(*arguments)
    assert (status, err) == (2, f"rankwatch: this needs {module}: pip install 'rankwatch[{extra}]'\n")


def test_a_database_in_a_folder_that_cannot_be_made_ends_with_2(terminal, tmp_path):
    (tmp_path / "file").touch()
    for command in ("api", "stream", "notify"):
        status, _, err = terminal.run(command, "--database-url", f"sqlite:///{tmp_path}/file/rankwatch.db")
        assert (status, err.count("\n")) == (2, 1), err


def test_a_malformed_setting_is_reported_with_its_name(terminal):
    assert terminal.run("stream", "--kafka", "nohost") == (
        2,
        "",
        "rankwatch: settings: kafka: 'nohost' is not HOST:PORT\n",
    )


@pytest.mark.parametrize("arguments", [(), ("nope",), ("jobs", "--nope"), ("resolve",)])
def test_unknown_commands_and_options_end_with_2(terminal, arguments):
    assert terminal.run(*arguments)[0] == 2


def test_doctor_finds_nothing_in_a_working_installation(terminal, to, tmp_path):
    assert terminal.run("db", "upgrade", "--data", str(tmp_path))[0] == 0
    status, out, err = terminal.run("doctor", "--json", "--data", str(tmp_path), *to)
    checks = {one["check"]: one["verdict"] for one in map(json.loads, out.splitlines())}
    assert checks["database"] == checks["service"] == checks["clock"] == checks["token"] == "ok", out
    assert status == int("finding" in checks.values()), err


def test_doctor_finds_a_database_that_was_not_upgraded(terminal, to, tmp_path):
    (tmp_path / "rankwatch.db").touch()
    status, out, _ = terminal.run("doctor", "--json", "--data", str(tmp_path), *to)
    checks = {one["check"]: one for one in map(json.loads, out.splitlines())}
    assert (status, checks["database"]["verdict"]) == (1, "finding")
    assert "rankwatch db upgrade" in checks["database"]["told"]


def test_tokens_are_made_listed_and_revoked_in_the_database(terminal, tmp_path):
    where = ("--data", str(tmp_path))
    assert terminal.run("db", "check", *where)[0] == 1
    assert terminal.run("db", "upgrade", *where)[0] == 0
    assert terminal.run("db", "check", *where)[0] == 0
    status, out, _ = terminal.run("token", "create", "sam", "--scope", "read", "--for", "1h", *where)
    assert (status, out.startswith("rankwatch_api_")) == (0, True)
    token_id = out.split("_")[2]
    secret = out.strip().split("_", 3)[3]
    status, out, _ = terminal.run("token", "list", "--json", *where)
    assert json.loads(out)["name"] == "sam"
    assert secret not in out
    assert "sha256" not in out
    assert terminal.run("token", "revoke", token_id, *where)[0] == 0
    assert "revoked" in terminal.run("token", "list", *where)[1]
    assert terminal.run("token", "create", "sam", "--scope", "everything", *where)[0] == 2
    assert terminal.run("token", "revoke", "nope", *where)[0] == 2


def test_jobs_prints_why_telemetry_of_this_machine_does_not_arrive(terminal, to, tmp_path, monkeypatch):
    monkeypatch.setenv("RANKWATCH_DIR", str(tmp_path))
    now = SystemClock().unix_ns()
    write_notice(notice_path(str(tmp_path), "mine"), Notice("mine", "the token is not known", now))
    write_notice(notice_path(str(tmp_path), "old"), Notice("old", "long ago", now - 2 * 24 * 3_600 * 10**9))
    _, out, err = terminal.run("jobs", *to)
    assert "job mine on this machine: the token is not known" in err
    assert "long ago" not in err
    assert "gpt-small" in out


def test_a_truncated_list_says_so(terminal, to, api):
    with write(api.engine) as connection:
        rows = [incident_row(id=f"inc_{n:024d}", job="many", state="resolved") for n in range(3)]
        connection.execute(insert(Incident), rows)
    _, out, err = terminal.run("incidents", "--job", "many", "--limit", "2", *to)
    with write(api.engine) as connection:
        connection.execute(delete(Incident).where(Incident.job == "many"))
    assert len(out.splitlines()) == 3
    assert "showing 2 of 3" in err
