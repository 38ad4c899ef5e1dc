"""What no detector may be thrown by: observations of other attempts and sizes, of nothing, twice, or of the unknown."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rankwatch_detectors.base import AttemptStart, Frame, Observation, Occurrence, Presence, Tick
from rankwatch_detectors.catalogue import detectors
from rankwatch_service.simulate.faults import BitFlip, Hang, Slow
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job
from tests.support.detection.distorted import narrowed
from tests.support.detection.verdicts import judge, opened


@pytest.mark.parametrize("spoil", ["foreign attempt", "wrong size", "nothing present", "no metrics"])
def test_strange_but_legal_frames_say_nothing(spoil: str) -> None:
    bank = detectors()
    for observation in generate(Job(world_size=4, steps=30, seed=8)):
        judge([observation], bank)
        if isinstance(observation, Frame):
            assert judge([spoiled(observation, spoil)], bank) == []


def spoiled(frame: Frame, how: str) -> Frame:
    later = dataclasses.replace(frame, step=frame.step + 1)
    if how == "foreign attempt":
        return dataclasses.replace(later, attempt="other.0")
    if how == "no metrics":
        return dataclasses.replace(frame, values={}, present={}, exact={})
    if how == "nothing present":
        return dataclasses.replace(frame, present={name: np.zeros_like(here) for name, here in frame.present.items()})
    return narrowed(later, 2)


@pytest.mark.parametrize("who", [0, slice(None)])
def test_seconds_that_add_up_to_more_than_a_number_holds_are_no_measurement(who: int | slice) -> None:
    bank = detectors()
    for observation in generate(Job(world_size=4, steps=30, seed=8)):
        if isinstance(observation, Frame) and observation.step > 20:
            vast = observation.values["busy_s"].copy()
            vast[who] = 1.7e308
            values = {**observation.values, "busy_s": vast, "phase.data_wait": vast}
            present = {**observation.present, "phase.data_wait": observation.present["busy_s"]}
            observation = dataclasses.replace(observation, values=values, present=present)  # noqa: PLW2901
        judge([observation], bank)


def test_without_an_attempt_nothing_is_said() -> None:
    observations = [o for o in generate(Job(world_size=4, steps=20)) if not isinstance(o, AttemptStart)]
    assert judge(observations) == []


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_in_the_smallest_jobs_a_hang_is_found_and_of_two_or_more_the_slow_rank_is_named(world_size: int) -> None:
    job = Job(world_size=world_size, steps=120, seed=2).inject(Slow(0, 60, 3.0), Hang(0, 100, 20))
    found = {(finding.kind.value, finding.ranks) for finding in opened(judge(generate(job)))}
    who = {("straggler", (0,))} if world_size > 1 else set()
    assert found - {("slowdown", ())} == who | {("hang", (0,))}


@pytest.mark.parametrize("empty", ["frames", "ticks"])
def test_a_job_of_which_only_one_half_is_heard_is_followed_without_error(empty: str) -> None:
    gone = Frame if empty == "frames" else Tick
    job = Job(world_size=4, steps=60, seed=3).inject(Hang(1, 40, 20.0))
    judge([observation for observation in generate(job) if not isinstance(observation, gone)])


def test_an_occurrence_of_an_unknown_kind_or_rank_is_ignored() -> None:
    bank = detectors()
    observations = list(generate(Job(world_size=4, steps=5, ends=False)))
    attempt = next(o for o in observations if isinstance(o, AttemptStart)).attempt
    strange = [
        Occurrence("no such thing", attempt, "host-0", 1.0, None, None, {}),
        Occurrence("process_exit", attempt, "host-0", 1.0, 99, None, {}),
        Occurrence("gap", attempt, "host-9", 1.0, None, None, {}),
        Occurrence("order", attempt, "", 1.0, None, None, {}),
    ]
    assert judge([*observations, *strange], bank) == []


def test_a_step_told_twice_opens_nothing() -> None:
    """The stream closes a frame once; a repeated step of the same attempt must still not open anything."""
    doubled: list[Observation] = []
    for observation in generate(Job(world_size=8, steps=120, seed=9)):
        doubled += [observation] * (2 if isinstance(observation, Frame) else 1)
    assert opened(judge(doubled)) == []


@pytest.mark.parametrize("ranks", [4, 12])
def test_an_attempt_that_turns_out_to_have_other_ranks_is_begun_anew(ranks: int) -> None:
    bank = detectors()
    before = list(generate(Job(world_size=8, steps=120, seed=1, ends=False).inject(Slow(7, 60, 2.0), BitFlip(7, 60))))
    after = list(generate(Job(world_size=ranks, steps=120, seed=1, ends=False)))
    assert opened(judge(before, bank))
    assert all(finding.change.value == "close" for finding in judge(after, bank))


def test_presence_of_another_attempt_is_not_judged() -> None:
    observations = list(generate(Job(world_size=4, steps=30, ends=False)))
    last = [o for o in observations if isinstance(o, Tick)][-1]
    presence = last.presence
    assert isinstance(presence, Presence)
    other = dataclasses.replace(presence, attempt="older.0", step_age_s=presence.step_age_s + 1e6)
    assert judge([*observations, Tick(last.now_s + 1, other)]) == []
