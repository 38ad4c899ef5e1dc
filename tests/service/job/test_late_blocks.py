"""Late telemetry is not a slow rank: the times that ranks report of their steps decide, whenever they arrive."""

from collections.abc import Callable, Collection, Iterator

import msgspec
import pytest

from rankwatch_detectors.base import Change, Finding
from rankwatch_detectors.progress.hang import HangConfig, HangDetector
from rankwatch_service.job.assembler import Assembler
from rankwatch_service.simulate.batches import batches
from rankwatch_service.simulate.faults import Hang
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job
from rankwatch_service.simulate.placement import RankPlacement
from tests.support.values.batches import bundle

HOSTS = 8


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
    for at_s, _, batch in sorted(arrivals):
        while now_s < at_s:
            now_s += 1.0
            for observation in assembler.tick(now_s, 0.0):
                yield from detector.observe(observation)
        assert assembler.topology_state.lockstep
        for observation in assembler.take(bundle(batch), now_s):
            yield from detector.observe(observation)


def job(step_s: float) -> Job:
    return Job(
        world_size=32,
        step_s=step_s,
        steps=int(240 / step_s),
        seed=1,
        placement=RankPlacement(ranks_per_host=32 // HOSTS),
    )


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
    told = list(findings(job(1.0).inject(Hang(29, 150, seconds=20)), way, {"host-0"}))
    assert {finding.ranks for finding in told} == {(29,)}
    assert [finding.change for finding in told] == [Change.OPEN, Change.UPDATE, Change.CLOSE]


def test_a_job_that_is_late_as_a_whole_still_hangs() -> None:
    told = list(findings(job(1.0).inject(Hang(29, 150, seconds=20)), WAYS["always half a minute"], hosts(HOSTS)))
    assert {finding.ranks for finding in told} == {(29,)}


@pytest.mark.parametrize("by_s", [20, -20, 3600, -3600])
def test_a_clock_that_is_corrected_while_a_job_runs_is_no_hang_and_hides_none(by_s: int) -> None:
    def clock_s(sent_s: float) -> int:
        return by_s if sent_s > 100 else 0

    told = list(
        findings(job(1.0).inject(Hang(29, 150, seconds=20)), WAYS["always half a minute"], hosts(HOSTS), clock_s)
    )
    assert {finding.ranks for finding in told} == {(29,)}
