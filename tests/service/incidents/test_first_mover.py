"""One incident names the rank that ended by itself, however late its host reports and whatever it reports first."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from rankwatch import wire
from tests.support.detection.judged import judged
from tests.support.values.batches import batch, progress, ranks, table

BEGAN_S = 1_800_000_000.0
SIGTERM, SIGKILL = 15, 9
BROKEN = {"type": "RuntimeError", "message": "[gloo] Connection closed by peer", "left": False}
LOST = {"code": 1, "signal": None, "error": "RuntimeError: [gloo] Connection closed by peer", "left": False}
ENDED = {"code": None, "signal": SIGTERM, "error": "", "left": False}
TOLD_AT_ONCE, GAP_S, LATE_S = 0.2, 4.0, 12.0


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


@pytest.mark.parametrize("delays_s", [*itertools.permutations((TOLD_AT_ONCE, GAP_S, LATE_S))])
@pytest.mark.parametrize("way", CULPRITS)
def test_the_incident_is_of_the_rank_that_ended_by_itself_whichever_host_is_late(way, delays_s):
    said, *more = CULPRITS[way]
    culprit_s, victim_s, ended_s = (11.0 + delay_s for delay_s in delays_s)
    batches = [sent(host, 0, 1.0) for host in range(3)]
    batches += [
        sent(1, 1, culprit_s, said, gone=() if more else (1,)),
        sent(0, 1, victim_s, event("exception", 0, 10.0, **BROKEN)),
        sent(0, 2, victim_s + 1, event("process_exit", 0, 10.0, **LOST), gone=(0,)),
        sent(2, 1, ended_s, event("process_exit", 2, 11.0, **ENDED), gone=(2,)),
    ]
    batches += [sent(1, 2, culprit_s + 1, *more, gone=(1,))] if more else []
    (incident,) = judged(sorted(batches, key=lambda one: one.sent_unix_ns))
    assert (incident["kind"], incident["severity"], incident["scope"]) == ("rank_lost", "critical", "rank:1")
    assert (incident["ranks"], incident["hosts"], incident["evidence"]["rank"]) == ([1], ["node-1"], 1)
    assert {end["rank"] for end in incident["evidence"]["also_ended"]} == {0, 2}
