"""Synthetic jobs: seeded, in order, true to their script, with labels beside."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from rankwatch_detectors.base import AttemptStart, Frame, Kind, Occurrence
from rankwatch_service.simulate.batches import TimedBatch, batches
from rankwatch_service.simulate.faults import (
    BitFlip,
    Hang,
    HostSilence,
    Kill,
    LossSpike,
    NonFinite,
    OrderedPause,
    Restart,
    ScalerSkip,
    Slow,
)
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job, Noise, RankPlacement
from rankwatch_service.simulate.transit import Transit, disturbed


def frames(job: Job) -> list[Frame]:
    return [observation for observation in generate(job) if isinstance(observation, Frame)]


def test_a_slow_rank_is_slower_by_its_factor_while_it_lasts() -> None:
    plain, slowed = frames(Job(8, 60, 6)), frames(Job(8, 60, 6).inject(Slow(5, 20, 1.5, until_step=40)))
    ratio = np.stack([b.values["busy_s"] / a.values["busy_s"] for a, b in zip(plain, slowed, strict=True)])
    assert ratio[20:40, 5] == pytest.approx(1.5)
    assert ratio[:20, 5] == pytest.approx(1.0)
    assert ratio[:, :5] == pytest.approx(1.0)


def test_a_bit_flips_though_the_job_was_rolled_back_before_and_so_does_a_second_one_of_its_rank() -> None:
    job = Job(8, 60, 7).inject(BitFlip(2, 15), Restart(20, 10, relaunch=False), BitFlip(2, 45))
    differing = [
        (frame.attempt, frame.step)
        for frame in frames(job)
        if "fingerprint" in frame.exact and np.unique(frame.exact["fingerprint"]).size == 2
    ]
    assert differing == [("launch0.0", 20), ("launch0.1", 50)]


def test_a_rollback_repeats_steps_under_another_attempt_without_the_fault() -> None:
    job = Job(4, 40, 9).inject(NonFinite(1, 20), Restart(22, 15, relaunch=False))
    starts = [o.attempt for o in generate(job) if isinstance(o, AttemptStart)]
    assert starts == ["launch0.0", "launch0.1"]
    repeated = [frame for frame in frames(job) if frame.attempt == "launch0.1"]
    assert repeated[0].step == 15
    assert not any((frame.exact["nonfinite"] > 0).any() for frame in repeated)


def test_every_fault_leaves_a_label() -> None:
    job = Job(8, 100, 12).inject(
        Slow(1, 10, 1.5), Hang(2, 20), Kill(3, 90), BitFlip(4, 30), LossSpike(40, 3.0), HostSilence("host-0", 5, 9)
    )
    kinds = [label.kind for label in job.labels]
    assert kinds == [
        Kind.STRAGGLER, Kind.HANG, Kind.RANK_LOST, Kind.CORRUPTION, Kind.LOSS_SPIKE, Kind.TELEMETRY_LOST
    ]  # fmt: skip
    assert (
        Job(8, noise=Noise(uneven_cv=0.1, hiccup_probability=0.1, hiccup_s=1.0))
        .inject(Slow(1, 10, 0.5), ScalerSkip(5), OrderedPause(6, 10.0))
        .labels
        == ()
    )


def test_nan_in_several_ranks_of_one_step_is_one_fault_and_no_skip_hides_it() -> None:
    job = Job(8, 30, 8).inject(ScalerSkip(20), NonFinite(5, 20), NonFinite((1, 2), 20), ScalerSkip(20))
    rows = {frame.step: frame for frame in frames(job)}
    assert np.flatnonzero(rows[20].exact["nonfinite"]).tolist() == [1, 2, 5]
    assert [(label.kind, label.ranks) for label in job.labels] == [(Kind.NONFINITE, (1, 2, 5))]


def test_what_was_to_happen_in_a_step_that_a_process_did_not_finish_happens_when_it_is_repeated() -> None:
    job = Job(8, 60, 7).inject(NonFinite(1, 40), BitFlip(2, 40), Kill(3, 40), Restart(40, 35))
    (frame,) = [frame for frame in frames(job) if frame.step == 40]
    assert np.flatnonzero(frame.exact["nonfinite"]).tolist() == [1]
    assert np.unique(frame.exact["fingerprint"]).size == 2


def test_what_lies_behind_the_end_of_the_job_is_not_to_be_found() -> None:
    def left(job: Job) -> list[tuple[Kind, int]]:
        return [(label.kind, label.at_step) for label in job.played_labels()]

    hung, lost = (Kind.HANG, 50), (Kind.RANK_LOST, 50)
    before, after = (Kind.CORRUPTION, 40), (Kind.CORRUPTION, 60)
    job = Job(8, 100).inject(BitFlip(3, 40), Hang(2, 50), Kill(2, 50), NonFinite(1, 50), BitFlip(4, 60))
    assert left(job) == [before, hung, lost]
    assert left(Job(8, 100).inject(BitFlip(3, 40), Kill(2, 50), Restart(50, 30), BitFlip(4, 60))) == [
        before,
        lost,
        after,
    ]
    assert left(Job(8, 55).inject(BitFlip(3, 40), BitFlip(4, 60))) == [before]


def test_ranks_leave_at_the_end_and_a_killed_job_does_not() -> None:
    def left(job: Job) -> int:
        return sum(isinstance(o, Occurrence) and o.kind == "rank_left" for o in generate(job))

    assert left(Job(4, 10)) == 4
    assert left(Job(4, 10).inject(Kill(1, 5))) == 0


def test_topology_follows_the_usual_order_of_dimensions() -> None:
    topology = Job(32, placement=RankPlacement(tp=2, pp=4)).topology()
    assert topology.tp[:4].tolist() == [0, 1, 0, 1]
    assert np.unique(topology.peer_group).size == 8
    assert topology.pp[-1] == 3
    with pytest.raises(ValueError, match="multiple"):
        Job(30, placement=RankPlacement(tp=4)).topology()


def sent(job: Job) -> list[TimedBatch]:
    return list(disturbed(batches("gpt", generate(job)), job.transit, job.seed))


def names(messages: list[TimedBatch]) -> list[tuple[str, str, int]]:
    return [(message.batch.host, message.batch.boot, message.batch.seq) for message in messages]


def job(transit: Transit | None = None) -> Job:
    return Job(16, 60, 1, step_s=0.5, transit=transit or Transit())


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
