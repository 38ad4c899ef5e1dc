"""The command line against a real api on a real port."""

import io
import json
import re
import sys

import pytest
from sqlalchemy import delete, update

from rankwatch.notices import Notice, notice_path, write_notice
from rankwatch.wire import Progress
from rankwatch_service.access.grants import Scope
from rankwatch_service.api.routes import notifications
from rankwatch_service.clock import SystemClock
from rankwatch_service.names import short
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Attempt, Checkpoint, Command, Incident, IncidentFeedback, Job
from tests.support.store.database import FAR_NS, add, attempt_row, change, checkpoint_row, command_row, job_row, report
from tests.support.values.incidents import incident_row


@pytest.fixture(scope="module", autouse=True)
def filled(api):
    launch = {"attempt": "launch.0"}
    report(api.engine, "gpt-small", **launch)
    add(api.engine, Job, job_row("gpt-small", step=500, **launch))
    can = ["pause", "rollback", "rollback_memory", "rollback_disk"]
    add(api.engine, Attempt, attempt_row("gpt-small", can=can, last_step=500, **launch))
    add(api.engine, Job, job_row("a"), job_row("b"))
    named = [incident_row(id=f"inc_of_{name}", job=name) for name in "ab"]
    add(api.engine, Incident, incident_row(), *named)
    shards = {"shards_expected": 4, "shards": [0, 1, 2, 3]}
    add(api.engine, Checkpoint, checkpoint_row("gpt-small", 450, "memory", **shards, **launch))


def test_jobs_are_listed_for_people_and_for_programs(rankwatch):
    status, out, _ = rankwatch("jobs")
    assert (status, "gpt-small" in out, "4/4" in out) == (0, True, True)
    status, out, err = rankwatch("jobs", "--json")
    steps = {one["name"]: one["step"] for one in map(json.loads, out.splitlines())}
    assert (status, steps["gpt-small"], err) == (0, 500, "")
    out = rankwatch("jobs", "show", "gpt-small")[1]
    assert ("launch.0" in out, "0 to 500" in out) == (True, True)
    assert "pause, rollback (`rankwatch pause gpt-small`)" in out
    assert "rankwatch incidents show" in out
    assert not re.search(r"unix_ns|two_people|\bTrue\b|\bFalse\b|None|_s\b", out)
    out = rankwatch("checkpoints", "gpt-small")[1]
    assert ("good" in out, "4/4" in out) == (True, True)


def test_incidents_are_listed_filtered_and_shown(rankwatch):
    status, out, _ = rankwatch("incidents")
    assert (status, "Rank 3 runs at 0.62" in out) == (0, True)
    assert rankwatch("incidents", "--exit-code")[0] == 1
    assert rankwatch("incidents", "--job", "gpt-small", "--state", "resolved", "--exit-code")[0] == 0
    status, out, _ = rankwatch("incidents", "show", "inc_1")
    assert status == 0
    assert "; peers: " in out
    assert "pause" in out


def test_the_stacks_of_a_hang_are_shown_for_each_group_of_ranks(rankwatch, api):
    stacks = [{"ranks": "3", "count": 1, "rank": 3, "stack": "File a.py\nFile b.py"}]
    stacks += [{"ranks": "0-2,4", "count": 4, "rank": 0, "stack": "", "reason": "stopped by a signal"}]
    apart = {"rank": 3, "phases": {"forward": 0.25, "backward": None}}
    late = [{"rank": rank, "step": 24, "phase": "", "os_state": "T"} for rank in (1, 2)]
    row = incident_row(id="inc_hung", evidence={"stands_apart": apart, "stacks": stacks, "missing": late})
    add(api.engine, Incident, row)
    status, out, _ = rankwatch("incidents", "show", "inc_hung")
    lines = [line.split() for line in out.splitlines()]
    assert status == 0
    assert ["stack", "of", "3", "File", "a.py"] in lines
    assert ["File", "b.py"] in lines
    assert ["stack", "of", "0-2,4", "stopped", "by", "a", "signal"] in lines
    assert ["stands", "apart", "rank", "3,", "phases", "(forward", "0.25)"] in lines
    for rank in ("1,", "2,"):
        assert f"missing rank {rank} step 24, process state stopped by a signal".split() in lines


def test_a_command_is_requested_listed_and_cancelled(rankwatch):
    status, out, err = rankwatch("pause", "gpt-small", "--reason", "a look", "--json")
    command = json.loads(out)
    assert (status, command["action"], command["reason"]) == (0, "pause", "a look"), err
    status, out, _ = rankwatch("commands", "--job", "gpt-small")
    assert short(command["id"]) in out
    assert command["short_id"] == short(command["id"])
    status, _, err = rankwatch("commands", "cancel", command["id"])
    assert (status, err.strip()) == (0, f"{command['short_id']} is cancelled")
    status, _, err = rankwatch("pause", "gpt-small")
    assert re.fullmatch(r"pause gpt-small: \w+ \([0-9a-f]{10}\)", err.strip())
    newest = json.loads(rankwatch("commands", "--json", "--limit", "1")[1])
    assert re.fullmatch(r"cmd_[0-9a-f]{24}", newest["id"])
    rankwatch("commands", "cancel", newest["short_id"])


def test_what_changes_something_prints_one_object_with_json(rankwatch, api, incident, tmp_path):
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nname = "low"\nmetric = "loss"\nwhen = "below"\nvalue = 0.1\n')
    made = {}
    for line in (
        "incidents ack inc_9",
        "incidents unack inc_9",
        "incidents comment inc_9 hello",
        "incidents feedback inc_9 useful",
        "incidents feedback inc_9 none",
        "jobs edit a --owner ann",
        "silences add --comment x --job a",
        "silences expire {silences}",
        "receivers add json https://hooks.example/hook",
        "receivers remove json",
        f"rules apply {rules}",
        "rules delete low",
        "tuning reset",
        "pause gpt-small",
        "commands cancel {pause}",
        "incidents resolve inc_9 --reason x",
    ):
        status, out, err = rankwatch(*line.format_map(made).split(), "--json")
        assert (status, out.count("\n"), err) == (0, 1, ""), line
        made |= {line.split()[0]: json.loads(out).get("id")}


def test_waiting_ends_with_1_where_a_command_is_not_applied_in_time(rankwatch, api):
    status, _, err = rankwatch("rollback", "gpt-small", "--wait", "--timeout", "0.3")
    assert status == 1
    assert "rollback" in err or "still" in err
    change(api.engine, update(Command).values(state="cancelled"))


def test_two_jobs_with_one_name_are_reported_below_the_list_of_jobs(rankwatch, api):
    for launch in ("launch", "other"):
        report(api.engine, "gpt-small", FAR_NS, Progress(0, 7, "", 0.0, 0.0), attempt=f"{launch}.0")
    assert "launches launch and other run under the same name" in rankwatch("jobs")[2]
    report(api.engine, "gpt-small", 1, attempt="other.0")
    assert "at once" not in rankwatch("jobs")[2]


def test_the_mode_of_a_rollback_is_requested_and_shown_beside_applied(rankwatch, api):
    status, out, err = rankwatch("rollback", "gpt-small", "--mode", "relaunch")
    assert (status, "the job does not support mode relaunch" in err) == (2, True)
    status, out, err = rankwatch("rollback", "gpt-small", "--mode", "full", "--json")
    (command,) = [json.loads(out)] if out.startswith("{") else json.loads(out)
    assert (status, command["params"]) == (0, {"mode": "full"}), err
    with write(api.engine) as connection:
        mine = update(Command).where(Command.id == command["id"])
        connection.execute(mine.values(state="applied", mode="full", applied_step=480))
    assert "applied (full)" in rankwatch("commands", "--job", "gpt-small")[1]


def test_silences_are_added_listed_and_ended(rankwatch):
    matchers = ("host=node-a", "severity!=critical")
    silenced = ("--comment", "drill", "--for", "30m", "--job", "gpt-small", *matchers)
    status, out, err = rankwatch("silences", "add", *silenced)
    assert status == 0, err
    silence = out.strip()
    (found,) = [one for one in rows(rankwatch, "silences") if one["comment"] == "drill"]
    assert re.fullmatch(r"sil_[0-9a-f]{24}", found["id"])
    assert silence == found["short_id"] == short(found["id"])
    assert found["matchers"] == ['host="node-a"', 'severity!="critical"']
    assert 'host="node-a"' in rankwatch("silences")[1]
    assert rankwatch("silences", "expire", silence)[0] == 0


def test_receivers_are_added_with_a_secret_listed_and_removed(rankwatch, api):
    options = ("--kind", "hang", "--match", "host=a", "--after", "15m")
    status, out, err = rankwatch("receivers", "add", "pager", "https://hooks.example/hook", *options)
    assert (status, out.startswith("whsec_")) == (0, True), err
    found = api.get("/api/v1/receivers/pager").json()
    assert (found["kinds"], found["matchers"], found["after_s"]) == (["hang"], ['host="a"'], 900)
    out = rankwatch("receivers")[1]
    assert ("hang" in out, "900 s" in out, "whsec_" in out) == (True, True, False)
    assert rankwatch("receivers", "remove", "pager")[0] == 0


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


@pytest.fixture
def ended_job(api):
    """A job that ended long ago."""
    add(api.engine, Job, job_row("of-old", state="ended"))
    yield "of-old"
    with write(api.engine) as connection:
        for column in (Job.name, Incident.job):
            connection.execute(delete(column.class_).where(column == "of-old"))


def test_a_job_is_deleted_only_if_its_name_is_typed(rankwatch, api, ended_job, monkeypatch):
    position = api.controls.end()
    monkeypatch.setattr("sys.stdin", io.StringIO("of-new\n"))
    status, _, err = rankwatch("jobs", "delete", ended_job)
    assert (status, "nothing was deleted" in err) == (2, True)
    assert "of-old will be deleted for good; the audit" in err
    assert ended_job not in [record.key for record in api.controls.read(position, 10)]
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{ended_job}\n"))
    status, _, err = rankwatch("jobs", "delete", ended_job)
    assert (status, "as soon as stream runs" in err) == (0, True), err
    assert [record.key for record in api.controls.read(position, 10)].count(ended_job) == 1


def test_a_job_that_reports_is_not_deleted_and_its_name_not_asked_for(rankwatch, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("gpt-small\n"))
    status, _, err = rankwatch("jobs", "delete", "gpt-small")
    assert (status, "it can be deleted when it has reported nothing for 300 s" in err) == (2, True)
    assert "Type the name" not in err


@pytest.mark.parametrize(("number", "words"), [(1, "1 incident that is not"), (2, "2 incidents that are not")])
def test_who_deletes_a_job_is_told_of_its_incidents(rankwatch, api, ended_job, monkeypatch, number, words):
    add(api.engine, Incident, *[incident_row(id=f"inc_of_old{at}", job=ended_job) for at in range(number)])
    monkeypatch.setattr("sys.stdin", io.StringIO("no\n"))
    told = rankwatch("jobs", "delete", ended_job)[2]
    assert f"of-old will be deleted for good, with {words} resolved" in told


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
def test_wrong_use_ends_with_2_and_says_why(rankwatch, arguments):
    status, out, err = rankwatch(*arguments)
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


def test_jobs_prints_why_telemetry_of_this_machine_does_not_arrive(rankwatch, tmp_path, monkeypatch):
    monkeypatch.setenv("RANKWATCH_DIR", str(tmp_path))
    now = SystemClock().unix_ns()
    write_notice(notice_path(str(tmp_path), "mine"), Notice("mine", "the token is not known", now))
    write_notice(notice_path(str(tmp_path), "old"), Notice("old", "long ago", now - 2 * 24 * 3_600 * 10**9))
    _, out, err = rankwatch("jobs")
    assert "job mine on this machine: the token is not known" in err
    assert "long ago" not in err
    assert "gpt-small" in out


def test_a_truncated_list_says_so(rankwatch, api):
    add(api.engine, Job, job_row("many"))
    rows = [incident_row(id=f"inc_{n:024d}", job="many", state="resolved") for n in range(3)]
    add(api.engine, Incident, *rows)
    _, out, err = rankwatch("incidents", "--job", "many", "--limit", "2")
    assert len(out.splitlines()) == 3
    assert "showing 2 of 3" in err


def rows(rankwatch, *arguments):
    return [json.loads(line) for line in rankwatch(*arguments, "--json")[1].splitlines()]


def test_a_job_gets_project_and_owner_and_lists_are_restricted_to_a_project(rankwatch):
    status, _, err = rankwatch("jobs", "edit", "a", "--project", "nlp", "--owner", "ann")
    assert (status, err) == (0, "a: project nlp, owner ann\n")
    assert rankwatch("jobs", "edit", "a", "--owner", "bob")[0] == 0
    (job,) = rows(rankwatch, "jobs", "--project", "nlp")
    assert (job["name"], job["project"], job["owner"]) == ("a", "nlp", "bob")
    listed = rankwatch("jobs")[1]
    assert "nlp" in listed
    assert "bob" in listed
    assert [one["job"] for one in rows(rankwatch, "incidents", "--project", "nlp")] == ["a"]
    assert rows(rankwatch, "incidents", "--project", "other") == []
    assert rankwatch("jobs", "edit", "a", "--project", "")[2] == "a: project none, owner bob\n"


def test_an_edit_without_anything_to_set_says_so(rankwatch):
    status, _, err = rankwatch("jobs", "edit", "a")
    assert (status, "--project, --owner" in err) == (2, True)


def test_a_receiver_of_another_type_takes_its_secret_from_a_file(rankwatch, tmp_path):
    key = tmp_path / "key"
    key.write_text("0123456789abcdef0123456789ABCDEF\n")
    target = ("https://events.pagerduty.com/v2/enqueue", "--type", "pagerduty", "--secret-file", str(key))
    status, out, err = rankwatch("receivers", "add", "pd", *target)
    assert (status, out, "receivers test pd" in err) == (0, "", True), err
    assert "pagerduty" in rankwatch("receivers")[1]
    status, _, err = rankwatch("receivers", "add", "mail", "mailto:a@example.com")
    assert (status != 0, "RANKWATCH_SMTP_URL" in err) == (True, True)
    assert rankwatch("receivers", "remove", "pd")[0] == 0


def test_a_test_of_a_receiver_says_that_nobody_delivers(rankwatch, monkeypatch):
    monkeypatch.setattr(notifications, "TRIED_WITHIN_S", 0.0)
    assert rankwatch("receivers", "add", "try", "https://hooks.example/hook")[0] == 0
    status, _, err = rankwatch("receivers", "test", "try")
    assert (status, "does the role notify run" in err) == (1, True)
    status, out, _ = rankwatch("notifications", "--state", "waiting", "--receiver", "try")
    assert (status, "waiting" in out) == (0, True)
    assert rankwatch("receivers", "remove", "try")[0] == 0


def test_alerts_that_wait_are_listed_with_the_reason(rankwatch, api):
    assert "no alert waits" in rankwatch("alerts")[2]
    assert api.post("/api/v2/alerts", [{"labels": {"alertname": "Full", "job_name": "gone"}}]).status_code == 200
    status, out, _ = rankwatch("alerts")
    assert (status, "Full" in out, "is named gone." in " ".join(out.split())) == (0, True, True)


@pytest.fixture
def incident(api):
    """A new incident, about which nobody has said anything."""
    add(api.engine, Incident, incident_row(id="inc_9", detected_unix_ns=api.clock.unix_ns()))
    yield "inc_9"
    with write(api.engine) as connection:
        for table in (IncidentFeedback, Command):
            connection.execute(delete(table))
        connection.execute(delete(Incident).where(Incident.id == "inc_9"))


def answers(rankwatch):
    (shown,) = rankwatch("incidents", "show", "inc_9", "--json")[1].splitlines()
    return [one["answer"] for one in json.loads(shown)["feedback"]]


def test_an_answer_is_given_shown_changed_and_withdrawn(rankwatch, incident):
    status, _, err = rankwatch("incidents", "feedback", "inc_9", "noise")
    assert (status, err) == (0, "inc_9: noise\n")
    assert "noise (admin)" in rankwatch("incidents", "show", "inc_9")[1]
    assert rankwatch("incidents", "feedback", "inc_9", "useful")[0] == 0
    assert answers(rankwatch) == ["useful"]
    assert rankwatch("incidents", "feedback", "inc_9", "none")[2] == "inc_9: your answer is withdrawn\n"
    assert answers(rankwatch) == []


def test_another_answer_is_refused_with_those_that_there_are(rankwatch, incident):
    status, _, err = rankwatch("incidents", "feedback", "inc_9", "great")
    assert (status, "'useful', 'noise' or 'duplicate'" in err) == (2, True)


def test_precision_is_shown_with_its_range_by_kind_and_by_job(rankwatch, incident):
    rankwatch("incidents", "feedback", "inc_9", "useful")
    assert "straggler  100% (21% to 100%)  1" in rankwatch("precision")[1]
    assert "gpt-small" in rankwatch("precision", "--by-job")[1]
    (kind,) = rankwatch("precision", "--json")[1].splitlines()
    assert json.loads(kind)["ratio"] == 1.0


def test_false_actions_are_shown_with_precision(rankwatch, incident, api):
    assert rankwatch("precision")[2] == "the policy has not acted in the last 30 days\n"
    asked = {"requested_by": "policy", "requested_unix_ns": api.clock.unix_ns()}
    add(api.engine, Command, command_row(job="gpt-small", incident_id="inc_9", **asked))
    rankwatch("incidents", "feedback", "inc_9", "noise")
    share = "1 on noise (100%), 0 on unanswered incidents"
    assert rankwatch("precision")[2] == f"actions of the policy in the last 30 days: 1, of which {share}\n"
