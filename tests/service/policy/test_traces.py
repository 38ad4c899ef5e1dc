"""Answers to traces as agents send them: whole summaries are taken, anything else becomes an error."""

from typing import Any

import pytest

from rankwatch import wire
from rankwatch_detectors.base import Occurrence
from rankwatch_service.policy.traces import ERROR_CHARACTERS_MAX, TraceAnswer, trace_answer
from tests.support.detection.scripted_job import World
from tests.support.values.traces import SUMMARY, trace_fields


def answered(fields: dict[str, Any], rank: int | None = 3) -> TraceAnswer | None:
    return trace_answer("j", Occurrence("trace", "l.0", "node-1", 7.0, rank, 41, fields), 7)


def test_a_whole_summary_is_taken_as_it_is():
    assert answered(trace_fields()) == TraceAnswer("j", "cmd_1", 3, "", SUMMARY, 7)


def test_what_a_newer_agent_adds_is_left_out():
    assert answered(trace_fields(novelty=[1])).summary == SUMMARY


def test_an_error_comes_with_or_without_a_summary():
    assert answered({"request": "cmd_1", "error": "no"}) == TraceAnswer("j", "cmd_1", 3, "no", {}, 7)
    assert answered(trace_fields(error="no kernel")) == TraceAnswer("j", "cmd_1", 3, "no kernel", SUMMARY, 7)
    assert len(answered({"request": "cmd_1", "error": "x" * 9_999}).error) == ERROR_CHARACTERS_MAX
    assert answered({"request": "cmd_1"}).error == "its answer is empty"


@pytest.mark.parametrize(
    "changes",
    [
        {"step": -1},
        {"step": "41"},
        {"idle_ratio": float("nan")},
        {"idle_ratio": 1.5},
        {"wall_s": float("inf")},
        {"step_times_s": [0.1] * 11},
        {"kinds": {f"kind {number}": 0.1 for number in range(17)}},
        {"top": [{"name": "x" * 121, "kind": "other", "count": 1, "time_s": 0.1}]},
        {"collectives": SUMMARY["collectives"] * 33},
        {"streams": [{"device": 0}]},
        {"spans": 2**60},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_malformed_or_too_large_summary_is_an_error(changes):
    told = answered(trace_fields(**changes))
    assert told.summary == {}
    assert told.error.startswith("its summary cannot be read: ")


@pytest.mark.parametrize("fields", [{}, {"request": 7}])
def test_an_answer_that_does_not_say_to_what_has_no_effect(fields):
    assert answered(fields) is None
    assert answered(trace_fields(), rank=None) is None


def test_an_answer_is_an_effect_and_a_change_before_later_incidents():
    world = World()
    world.train(*range(60, 100))
    world.send(events=(wire.Event("trace", 1, 3, 98, trace_fields()),))
    world.send(events=(wire.Event("trace", 1, 2, None, {"request": "cmd_1", "error": "no"}),))
    assert [(answer.rank, answer.error) for answer in world.effects.traces] == [(3, ""), (2, "no")]
    world.now_s += 5
    world.find("hang", ranks=[3], onset_step=100)
    (opened,) = world.effects.transitions
    assert [change["what"] for change in opened.incident.changes_before] == ["attempt l.0 began", "rank 3 was traced"]
