"""What is wrong with rankwatch itself, as sentences; how far stream is; and what the ranks of a command answered."""

from collections import Counter

import pytest
from sqlalchemy import delete, update

from rankwatch_service.access.grants import Scope
from rankwatch_service.api.background.health_facts import FRESH_S, partitions
from rankwatch_service.log.base import Entry
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import AgentView, Delivery, Job, Lease, Outbox, Receiver, StreamPosition
from rankwatch_service.stream.process import PartitionReport, Reporter, new_counts
from tests.support.clock import FakeClock
from tests.support.orders.rows import add_command, add_view, answered
from tests.support.service.api import notifier_reports, stream_reports
from tests.support.store.database import add, change, job_row
from tests.support.values.batches import progress

S = 10**9
ON_BOTH_DATABASES = True
CLOCK = FakeClock
MINUTES_11 = 660 * S


@pytest.fixture
def sound(api):
    """An api whose stream and notifier have just reported, and which has a receiver."""
    add(api.engine, StreamPosition, partition=0, position=7, tick_number=1, epoch=3)
    stream_reports(api)
    notifier_reports(api)
    add_receiver(api, "pager")
    return api


def add_receiver(api, name: str, **changes) -> None:
    row = {"name": name, "url": b"", "secret": b"", "kinds": [], "severities": [], "jobs": [], "created_unix_ns": 1}
    encrypted = {"url": api.app.state.context.secret_key.encrypt("https://example.com/hook")}
    add(api.engine, Receiver, **row | encrypted | {"secret": ""} | changes)


def message(api, name: str, state: str, ago_ns: int, tries: int, error: str = "") -> None:
    at = api.clock.unix_ns() - ago_ns
    row = {"id": f"msg_{name}_{state}", "receiver": name, "incident_id": "", "transition": 1, "body": b"{}"}
    times = {"next_try_unix_ns": at, "created_unix_ns": at, "delivered_unix_ns": None}
    add(api.engine, Outbox, **row, **times, state=state, tries=tries)
    if tries:
        add(api.engine, Delivery, outbox_id=row["id"], at_unix_ns=at, status=None, error=error, seconds=0.1)


def job(api, name: str, **changes) -> None:
    now = api.clock.unix_ns()
    add(api.engine, Job, job_row(name, **{"last_seen_unix_ns": now, "last_progress_unix_ns": now} | changes))


def view(api, host: str, ago_s: int, attempt: str = "l.0") -> None:
    at = api.clock.unix_ns() - ago_s * S
    add(api.engine, AgentView, job="gpt", attempt=attempt, host=host, agent="", boot="b", ranks=b"\x90", at_unix_ns=at)


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
    change(sound.engine, delete(Lease))
    notifier_reports(sound, ago_s=95)
    [problem] = health(sound)["problems"]
    assert problem["text"] == "No notifier has run for 1 min: nobody is notified of incidents."


def test_a_receiver_that_cannot_be_reached_is_named_with_the_error_of_its_newest_try(sound):
    message(sound, "pager", "waiting", 30 * S, 1, "503 Service Unavailable")
    assert areas(sound) == []  # the next try may arrive
    change(sound.engine, update(Outbox).values(created_unix_ns=sound.clock.unix_ns() - MINUTES_11))
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
    assert "gone is no longer notified: the receiver answered 410" in problem["text"]


def test_silent_agents_of_the_running_attempt_are_named_and_those_of_old_attempts_and_ended_jobs_not(sound):
    job(sound, "gpt")
    for host, ago_s in (("node-1", 1), ("node-2", 90)):
        view(sound, host, ago_s)
    view(sound, "node-9", 900, attempt="k.0")
    found = health(sound)
    [problem] = found["problems"]
    assert problem["text"].startswith("1 of 2 agents of 1 job that train have not reported for 30 s: node-2 (gpt).")
    assert [one["host"] for one in found["agents"]] == ["node-2", "node-1"]
    change(sound.engine, delete(Job))
    job(sound, "gpt", state="ended")
    assert areas(sound) == []


def test_a_detector_that_is_switched_off_and_what_was_dropped_are_reported_by_job(sound):
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


@pytest.fixture
def reporter(api):
    return Reporter(api.engine, api.clock, "host:1")


def committed(api, partition: int, position: int) -> None:
    row = {"partition": partition, "position": position, "tick_number": 1, "epoch": 3}
    add(api.engine, StreamPosition, row)


def test_partitions_show_their_position_and_their_owner(api, reporter):
    api.log.append([Entry("j", b"x")] * 9)
    committed(api, 0, 7)
    reporter.report([PartitionReport(0, 3, 7, 7, 5, 0)], Counter(restarts=0, fenced=2, away=0, rebuilds=1))
    state = api.get("/api/v1/stream").json()
    [partition] = state["partitions"]
    reported = {name: partition[name] for name in ("partition", "owner", "epoch", "position", "end", "lag")}
    assert reported == {"partition": 0, "owner": "host:1", "epoch": 3, "position": 7, "end": 9, "lag": 2}
    [process] = state["processes"]
    assert process["counters"] == {"restarts": 0, "fenced": 2, "away": 0, "rebuilds": 1}


def test_with_kafka_the_end_of_a_partition_is_what_its_owner_last_reported(api, reporter):
    committed(api, 4, 100)
    reporter.report([PartitionReport(4, 3, 90, 130, 5, 11)], new_counts())
    with read(api.engine) as connection:
        [partition] = partitions(connection, in_store=False)
    assert (partition.partition, partition.lag, partition.lost_records) == (4, 30, 11)


def test_metrics_have_a_line_for_each_partition(api, reporter):
    committed(api, 0, 0)
    api.log.append([Entry("j", b"x")] * 3)
    reporter.report([PartitionReport(0, 3, 0, 3, 5, 0)], Counter(rebuilds=4))
    lines = api.get("/metrics").text.splitlines()
    assert 'rankwatch_stream_lag_records{partition="0"} 3.0' in lines
    assert 'rankwatch_stream_epoch{partition="0"} 3.0' in lines
    assert 'rankwatch_stream_events_total{process="host:1",what="rebuilds"} 4.0' in lines
    [age] = [line for line in lines if line.startswith("rankwatch_stream_report_age_seconds{")]
    assert float(age.split()[-1]) < 60.0


def ranks(api, **how):
    answer = api.get("/api/v1/commands/cmd_1/ranks", **how)
    return answer.json() if answer.status_code == 200 else answer.status_code


def test_each_rank_has_its_answer_to_the_newest_order_and_none_to_another(api):
    now = api.clock.unix_ns()
    add_command(api.engine, now)
    add_view(api.engine, now, [answered(1, "failed", "disk full"), answered(0, "done", "/ckpt/1240")])
    add_view(api.engine, now, [answered(2, "done", order="ord_0"), progress(3, 1_239)], host="node-2")
    found = ranks(api)
    assert found["order"] == "ord_1"
    reported = [(one["rank"], one["host"], one["answer"], one["step"], one["detail"]) for one in found["items"]]
    assert reported == [
        (0, "node-1", "done", 1_240, "/ckpt/1240"),
        (1, "node-1", "failed", 1_240, "disk full"),
        (2, "node-2", "", -1, ""),
        (3, "node-2", "", -1, ""),
    ]


def test_after_a_rollback_the_ranks_answer_in_the_next_attempt_of_the_launch(api):
    now = api.clock.unix_ns()
    add_command(api.engine, now)
    add_view(api.engine, now, [progress(0, 1_240)])
    add_view(api.engine, now + 1, [answered(0, "went")], attempt="l.1")
    add_view(api.engine, now + 2, [progress(0, 1)], attempt="other.0")
    assert [one["answer"] for one in ranks(api)["items"]] == ["went"]


def test_who_may_not_see_the_job_gets_404_and_silence_of_the_agents_is_no_answer(api):
    add_command(api.engine, api.clock.unix_ns())
    assert ranks(api) == {"order": "ord_1", "items": []}
    assert ranks(api, token=api.token(Scope.READ, job="other")) == 404
