"""Incidents and notifications for each injected root cause, cascades included.

    python benchmarks/cascades.py [--seeds 3] [--sizes 16,64,256] [--only TEXT] [--list] [--markdown FILE]

Every line is a synthetic job of `rankwatch_service.simulate`, judged by the detectors at their defaults and the
correlator, and routed (`notify.pipeline`) without a limit to two receivers: one as it is by default, and one that
asked for everything, information included. "messages" counts those other than the resolution of earlier ones,
"resolved" counts those. An incident is right if its kind and ranks are those of the root cause in the end.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rankwatch_detectors.base import Frame, Kind, Tick
from rankwatch_detectors.catalogue import detectors
from rankwatch_service.api.routes.receivers import NewReceiver
from rankwatch_service.incidents.model import Incident, Transition, TransitionKind, unix_ns
from rankwatch_service.job.detection import DetectionPipeline
from rankwatch_service.notify.message_limit import MessageLimit
from rankwatch_service.notify.pipeline import ReceiverRoute, Situation, notifications
from rankwatch_service.policy.announcement import incident_announcement
from rankwatch_service.simulate.faults import (
    BitFlip,
    Congestion,
    Hang,
    HostLoss,
    Kill,
    LossDivergence,
    NonFinite,
    NormSpike,
    RecurringStall,
    Restart,
    Slow,
    SlowJob,
    Stall,
)
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job, Noise, RankPlacement
from rankwatch_service.simulate.script import apply
from suite.pipeline import topology_state_of, updates_of

RECEIVERS: Final = [
    ReceiverRoute("on-call", severities=tuple(NewReceiver(name="on-call", url="https://on-call.example/").severities)),
    ReceiverRoute("everything"),
]

HOST_GONE: Final = (Kind.TELEMETRY_LOST, Kind.HANG)
"""A host that goes stops its job at once; which is seen first is a matter of the step time."""

ABORTED: Final = "RuntimeError: NCCL communicator was aborted: connection closed by peer"


@dataclass(frozen=True)
class Cause:
    """What should stand at the head of an incident in the end: one of these kinds, and these ranks or this scope."""

    kinds: tuple[Kind, ...]
    ranks: tuple[int, ...] = ()
    scope: str = ""


@dataclass(frozen=True)
class Cascade:
    """One line: a job for a number of ranks and a seed, and its root causes."""

    name: str
    job: Callable[[int, int], Job]
    causes: tuple[Cause, ...]


@dataclass
class CascadeCount:
    """What came of one line. Messages are counted by receiver."""

    causes: int = 0
    incidents: int = 0
    right: int = 0
    notified: Counter[str] = field(default_factory=Counter)
    resolved: Counter[str] = field(default_factory=Counter)

    def __iadd__(self, other: CascadeCount) -> CascadeCount:
        self.causes += other.causes
        self.incidents += other.incidents
        self.right += other.right
        self.notified += other.notified
        self.resolved += other.resolved
        return self

    def cells(self) -> list[str]:
        """As cells of the table."""
        cells = [str(self.causes), str(self.incidents), str(self.right)]
        for receiver in ("on-call", "everything"):
            cells += [f"{self.notified[receiver] / self.causes:.2f}", f"{self.resolved[receiver] / self.causes:.2f}"]
        return cells


def one(kind: Kind | tuple[Kind, ...], ranks: tuple[int, ...] = (), scope: str = "") -> tuple[Cause, ...]:
    """A single root cause."""
    return (Cause((kind,) if isinstance(kind, Kind) else kind, ranks, scope),)


def scripted(
    name: str, text: str, kind: Kind | tuple[Kind, ...], ranks: tuple[int, ...] = (), scope: str = ""
) -> Cascade:
    """One fault of `rankwatch simulate`, in a job of its own."""

    def job(size: int, seed: int) -> Job:
        made = Job(size, 420, seed, noise=Noise(hiccup_probability=0.001, hiccup_s=0.3, burst_probability=1e-5))
        return apply(text, made)

    return Cascade(name, job, one(kind, ranks, scope))


FAULTS: Final = [
    scripted("straggler +5 %", "straggler:rank=5,at=250,factor=1.05", Kind.STRAGGLER, (5,)),
    scripted("straggler +30 %", "straggler:rank=5,at=250,factor=1.3", Kind.STRAGGLER, (5,)),
    scripted("straggler x3", "straggler:rank=5,at=250,factor=3", Kind.STRAGGLER, (5,)),
    scripted("straggler, for 100 steps", "straggler:rank=5,at=250,factor=1.2,until=350", Kind.STRAGGLER, (5,)),
    scripted("straggler, every second step", "straggler:rank=5,at=220,factor=1.2,every=2", Kind.STRAGGLER, (5,)),
    scripted("straggler by data", "straggler:rank=5,at=250,factor=1.3,by=data", Kind.STRAGGLER, (5,)),
    scripted("slowdown +10 %", "slowdown:at=300,factor=1.1", Kind.SLOWDOWN),
    scripted("slowdown x2", "slowdown:at=300,factor=2", Kind.SLOWDOWN),
    scripted("hang", "hang:rank=5,at=300", Kind.HANG, (5,)),
    scripted("hang, stopped", "hang:rank=5,at=300,by=stopped", Kind.HANG, (5,)),
    scripted("rank killed", "rank_lost:rank=5,at=300", Kind.RANK_LOST, (5,)),
    scripted("rank ended by an error", "rank_lost:rank=5,at=300,error=CUDA error", Kind.RANK_LOST, (5,)),
    scripted("host gone", "host_lost:host=host-1,at=300", HOST_GONE, scope="host:host-1"),
    scripted("host silent", "telemetry_lost:host=host-1,at=300,until=330", Kind.TELEMETRY_LOST, scope="host:host-1"),
    scripted("NaN in local gradients", "nonfinite:rank=5,at=300", Kind.NONFINITE, (5,)),
    scripted("flipped bit", "corruption:rank=5,at=303", Kind.CORRUPTION, (5,)),
    scripted("local gradient norm x1.5", "gradient:rank=5,at=300", Kind.CORRUPTION, (5,)),
    scripted("loss x3, one point", "loss_spike:at=350", Kind.LOSS_SPIKE),
    scripted("loss x2, ten points", "loss_spike:at=350,factor=2,steps=10", Kind.LOSS_SPIKE),
    scripted("loss diverges, +1 % a step", "loss_divergence:at=300", Kind.LOSS_DIVERGENCE),
    scripted("loss diverges, +5 % a step", "loss_divergence:at=300,growth=0.05", Kind.LOSS_DIVERGENCE),
    scripted("gradient norm x50", "grad_norm:at=300,steps=2", Kind.GRAD_NORM),
]
"""Every fault of `simulate`, alone."""


def _host(number: int) -> tuple[int, ...]:
    return tuple(range(8 * number, 8 * number + 8))


def _bad_gpu(size: int, seed: int) -> Job:
    """Slow, then hung, then lost."""
    job = Job(size, 420, seed).inject(Slow(5, 200, 1.3))
    return job.inject(Hang(5, 300, 30.0), Kill(5, 300, None, 1, "CUDA error: uncorrectable ECC error"))


def _bad_gpu_again(size: int, seed: int) -> Job:
    """The same, and the launcher restarts it on the same device, where it dies before it gets further."""
    job = _bad_gpu(size, seed).inject(Restart(300, 280))
    for _ in range(4):
        job = job.inject(Kill(5, 295, None, 1, "CUDA error: uncorrectable ECC error"), Restart(295, 280))
    return job


def _lost_and_back(size: int, seed: int) -> Job:
    """A process dies, the launcher restarts the job, and training continues."""
    return Job(size, 420, seed).inject(Kill(5, 300, 9), Restart(300, 290))


def _crash_loop(size: int, seed: int) -> Job:
    """The job dies at the same step five times, then it is repaired."""
    job = Job(size, 420, seed)
    for _ in range(5):
        job = job.inject(Kill(5, 300, None, 1, "ValueError: bad record"), Restart(300, 270))
    return job


def _poisoned(size: int, seed: int) -> Job:
    """The norm jumps, then there is NaN in one rank's gradients, in the norm and in every loss."""
    return Job(size, 420, seed).inject(NormSpike(298, 50.0, 3), NonFinite(5, 300))


def _rolled_back(size: int, seed: int) -> Job:
    """NaN, and a rollback past it."""
    return Job(size, 420, seed).inject(NonFinite(5, 300), Restart(310, 280, relaunch=False))


def _corrupted(size: int, seed: int) -> Job:
    """A flipped bit; the gradient norm jumps and the loss diverges."""
    return Job(size, 420, seed).inject(BitFlip(5, 291), NormSpike(293, 30.0, 3), LossDivergence(295, 0.05))


def _exploding(size: int, seed: int) -> Job:
    """The norm jumps, the loss jumps and climbs on."""
    return Job(size, 420, seed).inject(NormSpike(298, 50.0, 30), LossDivergence(300, 0.08))


def _slow_storage(size: int, seed: int) -> Job:
    """Saves take five seconds; one takes ten minutes on all ranks."""
    saves = RecurringStall(60, 5.0, "checkpoint_save"), Stall(310, 600.0, "checkpoint_save")
    return Job(size, 420, seed).inject(*saves)


def _host_dies(size: int, seed: int) -> Job:
    """A host goes silent, its peers hang and then end one after the other."""
    job = Job(size, 420, seed).inject(HostLoss("host-1", 300, 40.0))
    return job.inject(Kill(0, 300, None, 1, ABORTED), Restart(300, 290))


def _host_slow(size: int, seed: int) -> Job:
    return Job(size, 420, seed).inject(Slow(_host(1), 250, 1.15))


def _host_slow_unevenly(size: int, seed: int) -> Job:
    """A host without enough cooling: its ranks become slow one after the other."""
    job = Job(size, 500, seed)
    for rank in _host(1):
        job = job.inject(Slow(rank, 220 + 15 * (rank - 8), 1.15))
    return job


def _stage_slow(size: int, seed: int) -> Job:
    job = Job(size, 420, seed, placement=RankPlacement(pp=4))
    stage = tuple(int(rank) for rank in range(size) if job.topology().pp[rank] == 2)
    return job.inject(Slow(stage, 250, 1.2))


def _staircase(size: int, seed: int) -> Job:
    job = Job(size, 700, seed)
    for stair in range(5):
        job = job.inject(Slow(5, 200 + 80 * stair, 1.05))
    return job


def _congested(size: int, seed: int) -> Job:
    """The network carries a quarter of its load: collectives take longer, no rank is busier."""
    return Job(size, 420, seed).inject(Congestion(300, 4.0))


CASCADES: Final = [
    Cascade("bad GPU: slow, hung, lost", _bad_gpu, one(Kind.STRAGGLER, (5,))),
    Cascade("bad GPU: slow, hung, lost, started again in vain", _bad_gpu_again, one(Kind.STRAGGLER, (5,))),
    Cascade("process killed, job started again", _lost_and_back, one(Kind.RANK_LOST, (5,))),
    Cascade("process dies at the same step five times", _crash_loop, one(Kind.RANK_LOST, (5,))),
    Cascade("one host slow", _host_slow, one(Kind.STRAGGLER, _host(1), "host:host-1")),
    Cascade("one host slow, rank after rank", _host_slow_unevenly, one(Kind.STRAGGLER, _host(1), "host:host-1")),
    Cascade("one stage slow", _stage_slow, one(Kind.SLOWDOWN, (), "stage:2")),
    Cascade("staircase, 5 x 5 %", _staircase, one(Kind.STRAGGLER, (5,))),
    Cascade("whole job slow", lambda size, seed: Job(size, 420, seed).inject(SlowJob(300, 1.3)), one(Kind.SLOWDOWN)),
    Cascade("NaN, then norm and loss", _poisoned, one(Kind.NONFINITE, (5,))),
    Cascade("NaN, then a rollback", _rolled_back, one(Kind.NONFINITE, (5,))),
    Cascade("corruption, then divergence", _corrupted, one(Kind.CORRUPTION, (5,))),
    Cascade("norm, then loss, then divergence", _exploding, one(Kind.LOSS_DIVERGENCE)),
    Cascade("checkpoint storage slow", _slow_storage, one(Kind.HANG)),
    Cascade("host silent, job hung, ranks lost, started again", _host_dies, one(HOST_GONE, (), "host:host-1")),
    Cascade("network congested", _congested, one(Kind.SLOWDOWN)),
]
"""Root causes that bring other troubles with them."""


def two(first: tuple[str, Kind, str], second: tuple[str, Kind, str]) -> Cascade:
    """Two faults of `simulate` in one job, each with the kind and scope of its incident."""

    def job(size: int, seed: int) -> Job:
        made = Job(size, 420, seed)
        return apply(second[0], apply(first[0], made))

    name = " and ".join(f"{kind} {scope}" for _, kind, scope in (first, second))
    return Cascade(name, job, (*one(first[1], (), first[2]), *one(second[1], (), second[2])))


SLOW: Final = ("straggler:rank=5,at=250,factor=1.15", Kind.STRAGGLER, "rank:5")
TOGETHER: Final = [
    two(SLOW, ("straggler:rank=12,at=252,factor=1.15", Kind.STRAGGLER, "rank:12")),
    two(SLOW, ("loss_spike:at=252", Kind.LOSS_SPIKE, "job")),
    two(SLOW, ("nonfinite:rank=12,at=254", Kind.NONFINITE, "rank:12")),
    two(SLOW, ("hang:rank=12,at=280", Kind.HANG, "job")),
    two(SLOW, ("corruption:rank=12,at=251", Kind.CORRUPTION, "rank:12")),
    two(
        ("straggler:rank=5,at=250,factor=1.05", Kind.STRAGGLER, "rank:5"),
        ("slowdown:at=300,factor=1.5", Kind.SLOWDOWN, "job"),
    ),
    two(
        ("corruption:rank=5,at=251", Kind.CORRUPTION, "rank:5"),
        ("corruption:rank=12,at=252", Kind.CORRUPTION, "rank:12"),
    ),
    two(
        ("telemetry_lost:host=host-1,at=250,until=300", Kind.TELEMETRY_LOST, "host:host-1"),
        ("loss_spike:at=255", Kind.LOSS_SPIKE, "job"),
    ),
]
"""Two root causes at the same time: two incidents."""


def judged(job: Job) -> tuple[list[Incident], list[Transition], CascadeCount]:
    """Incidents in the order in which they opened, their transitions, and the notifications to the receivers."""
    pipeline, topology_state = DetectionPipeline("benchmark", detectors), topology_state_of(job.topology())
    incidents: dict[str, Incident] = {}
    transitions: list[Transition] = []
    notified: defaultdict[str, set[str]] = defaultdict(set)
    count = CascadeCount()
    now_s = 0.0
    for observation in generate(job):
        now_s = observation.now_s if isinstance(observation, Tick) else now_s
        now_s = observation.time_s if isinstance(observation, Frame) else now_s
        for news in updates_of(pipeline, observation, topology_state):
            incident = news.incident
            incidents.setdefault(incident.id, incident)
            incident.transitions += 1
            version = incident.version()
            transition = Transition(incident.transitions, news.what, news.actor, news.text, news.fields, now_s, version)
            transitions.append(transition)
            if announcement := incident_announcement(transition, {}):
                situation = Situation(announcement, (), notified[incident.id], MessageLimit(), unix_ns(now_s))
                names = [one.receiver.name for one in notifications(situation, RECEIVERS)]
                notified[incident.id].update(names)
                counter = count.resolved if news.what is TransitionKind.RESOLVED else count.notified
                counter.update(names)
    return list(incidents.values()), transitions, count


def is_of(incident: Incident, cause: Cause) -> bool:
    """Whether the incident names this root cause."""
    named = set(incident.ranks) == set(cause.ranks) if cause.ranks else True
    return incident.kind in cause.kinds and named and cause.scope in ("", str(incident.scope))


def measure(case: Cascade, size: int, seed: int, *, show: bool) -> CascadeCount:
    """Run one job."""
    incidents, transitions, count = judged(case.job(size, seed))
    count.causes, count.incidents = len(case.causes), len(incidents)
    count.right = sum(any(is_of(incident, cause) for incident in incidents) for cause in case.causes)
    if show:
        print(f"== {case.name}, {size} ranks, seed {seed}")
        for change in transitions:
            one = change.incident
            what = f"#{one.number} {change.what:9} {one.severity:8} {one.kind} {one.scope}"
            print(f"   {change.time_s:4.0f} s {what}: {change.text}")
    return count


def measured(
    cases: Iterable[Cascade], sizes: list[int], seeds: int, *, show: bool
) -> Iterator[tuple[str, CascadeCount]]:
    """All sizes and seeds of each case together."""
    for case in cases:
        total = CascadeCount()
        for size in sizes:
            for seed in range(seeds):
                total += measure(case, size, seed, show=show)
        print(f"{case.name} | " + " | ".join(total.cells()), file=sys.stderr, flush=True)
        yield case.name, total


def main() -> None:
    """Run everything and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sizes", default="16,64,256", help="ranks; multiples of 16")
    parser.add_argument("--only", default="", help="only the lines with this in their name")
    parser.add_argument("--list", action="store_true", help="also print every transition")
    parser.add_argument("--markdown", type=Path, help="write the table to this file as well")
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    head = ["root cause", "injected", "incidents", "right", "messages", "resolved", "messages, everything", "resolved"]
    lines = [head, ["---"] * len(head)]
    total = CascadeCount()
    for title, cases in (("alone", FAULTS), ("cascades", CASCADES), ("two at once", TOGETHER)):
        chosen = [case for case in cases if options.only in case.name]
        subtotal = CascadeCount()
        for name, count in measured(chosen, sizes, options.seeds, show=options.list):
            lines.append([name, *count.cells()])
            subtotal += count
        if chosen:
            lines.append([f"**all {title}**", *subtotal.cells()])
            total += subtotal
    if total.causes:
        lines.append(["**all**", *total.cells()])
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    print(text)
    if options.markdown:
        options.markdown.write_text(text + "\n")


if __name__ == "__main__":
    main()
