"""Cascades in whatever order their parts are found: one incident for each root cause, its first mover named."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankwatch import wire
from rankwatch_detectors.base import GRAVITY, Change, Finding, Kind, Severity
from rankwatch_service.incidents.correlator import QUIET_S, SETTLE_S, Correlator
from rankwatch_service.incidents.model import Incident, TransitionKind, Update
from rankwatch_service.names import short
from tests.support.detection.verdicts import judged
from tests.support.values.batches import batch, progress, ranks, table
from tests.support.values.incidents import finding, topology_state

TOPOLOGY = topology_state(16, 4)
NODE_1 = (4, 5, 6, 7)

Head = tuple[Kind, str, frozenset[int]]


def found(kind: Kind, scope: str = "job", onset: int = 100, after: int = 5, **fields) -> Finding:
    """A finding of a job that makes one step a second, seen so many steps after its onset."""
    blank = {"onset_step": onset, "onset_time_s": float(onset)}
    blank |= {"detected_step": onset + after, "detected_time_s": float(onset + after)}
    return finding(kind, scope=scope, **(blank | fields))


@dataclass(frozen=True)
class Cascade:
    """Findings of one root cause, and what should stand at the head of their incident."""

    name: str
    head: Head
    findings: tuple[Finding, ...]


def cascade(name: str, kind: Kind, scope: str, ranks: tuple[int, ...], *findings: Finding) -> Cascade:
    return Cascade(name, (kind, scope, frozenset(ranks)), findings)


CRITICAL, INFO = Severity.CRITICAL, Severity.INFO
HUNG = found(Kind.HANG, onset=300, ranks=(5,), severity=CRITICAL)
LOST = {"onset_time_s": 330.0, "severity": CRITICAL}
CASCADES = [
    cascade(
        *("bad GPU: slow, hung, lost", Kind.STRAGGLER, "rank:5", (5,)),
        found(Kind.STRAGGLER, "rank:5", 200),
        found(Kind.SLOWDOWN, onset=199, after=12),
        HUNG,
        found(Kind.RANK_LOST, "rank:5", 301, after=0, **LOST),
    ),
    cascade(
        *("XID, slow, hung, lost", Kind.DEVICE_FAULT, "rank:5", (5,)),
        found(Kind.DEVICE_FAULT, "rank:5", 198, after=1),
        found(Kind.STRAGGLER, "rank:5", 200),
        HUNG,
        found(Kind.RANK_LOST, "rank:5", 301, **LOST),
    ),
    cascade(
        *("a host that is slow", Kind.STRAGGLER, "host:node-1", NODE_1),
        *(found(Kind.STRAGGLER, f"rank:{rank}", 200 + rank) for rank in NODE_1),
        found(Kind.SLOWDOWN, onset=203),
    ),
    cascade(
        *("a stage that is slow", Kind.SLOWDOWN, "stage:2", ()),
        found(Kind.SLOWDOWN, "stage:2", 203, after=9),
        found(Kind.SLOWDOWN, onset=200, after=4),
    ),
    cascade(
        *("NaN, then norm and loss", Kind.NONFINITE, "rank:5", (5,)),
        found(Kind.GRAD_NORM, onset=298, after=1, severity=INFO),
        found(Kind.NONFINITE, "rank:5", 300, after=0, severity=CRITICAL),
        found(Kind.LOSS_SPIKE, onset=299, after=4, severity=INFO),
        found(Kind.LOSS_DIVERGENCE, onset=301, after=10, severity=CRITICAL),
    ),
    cascade(
        *("corruption, then norm and loss", Kind.CORRUPTION, "rank:5", (5,)),
        # Known by its next fingerprint only.
        found(Kind.CORRUPTION, "rank:5", 291, after=9, onset_time_s=300.0, severity=CRITICAL),
        found(Kind.GRAD_NORM, onset=293, after=0),
        found(Kind.LOSS_DIVERGENCE, onset=295, after=10, severity=CRITICAL),
    ),
    cascade(
        *("a loss that runs away", Kind.LOSS_DIVERGENCE, "job", ()),
        found(Kind.GRAD_NORM, onset=298, after=1, severity=INFO),
        found(Kind.LOSS_SPIKE, onset=300, after=3, severity=INFO),
        found(Kind.LOSS_DIVERGENCE, onset=300, after=15, severity=CRITICAL),
    ),
    cascade(
        *("a host that is gone", Kind.TELEMETRY_LOST, "host:node-1", ()),
        found(Kind.TELEMETRY_LOST, "host:node-1", 300, after=11),
        found(Kind.HANG, onset=299, ranks=NODE_1, severity=CRITICAL),
        found(Kind.RANK_LOST, "rank:0", 300, onset_time_s=340.0, detected_time_s=340.0, severity=CRITICAL),
    ),
    cascade(
        *("all hosts silent, one after the other", Kind.TELEMETRY_LOST, "job", ()),
        found(Kind.TELEMETRY_LOST, "host:node-1", 300, after=11),
        found(Kind.TELEMETRY_LOST, onset=301, after=11),
    ),
    cascade(
        *("a network that carries less", Kind.NETWORK_DEGRADED, "host:node-1", ()),
        found(Kind.NETWORK_DEGRADED, "host:node-1", 300),
        found(Kind.SLOWDOWN, onset=299, after=8),
    ),
]

SLOW_HOST, POISONED = CASCADES[2], CASCADES[4]
THREE = [found(Kind.SLOWDOWN, onset=200), found(Kind.HANG, onset=300, ranks=(5,)), CASCADES[0].findings[0]]
"""Two incidents, until the third finding makes them one."""

APART = [
    (found(Kind.STRAGGLER, "rank:1"), found(Kind.STRAGGLER, "rank:6")),
    (found(Kind.CORRUPTION, "rank:1"), found(Kind.CORRUPTION, "rank:6")),
    (found(Kind.STRAGGLER, "rank:1"), found(Kind.LOSS_SPIKE)),
    (found(Kind.STRAGGLER, "rank:1"), found(Kind.RANK_LOST, "rank:6")),
    (found(Kind.STRAGGLER, "rank:1"), found(Kind.HANG, ranks=(6,))),
    (found(Kind.NONFINITE, "rank:1"), found(Kind.HANG, ranks=(6,))),
    (found(Kind.NONFINITE, "rank:1"), found(Kind.STRAGGLER, "rank:1")),
    (found(Kind.TELEMETRY_LOST, "host:node-0"), found(Kind.TELEMETRY_LOST, "host:node-1")),
    (found(Kind.TELEMETRY_LOST, "host:node-0"), found(Kind.LOSS_DIVERGENCE)),
    (found(Kind.STRAGGLER, "rank:1"), found(Kind.TELEMETRY_LOST, "host:node-0", onset=160)),
    # The job was slow before the rank was.
    (found(Kind.SLOWDOWN, onset=100), found(Kind.STRAGGLER, "rank:1", onset=150)),
    # The rank adds 40 ms to each step, the job lost half a second.
    (
        found(Kind.STRAGGLER, "rank:1", evidence={"ratio": 1.05, "peers_busy_s": 0.8}),
        found(Kind.SLOWDOWN, evidence={"ratio": 1.5, "usual_s": 1.0}),
    ),
]
"""Two root causes each."""


def reported_of(findings: Sequence[Finding]) -> tuple[list[Incident], list[Update]]:
    """The incidents that are open in the end, and all transitions, when findings come one by one."""
    correlator = Correlator("gpt")
    correlator.begin("l.0")
    reported = [news for one in findings for news in correlator.evaluate([one], TOPOLOGY)]
    return correlator.open, reported


def heads(incidents: Sequence[Incident]) -> list[Head]:
    return sorted((one.kind, str(one.scope), frozenset(one.ranks)) for one in incidents)


@pytest.mark.parametrize("cascade", CASCADES, ids=lambda cascade: cascade.name)
def test_a_cascade_is_one_incident_in_whatever_order_it_is_found(cascade):
    whole = sorted((one.kind, str(one.scope)) for one in cascade.findings)
    gravest = max((one.severity for one in cascade.findings), key=GRAVITY.index)
    for order in permutations(cascade.findings):
        incidents, _ = reported_of(order)
        assert heads(incidents) == [cascade.head]
        assert sorted((part.kind, str(part.scope)) for part in incidents[0].parts) == whole
        assert incidents[0].severity is gravest


@pytest.mark.parametrize("cascade", CASCADES, ids=lambda cascade: cascade.name)
def test_a_cascade_that_is_found_as_it_happens_is_reported_once_and_when_it_gets_graver(cascade):
    in_time = sorted(cascade.findings, key=lambda one: one.detected_time_s)
    _, reported = reported_of(in_time)
    gravities = [one.severity for one in in_time]
    raises = sum(gravity is CRITICAL and CRITICAL not in gravities[:at] for at, gravity in enumerate(gravities) if at)
    assert [news.what for news in reported].count(TransitionKind.OPENED) == 1
    assert [news.what for news in reported].count(TransitionKind.UPDATED) <= max(raises, 1)


@pytest.mark.parametrize("pair", APART, ids=lambda pair: " and ".join(f"{one.kind} {one.scope}" for one in pair))
@pytest.mark.parametrize("swapped", [False, True])
def test_two_root_causes_at_once_are_two_incidents(pair, swapped):
    incidents, reported = reported_of(pair[::-1] if swapped else pair)
    assert sorted((one.kind, one.first.scope) for one in incidents) == sorted((one.kind, one.scope) for one in pair)
    assert [news.what for news in reported] == [TransitionKind.OPENED, TransitionKind.OPENED]


@settings(max_examples=50)
@given(data=st.data())
def test_two_cascades_at_once_are_two_incidents_in_whatever_order_they_are_found(data):
    incidents, _ = reported_of(data.draw(st.permutations((*SLOW_HOST.findings, *POISONED.findings))))
    assert heads(incidents) == sorted([SLOW_HOST.head, POISONED.head])


def test_incidents_that_turn_out_to_be_one_go_on_as_the_oldest():
    (incident,), reported = reported_of(THREE)
    first, second = (news.incident.id for news in reported[:2])
    assert [(news.what, news.incident.id) for news in reported] == [
        (TransitionKind.OPENED, first),
        (TransitionKind.OPENED, second),
        (TransitionKind.UPDATED, first),
        (TransitionKind.RESOLVED, second),
    ]
    assert (incident.id, incident.kind) == (first, Kind.STRAGGLER)
    assert reported[-1].text.startswith(f"merged into {short(reported[0].incident.id)}")


def test_an_incident_that_others_went_into_lasts_as_long_as_their_parts():
    correlator = Correlator("gpt")
    correlator.begin("l.0")
    for one in THREE:
        correlator.evaluate([one], TOPOLOGY)
    ends = [replace(one, change=Change.CLOSE) for one in THREE]
    assert TransitionKind.RESOLVED not in [news.what for end in ends for news in correlator.evaluate([end], TOPOLOGY)]
    assert [news.what for news in correlator.resolve_ended(ends[1].detected_time_s + QUIET_S)] == [
        TransitionKind.RESOLVED
    ]


def test_a_warning_that_becomes_critical_is_reported_again_however_soon():
    slow, hung = CASCADES[0].findings[0], found(Kind.HANG, onset=206, ranks=(5,), severity=CRITICAL)
    _, reported = reported_of([slow, hung])
    assert hung.detected_time_s - slow.detected_time_s < SETTLE_S
    assert [news.what for news in reported] == [TransitionKind.OPENED, TransitionKind.UPDATED]


def test_a_slow_rank_explains_as_much_of_a_slow_job_as_noise_allows():
    rank = found(Kind.STRAGGLER, "rank:1", evidence={"ratio": 1.1, "peers_busy_s": 0.7})
    job = found(Kind.SLOWDOWN, evidence={"ratio": 1.2, "usual_s": 1.0})
    assert len(reported_of([rank, job])[0]) == 1
    assert len(reported_of([rank, replace(job, evidence={"ratio": 1.22, "usual_s": 1.0})])[0]) == 2


def ended(attempt: str, rank: int = 5, onset: int = 300, at_s: float = 300.0) -> Finding:
    times = {"onset_time_s": at_s, "detected_time_s": at_s}
    return found(Kind.RANK_LOST, f"rank:{rank}", onset, after=0, attempt=attempt, severity=CRITICAL, **times)


def lived_through(*ends: Finding, from_step: int = 280) -> tuple[Correlator, list[Update]]:
    """Each launch goes on from a step and comes as far as its end; the last one that far and three steps further."""
    correlator, reported = Correlator("gpt"), []
    for end, after in zip(ends, [*(end.onset_step for end in ends[1:]), ends[-1].onset_step + 3], strict=True):
        correlator.begin(end.attempt)
        reported += correlator.evaluate([end], TOPOLOGY)
        launch = f"{chr(ord(end.attempt[0]) + 1)}.0"
        correlator.begin(launch)
        for step in range(from_step, after):
            reported += correlator.progress(launch, step, end.detected_time_s + step)
    return correlator, reported


def test_a_job_that_dies_before_it_got_any_further_is_the_same_incident():
    ends = [ended("l.0"), ended("m.0", onset=299, at_s=400.0), ended("n.0", at_s=500.0)]
    correlator, reported = lived_through(*ends)
    assert [str(news.what) for news in reported] == ["opened", "evidence", "evidence", "resolved"]
    assert correlator.open == []


def test_a_job_that_dies_again_after_it_got_further_is_another_incident():
    correlator, reported = lived_through(ended("l.0"), ended("m.0", onset=320, at_s=400.0))
    assert [str(news.what) for news in reported] == ["opened", "resolved", "opened", "resolved"]
    assert correlator.open == []


def test_another_host_that_dies_in_the_next_launch_is_another_incident():
    _, reported = lived_through(ended("l.0"), ended("m.0", rank=1, at_s=400.0))
    assert [news.what for news in reported].count(TransitionKind.OPENED) == 2


BEGAN_S = 1_800_000_000.0
SIGTERM, SIGKILL = 15, 9
BROKEN = {"type": "RuntimeError", "message": "[gloo] Connection closed by peer", "left": False}
LOST_RANK = {"code": 1, "signal": None, "error": "RuntimeError: [gloo] Connection closed by peer", "left": False}
ENDED = {"code": None, "signal": SIGTERM, "error": "", "left": False}
REPORTED_AT_ONCE, GAP_S, LATE_S = 0.2, 4.0, 12.0


def ns(after_s: float) -> int:
    return int((BEGAN_S + after_s) * 1e9)


def sent(host: int, seq: int, at_s: float, *events: wire.Event, gone: tuple[int, ...] = ()) -> wire.Batch:
    """A batch of one of three hosts, each with the rank of its number."""
    more: dict[str, Any] = {"events": events, "progress": tuple(progress(rank, 40, state="exited") for rank in gone)}
    if not seq:
        steps = np.arange(40)
        more["ranks"] = ranks(3, f"node-{host}", [host])
        more["steps"] = table(steps, np.full(40, host), {"time_unix_ns": [ns(0)] * 40}, step_time_s=np.full(40, 0.1))
        more["progress"] = (progress(host, 40),)
    return batch(seq, host=f"node-{host}", boot=f"b{host}", sent_unix_ns=ns(at_s), **more)


def event(kind: str, rank: int, at_s: float, **fields: Any) -> wire.Event:
    return wire.Event(kind, ns(at_s), rank, 40, fields)


CULPRITS = {
    "exit status": (event("process_exit", 1, 9.9, code=3, signal=None, error="SystemExit: 3", left=False),),
    "exception": (
        event("exception", 1, 9.9, type="ValueError", message="broken batch", left=False),
        event("process_exit", 1, 9.9, code=1, signal=None, error="ValueError: broken batch", left=False),
    ),
    "SIGKILL": (event("process_exit", 1, 9.9, code=None, signal=SIGKILL, error="", left=False),),
    "SIGTERM of the launcher": (
        event("loop_broken_off", 1, 9.9, where="train.py:9 in main"),
        event("process_exit", 1, 10.9, **ENDED, broken_off_unix_ns=ns(9.9), where="train.py:9 in main"),
    ),
}


@pytest.mark.parametrize("delays_s", [*itertools.permutations((REPORTED_AT_ONCE, GAP_S, LATE_S))])
@pytest.mark.parametrize("way", CULPRITS)
def test_the_incident_is_of_the_rank_that_ended_by_itself_whichever_host_is_late(way, delays_s):
    said, *more = CULPRITS[way]
    culprit_s, victim_s, ended_s = (11.0 + delay_s for delay_s in delays_s)
    batches = [sent(host, 0, 1.0) for host in range(3)]
    batches += [
        sent(1, 1, culprit_s, said, gone=() if more else (1,)),
        sent(0, 1, victim_s, event("exception", 0, 10.0, **BROKEN)),
        sent(0, 2, victim_s + 1, event("process_exit", 0, 10.0, **LOST_RANK), gone=(0,)),
        sent(2, 1, ended_s, event("process_exit", 2, 11.0, **ENDED), gone=(2,)),
    ]
    batches += [sent(1, 2, culprit_s + 1, *more, gone=(1,))] if more else []
    (incident,) = judged(sorted(batches, key=lambda one: one.sent_unix_ns))
    assert (incident["kind"], incident["severity"], incident["scope"]) == ("rank_lost", "critical", "rank:1")
    assert (incident["ranks"], incident["hosts"], incident["evidence"]["rank"]) == ([1], ["node-1"], 1)
    assert {end["rank"] for end in incident["evidence"]["also_ended"]} == {0, 2}
