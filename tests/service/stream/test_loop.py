"""The stream over a real database: ownership, snapshots, retention, downtime."""

from __future__ import annotations

import pytest
from sqlalchemy import delete, event, func, select, update

from rankwatch import wire
from rankwatch_service.log.base import Entry
from rankwatch_service.names import ALL_JOBS
from rankwatch_service.policy.control_records import IncidentReview
from rankwatch_service.policy.policy import Mode, Policy, PolicyLimits, Rule, policy_record
from rankwatch_service.store import models
from rankwatch_service.store.engine import read, write
from rankwatch_service.stream import loop
from rankwatch_service.stream.loop import Stream
from rankwatch_service.stream.saved import FencedError, pack
from rankwatch_service.stream.sources import SqlSource
from tests.support.service.stream import Service
from tests.support.values.batches import batch, progress, ranks, table

RULES = Policy((Rule("r1", Mode.ACT, action="pause"),), hands_off=True)


def saved(service: Service, stream: Stream, *jobs: str) -> None:
    for name in jobs or (ALL_JOBS, *stream.partition.jobs):
        stream.save(name)


def trimmed(service: Service, stream: Stream) -> None:
    """Save all jobs so often that the beginning of the log is needed no more."""
    for _ in range(3):
        saved(service, stream)
    service.clock.advance(loop.SNAPSHOT_S)
    stream.step()
    stream.save_due()
    assert service.log.begin(0) > 0


def test_a_batch_and_its_position_are_committed_together(service, stream):
    service.train(1, 2)
    assert stream.step() == 2
    assert service.column(select(models.StreamPosition.position)) == [2]
    assert service.column(select(models.Job.name)) == ["gpt"]


def test_an_owner_that_was_replaced_can_commit_nothing_more(service):
    old = service.started()
    service.train(1)
    new = service.started()
    with pytest.raises(FencedError):
        old.step()
    assert service.column(select(models.StreamPosition.position)) == [0]
    assert new.step() == 1


def test_time_is_stored_about_once_a_second_while_there_is_a_job(service, stream):
    for _ in range(5):
        service.clock.advance(0.25)
        stream.step()
    assert service.column(select(func.count(models.StreamTick.number))) == [1]
    service.train(1)
    for _ in range(40):
        service.clock.advance(0.25)
        stream.step()
    # One of its own for the record, then one for each second.
    assert service.column(select(func.count(models.StreamTick.number))) == [12]


def test_a_backlog_is_lived_through_at_the_time_it_was_written(service, stream):
    for step in range(5):
        service.train(step)
        service.clock.advance(1.0)
    service.clock.advance(60.0)
    stream.step()
    times = service.column(select(models.StreamTick.time_unix_ns).order_by(models.StreamTick.number))
    assert [round((time - times[0]) / 1e9) for time in times] == [0, 1, 2, 3, 4, 65]


def test_hosts_are_not_held_silent_while_the_service_was_down(service, stream):
    for step in range(30):
        service.send(progress=(progress(0, step), progress(1, step)), steps=table([step] * 2, [0, 1], loss=[1.0] * 2))
        service.clock.advance(1.0)
        stream.step()
    service.clock.advance(300.0)
    stream = service.started()
    for _ in range(5):
        stream.step()
        service.clock.advance(1.0)
    assert service.column(select(models.Incident.kind)) == []
    for _ in range(30):
        stream.step()
        service.clock.advance(1.0)
    assert service.column(select(models.Incident.kind)) == ["telemetry_lost"]


def test_a_start_replays_only_what_lies_behind_the_snapshot(service, stream):
    service.train(*range(10))
    stream.step()
    saved(service, stream)
    service.train(10, 11)
    stream.step()
    again, started = service.again()
    assert (started.replayed_records, started.jobs_without_snapshot, started.detectors_without_snapshot) == (2, (), {})
    assert again.partition.jobs["gpt"].state().keys() == stream.partition.jobs["gpt"].state().keys()
    assert again.partition.offsets == stream.partition.offsets


def test_hundreds_of_records_are_replayed_to_the_very_same_state(service, stream):
    for step in range(300):
        fields = {"ranks": ranks(2)} if step == 0 else {}
        values = {"loss": [2.0 + step % 7, 2.0], "step_time_s": [0.5, 0.5], "busy_s": [0.3, 0.3 + step % 3 / 100]}
        body = wire.encode(batch(step, steps=table([step] * 2, [0, 1], **values), **fields))
        service.log.append([Entry("gpt", body)])
        service.clock.advance(0.5)
    while stream.step():
        pass
    again, started = service.again()
    assert (started.replayed_records, started.replayed_ticks) == (300, stream.partition.offsets.tick_number)
    assert pack(again.partition.snapshot("gpt")) == pack(stream.partition.snapshot("gpt"))


@pytest.mark.parametrize("data", [b"spoilt", pack({})], ids=["unreadable", "of another state"])
def test_a_spoilt_snapshot_is_passed_over_for_the_one_before(service, stream, data):
    service.train(*range(10))
    stream.step()
    saved(service, stream)
    service.train(10)
    stream.step()
    saved(service, stream)
    with write(service.engine) as connection:
        newest = connection.scalar(select(func.max(models.Snapshot.id)).where(models.Snapshot.job == "gpt"))
        corrupted = update(models.SnapshotChunk).where(models.SnapshotChunk.snapshot_id == newest)
        connection.execute(corrupted.values(data=data))
    started = service.stream().start()
    assert (started.replayed_records, started.jobs_without_snapshot) == (1, ())


@pytest.mark.parametrize("change", [{"complete": False}, {"version": "0"}, {"position": 10**9}])
def test_a_snapshot_that_is_half_written_foreign_or_ahead_is_not_used(service, stream, change):
    service.train(*range(10))
    stream.step()
    saved(service, stream)
    with write(service.engine) as connection:
        connection.execute(update(models.Snapshot).values(**change))
    started = service.stream().start()
    assert (started.replayed_records, started.jobs_without_snapshot) == (10, ())


def test_two_snapshots_are_kept_and_half_written_ones_go(service, monkeypatch):
    monkeypatch.setattr("rankwatch_service.stream.saved.CHUNK_BYTES", 256)
    stream = service.started()
    service.train(1)
    stream.step()
    for _ in range(4):
        stream.save("gpt")
    with write(service.engine) as connection:
        connection.execute(update(models.Snapshot).where(models.Snapshot.id == 4).values(complete=False))
    stream.save("gpt")
    assert service.column(select(models.Snapshot.id).order_by(models.Snapshot.id)) == [3, 5]
    chunks = select(models.SnapshotChunk.snapshot_id).distinct().order_by(models.SnapshotChunk.snapshot_id)
    assert service.column(chunks) == [3, 5]


def test_the_log_is_kept_until_every_job_has_two_snapshots_behind_it(service, stream):
    service.train(*range(10))
    service.train(0, job="other")
    stream.step()
    saved(service, stream)
    stream.save_due()
    assert service.log.begin(0) == 0
    service.train(10, 11)
    stream.step()
    saved(service, stream)
    service.clock.advance(loop.SNAPSHOT_S)
    stream.step()
    stream.save_due()
    assert service.log.begin(0) > 10
    assert service.column(select(func.min(models.StreamTick.number))) == [1]
    started = service.stream().start()
    assert started.jobs_without_snapshot == ()


def test_a_job_whose_past_is_lost_goes_on_with_its_open_incidents(service, stream):
    service.append(ALL_JOBS, policy_record(RULES))
    service.train(*range(10))
    service.send(steps=table([10] * 2, [0, 1], loss=[float("nan")] * 2))
    stream.step()
    (incident,) = service.column(select(models.Incident.id))
    trimmed(service, stream)
    with write(service.engine) as connection:
        connection.execute(delete(models.SnapshotChunk))
    again, started = service.again()
    assert sorted(started.jobs_without_snapshot) == [ALL_JOBS, "gpt"]
    service.send(attempt="l.1", ranks=ranks(2))
    again.step()
    assert [known.id for known in again.partition.jobs["gpt"].correlator.open] == [incident]
    for step in (5, 6, 7):
        service.send(attempt="l.1", steps=table([step] * 2, [0, 1], loss=[2.0] * 2))
    again.step()
    assert service.column(select(models.Incident.state)) == ["resolved"]


def test_a_command_is_requested_when_it_is_committed_and_not_at_the_tick_before(service, stream):
    service.append(ALL_JOBS, policy_record(Policy((Rule("r1", Mode.ACT, kind="nonfinite", action="pause"),))))
    service.able()
    stream.step()
    service.clock.advance(0.7)
    service.ill(step=2)
    stream.step()
    assert service.column(select(models.Command.requested_unix_ns)) == [service.clock.unix_ns()]
    assert stream.partition.now_ns < service.clock.unix_ns()


def test_a_record_that_breaks_something_of_ours_becomes_a_dead_letter(service, stream, monkeypatch):
    service.train(1)
    stream.step()

    def broken(*_args, **_how):
        raise RuntimeError("ours")

    with monkeypatch.context() as patch:
        patch.setattr(stream.partition.jobs["gpt"]._assembler, "add", broken)
        service.train(2)
        assert stream.step() == 1
    service.train(3)
    stream.step()
    assert service.column(select(models.DeadLetter.reason)) == ["failed"]
    assert service.column(select(models.DeadLetter.detail)) == ["partition 0, position 1: RuntimeError: ours"]


def test_closing_makes_the_next_start_immediate(service, stream):
    service.train(*range(10))
    stream.step()
    stream.close()
    started = service.stream().start()
    assert (started.replayed_records, started.replayed_ticks) == (0, 0)


def test_what_people_decide_counts_at_once_and_is_stored_with_a_tick(service, stream):
    service.train(1)
    stream.step()
    rules = Policy(hands_off=True)
    service.append(ALL_JOBS, policy_record(rules))
    service.clock.advance(0.01)
    stream.step()
    assert stream.partition.jobs["gpt"].settings.policy == rules
    assert service.column(select(models.StreamPosition.control_position)) == [1]
    assert service.column(select(models.StreamTick.control_position).order_by(models.StreamTick.number)) == [0, 1]
    again = service.started()
    assert again.partition.jobs["gpt"].settings.policy == rules
    assert again.partition.offsets == stream.partition.offsets
    ticks = service.column(select(func.count(models.StreamTick.number)))
    again.step()
    assert service.column(select(func.count(models.StreamTick.number))) == ticks


def test_a_backlog_meets_what_people_decided_at_the_time_they_did(service, stream):
    first, second = Policy(hands_off=True), Policy(hands_off=False, limits=PolicyLimits(cool_down_s=7.0))
    service.train(1)
    service.clock.advance(0.2)
    service.append(ALL_JOBS, policy_record(first))
    service.clock.advance(0.2)
    service.train(2)
    service.clock.advance(0.2)
    service.append(ALL_JOBS, policy_record(second))
    service.clock.advance(0.2)
    service.train(3)
    stream.step(records_max=2)
    assert stream.partition.jobs["gpt"].settings.policy == first
    stream.step(records_max=2)
    assert stream.partition.jobs["gpt"].settings.policy == second
    places = select(models.StreamTick.position, models.StreamTick.control_position).order_by(models.StreamTick.number)
    with read(service.engine) as connection:
        assert connection.execute(places).all() == [(0, 0), (1, 1), (2, 2)]


class FirstOfTwo(SqlSource):
    def partition_of(self, key: str) -> int:
        return 1 if key == "elsewhere" else 0


def test_a_decision_about_a_job_of_another_partition_moves_nothing_here(service):
    service.log = FirstOfTwo(service.engine, service.clock)
    stream = service.started()
    stream.step()
    service.append("elsewhere", IncidentReview("inc", "resolved", "ann"))
    service.clock.advance(0.01)
    stream.step()
    assert service.column(select(func.count(models.StreamTick.number))) == [1]
    service.append(ALL_JOBS, policy_record(Policy()))
    service.clock.advance(0.01)
    stream.step()
    assert service.column(select(models.StreamPosition.control_position)) == [2]


def test_a_decision_that_cannot_be_read_becomes_a_dead_letter(service, stream):
    service.train(1)
    stream.step()
    with write(service.engine) as connection:
        service.controls.append_in(connection, [Entry("gpt", b'{"record":"of a newer version"}')])
    stream.step()
    assert service.column(select(models.DeadLetter.reason)) == ["failed"]
    assert service.column(select(models.StreamPosition.control_position)) == [1]


def test_decisions_are_kept_until_no_start_needs_them(service, stream):
    service.append(ALL_JOBS, policy_record(Policy(hands_off=True)))
    service.train(1)
    stream.step()
    saved(service, stream)
    stream.save_due()
    assert service.controls.begin() == 0
    for _ in range(2):
        service.clock.advance(loop.SNAPSHOT_S)
        stream.step()
        stream.save_due()
    assert service.controls.begin() == 1
    again = service.started()
    assert again.partition.jobs["gpt"].settings.policy.hands_off


def test_several_jobs_are_written_with_one_statement_for_each_table(service, stream):
    for job in ("gpt", "other", "third"):
        service.train(1, 2, job=job)
    statements: list[str] = []
    event.listen(service.engine, "before_cursor_execute", lambda *call: statements.append(call[2]))
    stream.step()
    for name in ("job", "attempt"):
        assert sum(text.startswith(f"INSERT INTO {name} ") for text in statements) == 1
    assert sorted(service.column(select(models.Job.name))) == ["gpt", "other", "third"]
    assert sorted(service.column(select(models.Attempt.job))) == ["gpt", "other", "third"]
