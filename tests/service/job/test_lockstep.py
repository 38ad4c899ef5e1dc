"""Ranks that do not wait for each other are detected by the steps they make, and are then judged one by one."""

import math
from collections.abc import Sequence

import msgspec
import pytest

from rankwatch_detectors.base import AttemptStart, Finding
from rankwatch_detectors.catalogue import detectors
from rankwatch_service.job.assembler import Assembler
from tests.support.detection.judged import judged
from tests.support.values.batches import batch, bundle, progress, ranks, table

EPOCH_S = 10**9


class Job:
    """Ranks on one host, each at its own pace, seen by all detectors."""

    def __init__(self, step_s: Sequence[float], *, lockstep: bool = True) -> None:
        self.step_s = step_s
        self.assembler = Assembler()
        self.detectors = detectors()
        self.topologies: list[bool] = []
        self.now_s = 0.0
        self.seq = 0
        self.infos = tuple(msgspec.structs.replace(info, lockstep=lockstep) for info in ranks(len(step_s)))
        self.since_s = [0.0] * len(step_s)
        self.step = [0] * len(step_s)

    def live(self, seconds: int, *, standing: Sequence[int] = ()) -> list[Finding]:
        found: list[Finding] = []
        for _ in range(seconds):
            self.now_s += 1.0
            for rank, step_s in enumerate(self.step_s):
                if rank not in standing:
                    made = int((self.now_s - self.since_s[rank]) / step_s)
                    self.step[rank] += made
                    self.since_s[rank] += made * step_s
            blocks = tuple(
                progress(rank, self.step[rank], step_age_s=self.now_s - self.since_s[rank])
                for rank in range(len(self.step_s))
            )
            sent_unix_ns = round((EPOCH_S + self.now_s) * 1e9)
            message = batch(self.seq, ranks=self.infos, progress=blocks, sent_unix_ns=sent_unix_ns)
            self.seq += 1
            for observation in [
                *self.assembler.take(bundle(message), self.now_s),
                *self.assembler.tick(self.now_s, 0.0),
            ]:
                if isinstance(observation, AttemptStart):
                    self.topologies.append(observation.topology.lockstep)
                found += [finding for detector in self.detectors for finding in detector.observe(observation)]
        return found


ROLLOUTS = (0.05, 0.4, 2.5, 9.0)


def test_ranks_reported_out_of_lockstep_are_no_hang_and_one_that_stops_is_found() -> None:
    job = Job(ROLLOUTS, lockstep=False)
    assert job.live(300) == []
    assert job.topologies == [False]
    (found,) = job.live(100, standing=[1])
    assert (found.kind, str(found.scope), found.severity) == ("hang", "rank:1", "warning")


def test_ranks_out_of_lockstep_are_detected_within_seconds_and_are_no_hang() -> None:
    job = Job(ROLLOUTS)
    assert job.live(300) == []
    assert job.topologies == [True, False]
    (found,) = job.live(100, standing=[1])
    assert str(found.scope) == "rank:1"


def test_a_server_that_makes_no_steps_beside_workers_that_do_is_no_hang() -> None:
    job = Job((1e9, 0.1, 0.1, 0.1))
    assert [f for f in job.live(300) if f.severity != "info"] == []
    assert job.topologies == [True, False]


@pytest.mark.parametrize("step_s", [0.03, 1.0, 20.0])
def test_ranks_in_lockstep_stay_so_whatever_their_steps_take(step_s: float) -> None:
    job = Job((step_s,) * 4)
    job.live(300)
    assert job.topologies == [True]


def test_ranks_that_count_their_steps_anew_one_after_the_other_stay_in_lockstep() -> None:
    job = Job((0.05,) * 4)
    job.live(60)
    for rank in range(4):
        job.step[rank] = 0
        job.live(1)
    job.live(60)
    assert job.topologies == [True]


def test_the_end_of_lockstep_outlives_a_restart_and_not_the_launch() -> None:
    job = Job(ROLLOUTS)
    job.live(60)
    job.assembler = Assembler.restored(job.assembler.state())
    assert not job.assembler.topology_state.lockstep
    for _ in job.assembler.take(bundle(batch(0, attempt="m.0", ranks=ranks(4), boot="next")), job.now_s):
        pass
    assert job.assembler.topology_state.lockstep


def test_a_nan_of_a_rank_far_behind_names_it_and_lasts_until_that_rank_is_finite_again() -> None:
    infos = tuple(msgspec.structs.replace(info, lockstep=False) for info in ranks(4))
    batches = [batch(0, ranks=infos, sent_unix_ns=EPOCH_S * 10**9)]
    for second in range(1, 121):
        # Three ranks make ten steps a second, and rank 3 makes one in two seconds.
        quick = [(step, rank, 1.0) for step in range(second * 10, second * 10 + 10) for rank in range(3)]
        slow = [(second // 2, 3, math.nan if 60 <= second < 70 else 1.0)] if second % 2 == 0 else []
        steps, rows, loss = zip(*quick, *slow, strict=True)
        told = {"steps": table(steps, rows, loss=loss), "sent_unix_ns": (EPOCH_S + second) * 10**9}
        batches.append(batch(second, **told))
    (incident,) = judged(batches)
    assert (incident["kind"], incident["severity"], incident["ranks"]) == ("nonfinite", "critical", [3])
    assert (incident["onset_step"], incident["state"]) == (30, "resolved")
