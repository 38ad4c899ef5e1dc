"""What befalls batches on their way: nothing is lost, everything can come twice, late, or by another clock."""

from __future__ import annotations

from collections import Counter

from rankwatch_service.simulate.batches import TimedBatch, batches
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job
from rankwatch_service.simulate.transit import Transit, disturbed


def sent(job: Job) -> list[TimedBatch]:
    return list(disturbed(batches("gpt", generate(job)), job.transit, job.seed))


def names(messages: list[TimedBatch]) -> list[tuple[str, str, int]]:
    return [(message.batch.host, message.batch.boot, message.batch.seq) for message in messages]


def job(transit: Transit | None = None) -> Job:
    return Job(16, 60, 1, step_s=0.5, transit=transit or Transit())


def test_an_undisturbed_job_comes_as_it_was_sent() -> None:
    assert names(sent(job())) == names(list(batches("gpt", generate(job()))))


def test_late_and_doubled_batches_are_the_same_batches_in_another_order() -> None:
    plain = names(sent(job()))
    messages = sent(job(Transit(doubled=0.2, late=0.1, late_s=3.0)))
    assert set(names(messages)) == set(plain)
    assert names(messages) != plain
    assert 10 < sum(count - 1 for count in Counter(names(messages)).values()) < len(plain) / 2
    times = [message.time_s for message in messages]
    assert times == sorted(times)


def test_a_host_with_a_wrong_clock_stamps_by_it_and_others_do_not() -> None:
    pairs = zip(sent(job()), sent(job(Transit(skews_s={"host-1": -2.5}))), strict=True)
    for plain, skewed in pairs:
        ahead_ns = -2_500_000_000 if plain.batch.host == "host-1" else 0
        assert skewed.batch.sent_unix_ns - plain.batch.sent_unix_ns == ahead_ns
        for before, after in zip(plain.batch.events, skewed.batch.events, strict=True):
            assert after.time_unix_ns - before.time_unix_ns == ahead_ns


def test_a_new_collector_has_another_boot_and_counts_from_0() -> None:
    messages = sent(job(Transit(collector_restarts_s={"host-0": 12.0})))
    again = [message for message in messages if message.batch.boot.endswith("-again")]
    assert {message.batch.host for message in again} == {"host-0"}
    assert [message.batch.seq for message in again] == list(range(len(again)))
    assert min(message.time_s for message in again) >= 12.0
