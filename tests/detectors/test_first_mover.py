"""The rank that ended by itself is named in the end, in whatever order its end and those that it brought are heard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from rankwatch_detectors.base import Change, Finding, Severity
from tests.detectors.test_ends import BROKEN, INTERRUPTED, SIGABRT, SIGINT, SIGKILL, SIGTERM, Ends, on_request, outcome
from tests.support.trials.selection import ALL

Event = tuple[str, float, dict[str, Any]]
"""Kind, time, fields."""

SIGSEGV = 11
LEFT: Event = ("rank_left", 6.0, {"reason": "break", "where": "train.py:9 in main"})
WAYS: dict[str, list[Event]] = {
    "an exit status": [LEFT, ("exit", 6.0, {"code": 3, "error": "SystemExit: 3", "left": False, "exit_order": 1})],
    "an exit status that is not read": [LEFT, ("exit", 6.0, {"how": "unknown", "left": True, "exit_order": 1})],
    "os._exit": [("exit", 6.3, {"code": 3, "left": False, "exit_order": 1})],
    "an exception": [
        ("exception", 6.0, {"type": "ValueError", "message": "broken batch", "left": False}),
        ("exit", 6.0, {"code": 1, "error": "ValueError: broken batch", "left": False, "exit_order": 1}),
    ],
    "a signal": [("exit", 6.3, {"signal": SIGSEGV, "left": False, "exit_order": 1})],
    "SIGKILL": [("exit", 6.3, {"signal": SIGKILL, "left": False, "exit_order": 1})],
    "an abort": [("exit", 6.3, {"signal": SIGABRT, "left": False, "exit_order": 1})],
    "nothing but its absence": [("absence", 6.3, {})],
    "an early break": [LEFT, ("exit", 6.0, {"code": 0, "left": True, "exit_order": 1})],
}
"""How rank 1 ends, whose peers lose it a moment later. Its process may be gone only after rank 0's."""
BY_LAUNCHER: dict[str, list[Event]] = {
    "an exit that it had not finished": [
        ("exit", 6.4, {"signal": SIGTERM, "left": False, "exit_order": 1, "broken_off_unix_ns": 1_006_000_000_000})
    ],
    "an exit in Python's shutdown": [
        LEFT,
        ("exit", 6.4, {"signal": SIGTERM, "left": False, "exit_order": 1, "broken_off_unix_ns": 1_006_000_000_000}),
    ],
    "an exception in Python's shutdown": [
        ("exception", 6.0, {"type": "ValueError", "message": "broken batch", "left": False}),
        ("exit", 6.0, {"signal": SIGTERM, "error": "ValueError: broken batch", "left": False, "exit_order": 1}),
    ],
}
"""The same, where the launcher of a job of which rank 0 is gone ends it before it is."""
VICTIM: list[Event] = [
    ("exception", 6.05, {"type": "RuntimeError", "message": BROKEN.partition(": ")[2], "left": False}),
    ("exit", 6.05, {"code": 1, "error": BROKEN, "left": False, "exit_order": 0}),
]
ASKED: list[Event] = [("exit", 6.5, {"signal": SIGTERM, "left": False, "exit_order": 2})]
LOST: list[Event] = [("exit", 6.5, {"code": 1, "error": BROKEN, "left": False, "exit_order": 2})]


def interleaved(*streams: Sequence[Any]) -> Iterator[list[tuple[int, Any]]]:
    """Every order in which streams may be heard, each of which is in order; with the number of its stream."""
    if not any(streams):
        yield []
    for number, stream in enumerate(streams):
        if stream:
            rest = [*streams[:number], stream[1:], *streams[number + 1 :]]
            for more in interleaved(*rest):
                yield [(number, stream[0]), *more]


def has_reported(hosts: int, order: Sequence[tuple[int, Event]], gap: int, *, behind: int = 0) -> list[Finding]:
    """What is told of ends of three ranks in this order, with some seconds before one of them.

    Args:
        hosts: on how many.
        order: the ends, with their ranks.
        gap: before which of them.
        behind: by how many steps rank 0 is behind the others.
    """
    job = Ends(ranks=3, hosts=hosts)
    job.step[0] -= behind
    findings: list[Finding] = []
    for number, (rank, (kind, at_s, fields)) in enumerate(order):
        if number == gap:
            findings += job.stand(4)
        if kind == "exit":
            findings += job.exit(rank, at_s, **fields)
        elif kind == "absence":
            job.state[rank] = "exited"
        else:
            findings += job.event(kind, rank, at_s, **fields)
    return findings + job.stand(5)


def in_every_order(*streams: Sequence[Event]) -> Iterator[tuple[list[tuple[int, Event]], int]]:
    """Every order of the ends of ranks 0, 1 and 2, with the place of a gap, which all orders have in all trials."""
    for number, order in enumerate(interleaved(*streams)):
        places = range(len(order) + 1) if ALL else [number % (len(order) + 1)]
        yield from ((order, gap) for gap in places)


@pytest.mark.parametrize(
    ("hosts", "last", "behind"),
    [
        pytest.param(1, LOST, 0, id="one host, no launcher"),
        pytest.param(1, ASKED, 8, id="one host, a launcher, a peer that is steps behind"),
        pytest.param(3, LOST, 8, id="three hosts, no launcher, a peer that is steps behind"),
        pytest.param(3, ASKED, 0, id="three hosts, a launcher"),
    ],
)
@pytest.mark.parametrize("way", [*WAYS, *BY_LAUNCHER])
def test_whatever_is_heard_first_the_rank_that_ended_by_itself_is_named_in_the_end(way, hosts, last, behind):
    for order, gap in in_every_order(VICTIM, (WAYS | BY_LAUNCHER)[way], last):
        findings = has_reported(hosts, order, gap, behind=behind)
        named = outcome(findings)[-1][1:]
        assert named == (Severity.CRITICAL, (1,)), (gap, [(rank, kind) for rank, (kind, *_) in order])
        assert findings[-1].evidence["rank"] == 1


REQUESTS: dict[str, list[Event]] = {
    "SIGTERM": [("exit", 6.0, {"signal": SIGTERM, "left": False, "exit_order": 0})],
    "SIGTERM, by which a handler lets the loop end first": [
        ("exit", 6.0, {"signal": SIGTERM, "left": False, "exit_order": 0, "broken_off_unix_ns": 1_005_900_000_000})
    ],
    "an interruption": [
        ("exception", 6.0, {"type": "KeyboardInterrupt", "message": "", "left": False}),
        ("exit", 6.0, {"signal": SIGINT, "error": INTERRUPTED, "left": False, "exit_order": 1}),
    ],
    "status 143": [("exit", 6.0, {"code": 143, "error": "SystemExit: 143", "left": False, "exit_order": 0})],
}


CLEANS_UP: list[Event] = [
    (kind, at_s, fields | {"broken_off_unix_ns": 1_006_000_000_000}) for kind, at_s, fields in ASKED
]


@pytest.mark.parametrize("hosts", [1, 3])
@pytest.mark.parametrize(
    ("way", "last"), [*((way, ASKED) for way in REQUESTS), ("an interruption", CLEANS_UP)], ids=[*REQUESTS, "of two"]
)
def test_whatever_is_heard_first_a_rank_that_was_asked_to_end_is_named_and_the_job_has_ended_on_request(
    way, last, hosts
):
    lost = [(kind, at_s + 0.05, {**fields, "exit_order": 1}) for kind, at_s, fields in VICTIM]
    for order, gap in in_every_order(lost, REQUESTS[way], last):
        reported = has_reported(hosts, order, gap)[-1]
        assert (reported.change, reported.severity, reported.ranks) == (Change.CLOSE, Severity.INFO, (1,)), (gap, order)


def test_an_end_that_is_heard_after_the_job_has_ended_on_request_shows_that_it_has_not():
    job = Ends(hosts=2)
    job.silent = {2, 3}
    findings = job.exit(0, 6.4, signal=SIGTERM) + job.exit(1, 6.4, signal=SIGTERM) + job.stand(60)
    assert on_request(findings)
    job.silent = set()
    assert job.exit(2, 6.5, signal=SIGTERM) == []
    (finding,) = job.exit(3, 5.0, signal=SIGKILL)
    assert (finding.change, finding.severity, finding.ranks) == (Change.OPEN, Severity.CRITICAL, (3,))


def test_the_exit_of_a_rank_that_was_told_as_absent_completes_it():
    job = Ends(ranks=2)
    job.state[1] = "exited"
    findings = job.stand(6)
    assert findings[-1].evidence["code"] is None
    (finding,) = job.exit(1, 6.0, code=3, error="SystemExit: 3", left=False)
    assert (finding.change, finding.evidence["code"], finding.evidence["error"]) == (Change.UPDATE, 3, "SystemExit: 3")
