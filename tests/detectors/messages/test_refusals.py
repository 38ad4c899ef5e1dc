"""What the service refused of a job: one incident for each flood, which ends when the flood does."""

from __future__ import annotations

from typing import Any

import pytest

from rankwatch_detectors.base import AttemptStart, Change, Finding, Kind, Occurrence, Severity, Tick
from rankwatch_detectors.refusals import RefusalConfig, RefusalDetector
from tests.support.values.presences import topology

CONFIG = RefusalConfig()


def forgeries() -> RefusalDetector:
    return RefusalDetector(Kind.FORGED_TELEMETRY, CONFIG)


def refuse(detector: RefusalDetector, kind: str = "forged", now_s: float = 0.0, **fields: Any) -> list[Finding]:
    return list(detector.observe(Occurrence(kind, "run.0", "", now_s, None, None, fields)))


@pytest.mark.parametrize("what", ["rank", "attempt", "event", "view", "signature", "unsigned"])
def test_the_first_forgery_of_any_part_is_critical_and_names_its_sender(what: str) -> None:
    (finding,) = refuse(forgeries(), what=what, agent="agt_1", host="node-7", count=3)
    assert (finding.kind, finding.change, finding.severity) == (
        Kind.FORGED_TELEMETRY,
        Change.OPEN,
        Severity.CRITICAL,
    )
    assert finding.summary == (
        f"Forged telemetry: 3 messages refused ({what} 3), the last from agent agt_1, host node-7."
    )
    assert finding.evidence == {
        "what": what,
        "agent": "agt_1",
        "host": "node-7",
        "refused": 3,
        "refused_by_what": {what: 3},
    }


def test_a_limit_is_a_warning_with_its_figures() -> None:
    detector = RefusalDetector(Kind.LIMIT_REACHED, CONFIG)
    (finding,) = refuse(detector, "limit", what="new jobs within a minute", limit=60, figure=61, token="training")
    assert (finding.kind, finding.severity) == (Kind.LIMIT_REACHED, Severity.WARNING)
    assert finding.summary == "More than 60 new jobs within a minute: 1 message refused, the last from token training."
    assert (finding.evidence["limit"], finding.evidence["figure"]) == (60, 61)


def test_each_kind_is_about_its_own_occurrences_alone() -> None:
    assert refuse(forgeries(), "limit", what="cells") == []
    assert refuse(RefusalDetector(Kind.LIMIT_REACHED, CONFIG), "forged", what="rank") == []


def test_a_flood_is_told_again_when_it_has_doubled_and_no_oftener() -> None:
    detector = forgeries()
    told = [finding for _ in range(1_000) for finding in refuse(detector, what="rank")]
    assert [finding.evidence["refused"] for finding in told] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


def test_it_ends_a_quiet_time_after_the_last_refusal_and_begins_anew_with_the_next() -> None:
    detector = forgeries()
    refuse(detector, what="rank", now_s=0.0)
    refuse(detector, what="view", now_s=100.0)
    assert detector.observe(Tick(100.0 + CONFIG.quiet_s - 1, None)) == ()
    (end,) = detector.observe(Tick(100.0 + CONFIG.quiet_s, None))
    assert (end.change, end.evidence["refused_by_what"]) == (Change.CLOSE, {"rank": 1, "view": 1})
    (again,) = refuse(detector, what="rank", now_s=500.0)
    assert (again.change, again.evidence["refused"]) == (Change.OPEN, 1)


def test_a_new_attempt_does_not_end_it() -> None:
    detector = forgeries()
    detector.observe(AttemptStart("run.0", topology(4), 0.0))
    refuse(detector, what="attempt")
    assert detector.observe(AttemptStart("other.0", topology(8), 1.0)) == []
    (update,) = refuse(detector, what="attempt", now_s=2.0)
    assert (update.change, update.attempt) == (Change.UPDATE, "run.0")


def test_what_a_forger_makes_up_does_not_grow_the_evidence() -> None:
    detector = forgeries()
    for number in range(1_000):
        refuse(detector, what=f"part {number}")
    state = detector.snapshot()["_refused"]
    assert len(state) == CONFIG.listed_max + 1
    assert sum(state.values()) == 1_000
