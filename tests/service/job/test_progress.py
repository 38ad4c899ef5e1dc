"""How far ranks are, also where telemetry is late and where ranks do not wait for each other."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence

import msgspec
import pytest

from rankwatch import wire
from rankwatch_detectors.base import AttemptStart, Change, Finding
from rankwatch_detectors.catalogue import detectors
from rankwatch_detectors.progress.hang import HangDetector
from rankwatch_detectors.progress.progress_timeout import HangConfig
from rankwatch_service.job.assembler import Assembler
from rankwatch_service.job.progress_board import ProgressBoard
from rankwatch_service.simulate.batches import batches
from rankwatch_service.simulate.faults import Hang
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job, RankPlacement
from tests.support.detection.verdicts import judged
from tests.support.values.batches import batch, bundle, progress, ranks, table


def block(rank: int, step: int, phase: str = "forward", state: str = "running") -> wire.Progress:
    return wire.Progress(rank, step, phase, 0.5, 1.5, 10 * step, state=state, cpu_s=2.0 * step)


def test_the_last_of_several_blocks_of_a_rank_counts():
    board = ProgressBoard("l.0", 3)
    board.apply([batch(progress=(block(1, 4), block(0, 5), block(1, 6, "backward")))], 7.0)
    seen = board.presence()
    assert seen.has_reported.tolist() == [True, True, False]
    assert seen.step.tolist() == [5, 6, -1]
    assert seen.collective_seq.tolist() == [50, 60, 0]
    assert seen.cpu_s.tolist() == [10.0, 12.0, 0.0]
    assert seen.phase == ("forward", "backward", "")
    assert seen.received_s.tolist() == [7.0, 7.0, 0.0]


def test_ranks_that_the_attempt_does_not_have_are_left_out():
    board = ProgressBoard("l.0", 2)
    board.apply([batch(progress=(block(2, 1),))], 1.0)
    assert not board.presence().has_reported.any()
    board.apply([batch(progress=(block(2, 1), block(1, 3)))], 1.0)
    assert board.presence().step.tolist() == [-1, 3]


def test_a_rank_that_left_its_loop_stays_left():
    board = ProgressBoard("l.0", 1)
    board.apply([batch(progress=(block(0, 1, state="left"), block(0, 1, state="exited")))], 1.0)
    assert board.presence().state == ("left",)


def test_a_block_without_a_time_of_sending_has_its_time_of_arrival():
    board = ProgressBoard("l.0", 2)
    board.apply(
        [batch(progress=(block(0, 1),), sent_unix_ns=5 * 10**9), batch(progress=(block(1, 1),), sent_unix_ns=0)], 9.0
    )
    assert board.presence().sent_s.tolist() == [5.0, 9.0]


HOSTS, RANKS = 4, 16


def findings(
    job: Job,
    way_s: Callable[[float], float],
    late_hosts: Collection[str],
    clock_s: Callable[[float], int] = lambda _: 0,
) -> Iterator[Finding]:
    """Findings about a job in which the blocks of `late_hosts` take `way_s(sent)` seconds to arrive, in their order.

    The clock of host 1 is ahead by `clock_s(sent)`.
    """
    detector, assembler = HangDetector(HangConfig()), Assembler()
    arrivals = []
    for message in batches("gpt", generate(job), start_unix_ns=10**18):
        late = way_s(message.time_s) if message.batch.host in late_hosts else 0.0
        sent_unix_ns = message.batch.sent_unix_ns
        if message.batch.host == "host-1":
            sent_unix_ns += clock_s(message.time_s) * 10**9
        bare = msgspec.structs.replace(message.batch, steps=None, values=None, sent_unix_ns=sent_unix_ns)
        arrivals.append((message.time_s + late, len(arrivals), bare))
    now_s = 0.0
    for at_s, _, sent in sorted(arrivals):
        while now_s < at_s:
            now_s += 1.0
            for observation in assembler.tick(now_s, 0.0):
                yield from detector.observe(observation)
        assert assembler.topology_state.lockstep
        for observation in assembler.add(bundle(sent), now_s):
            yield from detector.observe(observation)


def job(step_s: float) -> Job:
    placement = RankPlacement(ranks_per_host=RANKS // HOSTS)
    return Job(world_size=RANKS, step_s=step_s, steps=int(240 / step_s), seed=1, placement=placement)


def hosts(count: int) -> set[str]:
    return {f"host-{number}" for number in range(count)}


WAYS: dict[str, Callable[[float], float]] = {
    "always half a minute": lambda _: 30.0,
    "falls behind to half a minute": lambda sent_s: min(sent_s / 2, 30.0),
    "begins half a minute late and catches up": lambda sent_s: max(30.0 - 0.8 * sent_s, 0.0),
    "is away for half a minute and sends all at once": lambda sent_s: max(90.0 - sent_s, 0.0) if sent_s > 60 else 0.0,
}


@pytest.mark.parametrize("step_s", [1.0, 4.0, 10.0])
@pytest.mark.parametrize("count", [1, HOSTS // 2, HOSTS])
@pytest.mark.parametrize("way", WAYS)
def test_telemetry_that_comes_late_is_no_hang(way: str, count: int, step_s: float) -> None:
    assert list(findings(job(step_s), WAYS[way], hosts(count))) == []


def test_a_host_with_late_blocks_is_not_named_for_the_hang_of_another_rank() -> None:
    way = WAYS["falls behind to half a minute"]
    reported = list(findings(job(1.0).inject(Hang(13, 150, seconds=20)), way, {"host-0"}))
    assert {finding.ranks for finding in reported} == {(13,)}
    assert [finding.change for finding in reported] == [Change.OPEN, Change.UPDATE, Change.CLOSE]


def test_a_job_that_is_late_as_a_whole_still_hangs() -> None:
    reported = list(findings(job(1.0).inject(Hang(13, 150, seconds=20)), WAYS["always half a minute"], hosts(HOSTS)))
    assert {finding.ranks for finding in reported} == {(13,)}


@pytest.mark.parametrize("by_s", [20, -20, 3600, -3600])
def test_a_clock_that_is_corrected_while_a_job_runs_is_no_hang_and_hides_none(by_s: int) -> None:
    def clock_s(sent_s: float) -> int:
        return by_s if sent_s > 100 else 0

    reported = list(
        findings(job(1.0).inject(Hang(13, 150, seconds=20)), WAYS["always half a minute"], hosts(HOSTS), clock_s)
    )
    assert {finding.ranks for finding in reported} == {(13,)}


EPOCH_S = 10**9


class Paces:
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
                *self.assembler.add(bundle(message), self.now_s),
                *self.assembler.tick(self.now_s, 0.0),
            ]:
                if isinstance(observation, AttemptStart):
                    self.topologies.append(observation.topology.lockstep)
                found += [finding for detector in self.detectors for finding in detector.observe(observation)]
        return found


ROLLOUTS = (0.05, 0.4, 2.5, 9.0)


def test_ranks_reported_out_of_lockstep_are_no_hang_and_one_that_stops_is_found() -> None:
    job = Paces(ROLLOUTS, lockstep=False)
    assert job.live(300) == []
    assert job.topologies == [False]
    (found,) = job.live(100, standing=[1])
    assert (found.kind, str(found.scope), found.severity) == ("hang", "rank:1", "warning")


def test_ranks_out_of_lockstep_are_detected_within_seconds_and_are_no_hang() -> None:
    job = Paces(ROLLOUTS)
    assert job.live(300) == []
    assert job.topologies == [True, False]
    (found,) = job.live(100, standing=[1])
    assert str(found.scope) == "rank:1"


def test_a_server_that_makes_no_steps_beside_workers_that_do_is_no_hang() -> None:
    job = Paces((1e9, 0.1, 0.1, 0.1))
    assert [f for f in job.live(300) if f.severity != "info"] == []
    assert job.topologies == [True, False]


@pytest.mark.parametrize("step_s", [0.03, 1.0, 20.0])
def test_ranks_in_lockstep_stay_so_whatever_their_steps_take(step_s: float) -> None:
    job = Paces((step_s,) * 4)
    job.live(300)
    assert job.topologies == [True]


def test_ranks_that_count_their_steps_anew_one_after_the_other_stay_in_lockstep() -> None:
    job = Paces((0.05,) * 4)
    job.live(60)
    for rank in range(4):
        job.step[rank] = 0
        job.live(1)
    job.live(60)
    assert job.topologies == [True]


def test_the_end_of_lockstep_outlives_a_restart_and_not_the_launch() -> None:
    job = Paces(ROLLOUTS)
    job.live(60)
    job.assembler = Assembler.restored(job.assembler.state())
    assert not job.assembler.topology_state.lockstep
    for _ in job.assembler.add(bundle(batch(0, attempt="m.0", ranks=ranks(4), boot="next")), job.now_s):
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
        reported = {"steps": table(steps, rows, loss=loss), "sent_unix_ns": (EPOCH_S + second) * 10**9}
        batches.append(batch(second, **reported))
    (incident,) = judged(batches)
    assert (incident["kind"], incident["severity"], incident["ranks"]) == ("nonfinite", "critical", [3])
    assert (incident["onset_step"], incident["state"]) == (30, "resolved")
