"""`GET health`: what is wrong with rankwatch itself, as sentences; and nothing where all is well."""

import pytest
from sqlalchemy import delete, insert, update

from rankwatch_service.access.scopes import Scope
from rankwatch_service.api.background.health_facts import FRESH_S
from rankwatch_service.log.base import Entry
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import AgentView, Delivery, Job, Lease, Outbox, Receiver, StreamPosition
from tests.support.clock import FakeClock
from tests.support.service.parts import notifier_reports, stream_reports

S = 10**9
ON_BOTH_DATABASES = True
CLOCK = FakeClock
MINUTES_11 = 660 * S


def add(api, model, **row) -> None:
    with write(api.engine) as connection:
        connection.execute(insert(model).values(**row))


@pytest.fixture
def sound(api):
    """An api whose stream and notifier have just reported, and which has a receiver."""
    add(api, StreamPosition, partition=0, position=7, tick_number=1, epoch=3)
    stream_reports(api)
    notifier_reports(api)
    add_receiver(api, "pager")
    return api


def add_receiver(api, name: str, **changes) -> None:
    row = {"name": name, "url": b"", "secret": b"", "kinds": [], "severities": [], "jobs": [], "created_unix_ns": 1}
    encrypted = {"url": api.app.state.context.secret_key.encrypt("https://example.com/hook")}
    add(api, Receiver, **row | encrypted | {"secret": ""} | changes)


def message(api, name: str, state: str, ago_ns: int, tries: int, error: str = "") -> None:
    at = api.clock.unix_ns() - ago_ns
    row = {"id": f"msg_{name}_{state}", "receiver": name, "incident_id": "", "transition": 1, "body": b"{}"}
    times = {"next_try_unix_ns": at, "created_unix_ns": at, "delivered_unix_ns": None}
    add(api, Outbox, **row, **times, state=state, tries=tries)
    if tries:
        add(api, Delivery, outbox_id=row["id"], at_unix_ns=at, status=None, error=error, seconds=0.1)


def job(api, name: str, **changes) -> None:
    now = api.clock.unix_ns()
    row = {"state": "running", "attempt": "l.0", "world_size": 4, "ranks_reporting": 4, "step": 1}
    times = {"first_seen_unix_ns": now, "last_seen_unix_ns": now, "step_time_s": None, "loss": None}
    add(api, Job, **{"name": name, **row, **times, "last_progress_unix_ns": now, **changes})


def view(api, host: str, ago_s: int, attempt: str = "l.0") -> None:
    at = api.clock.unix_ns() - ago_s * S
    add(api, AgentView, job="gpt", attempt=attempt, host=host, agent="", boot="b", ranks=b"\x90", at_unix_ns=at)


def health(api, **how):
    api.clock.advance(FRESH_S)  # what was read before is no longer fresh
    answer = api.get("/api/v1/health", **how)
    assert answer.status_code == 200, answer.text
    return answer.json()


def areas(api) -> list[tuple[str, str]]:
    return [(one["area"], one["severity"]) for one in health(api)["problems"]]


def test_nothing_is_wrong_where_every_part_has_just_reported(sound):
    found = health(sound)
    assert (found["state"], found["problems"]) == ("ok", [])
    assert found["version"]
    assert found["database"]["size_bytes"] > 0
    assert [one["name"] for one in found["receivers"]] == ["pager"]


def test_a_service_without_stream_and_notifier_says_that_nothing_is_judged_and_nobody_notified(api):
    found = health(api)
    assert found["state"] == "critical"
    texts = " ".join(one["text"] for one in found["problems"])
    assert "No stream process has ever reported" in texts
    assert "No notifier has ever run: nobody is notified" in texts


def test_stream_that_is_behind_is_a_problem_and_an_idle_one_is_none(sound):
    stream_reports(sound, tick_s=600)  # no job is active, and nothing waits
    assert areas(sound) == []
    sound.log.append([Entry("gpt", b"x")] * 9)
    [problem] = health(sound)["problems"]
    assert problem["text"] == "Stream is 10 min behind in partition 0: 2 records wait."


def test_a_notifier_whose_lease_ran_out_is_silent(sound):
    with write(sound.engine) as connection:
        connection.execute(delete(Lease))
    notifier_reports(sound, ago_s=95)
    [problem] = health(sound)["problems"]
    assert problem["text"] == "No notifier has run for 1 min: nobody is notified of incidents."


def test_a_receiver_that_cannot_be_reached_is_named_with_the_error_of_its_newest_try(sound):
    message(sound, "pager", "waiting", 30 * S, 1, "503 Service Unavailable")
    assert areas(sound) == []  # the next try may arrive
    with write(sound.engine) as connection:
        connection.execute(update(Outbox).values(created_unix_ns=sound.clock.unix_ns() - MINUTES_11))
    found = health(sound)
    [problem] = found["problems"]
    assert problem["area"] == "receivers"
    expected = "1 message to pager could not be delivered, the oldest for 11 min: 503 Service Unavailable."
    assert problem["text"] == expected
    assert found["receivers"][0]["error"] == "503 Service Unavailable"


def test_a_receiver_that_has_delivered_since_a_failure_works(sound):
    message(sound, "pager", "failed", 2 * S, 1, "404 Not Found")
    assert areas(sound) == [("receivers", "warning")]
    message(sound, "pager", "delivered", S, 1)
    assert areas(sound) == []
    assert health(sound)["receivers"][0]["failed"] == 1


def test_a_receiver_that_is_gone_is_a_problem_and_one_that_a_person_switched_off_is_none(sound):
    add_receiver(sound, "off", enabled=False, disabled_reason="switched off")
    assert areas(sound) == []
    add_receiver(sound, "gone", enabled=False, disabled_reason="the receiver answered 410: it is gone")
    [problem] = health(sound)["problems"]
    assert "gone gets nothing any more: the receiver answered 410" in problem["text"]


def test_silent_agents_of_the_running_attempt_are_named_and_those_of_old_attempts_and_ended_jobs_not(sound):
    job(sound, "gpt")
    for host, ago_s in (("node-1", 1), ("node-2", 90)):
        view(sound, host, ago_s)
    view(sound, "node-9", 900, attempt="k.0")
    found = health(sound)
    [problem] = found["problems"]
    assert problem["text"].startswith("1 of 2 agents of 1 job that train have not reported for 30 s: node-2 (gpt).")
    assert [one["host"] for one in found["agents"]] == ["node-2", "node-1"]
    with write(sound.engine) as connection:
        connection.execute(delete(Job))
    job(sound, "gpt", state="ended")
    assert areas(sound) == []


def test_a_detector_that_is_switched_off_and_what_was_dropped_are_told_by_job(sound):
    job(sound, "gpt", dropped={"detector_off.hang": 5, "far": 3})
    found = health(sound)
    [problem] = found["problems"]
    assert problem["text"] == "The detector hang is switched off in gpt: it failed 5 times."
    assert found["dropped"] == [{"job": "gpt", "reasons": {"far": 3}}]


def test_who_may_see_one_job_reads_no_name_of_another_job_host_or_receiver(sound):
    job(sound, "gpt", dropped={"detector_off.hang": 5})
    view(sound, "node-2", 90)
    message(sound, "pager", "waiting", MINUTES_11, 3, "refused")
    found = health(sound, token=sound.token(Scope.READ, job="other"))
    assert (found["state"], found["problems"]) == ("ok", [])
    names = ("receivers", "agents", "detectors_off", "dropped", "agents_total", "agents_silent")
    assert [found[name] or None for name in names] == [None] * len(names)
    assert sound.get("/api/v1/health", token="").status_code == 401


def test_pages_that_ask_at_the_same_time_share_one_reading(sound):
    first = health(sound)
    add_receiver(sound, "new")
    assert sound.get("/api/v1/health").json() == first
    assert len(health(sound)["receivers"]) == 2


def test_who_asks_while_the_database_is_read_gets_what_was_read_before(sound):
    first = health(sound)
    with sound.app.state.context.health._reading:
        assert health(sound) == first
    assert health(sound)["at_unix_ns"] > first["at_unix_ns"]


def test_the_state_ages_with_the_clock(sound):
    assert health(sound)["state"] == "ok"
    sound.clock.advance(40)
    assert [one["severity"] for one in health(sound)["problems"]] == ["critical", "critical"]
