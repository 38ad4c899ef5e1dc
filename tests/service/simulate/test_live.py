"""Sending a job live: in order for each host, at its times, each batch until it is accepted; the end is reported."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence

from rankwatch import wire
from rankwatch_service.clock import SystemClock
from rankwatch_service.simulate.faults import Throttle
from rankwatch_service.simulate.job import Job
from rankwatch_service.simulate.live import NotYetError, Pace, RefusedError, send_job
from tests.support.clock import FakeClock


class FakeService:
    """Accepts batches of all connections, and fails on request."""

    def __init__(self) -> None:
        self.taken: dict[str, list[wire.Batch]] = defaultdict(list)
        self.not_yet = 0
        self.refuse = False
        self.closed = 0
        self._lock = threading.Lock()

    def send(self, job: str, bodies: Sequence[bytes]) -> None:
        batches = [wire.decode_batch(body) for body in bodies]
        assert {batch.job for batch in batches} == {job}
        with self._lock:
            if self.refuse:
                raise RefusedError("never")
            if self.not_yet:
                self.not_yet -= 1
                raise NotYetError("busy", 0.01)
            for batch in batches:
                self.taken[batch.host].append(batch)

    def close(self) -> None:
        with self._lock:
            self.closed += 1


AT_ONCE = Pace(0, SystemClock())


def test_all_batches_arrive_in_the_order_of_their_host_though_some_had_to_be_sent_again() -> None:
    service = FakeService()
    service.not_yet = 7
    sent = send_job(Job(128, 30, 1), "gpt", lambda: service, AT_ONCE)
    assert sent.failure == ""
    assert (sent.retries, sent.rank_steps) == (7, 128 * 30)
    assert len(service.taken) == 16
    for batches in service.taken.values():
        assert [batch.seq for batch in batches] == list(range(len(batches)))
    assert service.closed == 2


def test_two_runs_of_one_name_are_two_attempts_of_two_boots_that_obey_no_orders() -> None:
    seen = set()
    for begins_ns in (10**18, 10**18 + 7 * 10**9):
        service = FakeService()
        send_job(Job(8, 5, 1), "gpt", lambda service=service: service, Pace(0, FakeClock(begins_ns)))
        first = service.taken["host-0"][0]
        seen.add((first.attempt, first.boot))
        assert first.ranks[0].can == ()
    assert len(seen) == 2


def test_a_job_lives_in_real_time_and_stops_when_it_is_told_to() -> None:
    class Clock(SystemClock):
        slept_s = 0.0

        def monotonic_s(self) -> float:
            return self.slept_s

        def sleep(self, seconds: float) -> None:
            self.slept_s += seconds

    service, clock = FakeService(), Clock()
    job = Job(8, 100, 1)
    sent = send_job(job, "gpt", lambda: service, Pace(2.0, clock), stopped=lambda: clock.slept_s >= 20)
    steps = sum(batch.steps.rows for batch in service.taken["host-0"] if batch.steps) // 8
    assert 36 <= steps <= 50
    assert sent.failure == ""


def test_a_refused_batch_ends_the_job_with_the_reason() -> None:
    service = FakeService()
    service.refuse = True
    sent = send_job(Job(64, 10_000, 1), "gpt", lambda: service, AT_ONCE)
    assert sent.failure == "never"
    assert sent.batches == 0


def test_a_service_that_stays_away_is_given_up() -> None:
    class Patient(SystemClock):
        now_s = 0.0

        def monotonic_s(self) -> float:
            return self.now_s

        def sleep(self, seconds: float) -> None:
            self.now_s += 10.0

    service = FakeService()
    service.not_yet = 10**9
    sent = send_job(Job(8, 5, 1), "gpt", lambda: service, Pace(0, Patient()))
    assert sent.failure == "busy"


def test_the_devices_of_ranks_have_counters_once_a_second_and_a_throttled_one_is_hot_and_slow() -> None:
    service, clock = FakeService(), FakeClock(10**18)
    job = Job(16, 60, 1, step_s=1.0).inject(Throttle(rank=3, from_step=20, factor=1.3, until_step=40))
    send_job(job, "gpt", lambda: service, Pace(1, clock))
    read = {host: [one for batch in batches for one in batch.devices] for host, batches in service.taken.items()}
    assert {len({one.device_uuid for one in samples}) for samples in read.values()} == {8}
    of_rank_3 = [one for one in read["host-0"] if one.device_uuid == job.topology().device_uuid[3]]
    assert 60 <= len(of_rank_3) < 100
    hot = [one for one in of_rank_3 if one.throttle_reasons == 0x40]
    assert 20 <= len(hot) < 35
    assert min(one.temperature_celsius or 0 for one in hot) > max(
        one.temperature_celsius or 0 for one in of_rank_3 if one not in hot
    )
    assert {one.throttle_reasons for one in read["host-1"]} == {0x04}
