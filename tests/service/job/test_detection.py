"""Observations that come together are judged together, with the outcome of judging each by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rankwatch import wire
from rankwatch_detectors.base import Finding, Frame, Observation
from rankwatch_detectors.catalogue import detectors
from rankwatch_service.incidents.correlator import WHY
from rankwatch_service.incidents.model import Transition
from rankwatch_service.job import detection
from rankwatch_service.job.detection import FAILURES_MAX, DetectorBank
from rankwatch_service.simulate.batches import batches
from rankwatch_service.simulate.faults import Hang, LossSpike, NonFinite, Restart, Slow
from rankwatch_service.simulate.files import write_job
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job, RankPlacement
from rankwatch_service.stream.saved import pack
from tests.support.recordings.outcome import replayed
from tests.support.service.partition import Listener, PlayedPartition
from tests.support.values.presences import frame

TROUBLED = Job(8, 200, 5, late_values=True, placement=RankPlacement(ranks_per_host=4)).inject(
    Slow(5, 60, 1.5), LossSpike(100, 4.0, 3), Hang(1, 130, 30.0), NonFinite(0, 150), Restart(170, 160)
)
RECORDS_TOGETHER = 24


def outcome(job: Job) -> tuple[list[Transition], dict[str, bytes]]:
    """The changes of incidents with their explanations, and the state at the end."""
    world, sent = PlayedPartition(detectors), list(batches("gpt", generate(job), steps_per_batch=4))
    for first in range(0, len(sent), RECORDS_TOGETHER):
        taken = sent[first : first + RECORDS_TOGETHER]
        world.records([wire.encode(one.batch) for one in taken])
        world.tick_at(1_000 + taken[-1].time_s)
    states = {name: pack(world.partition.snapshot(name)) for name in world.partition.jobs}
    return world.effects.transitions, states


def test_frames_judged_together_have_the_outcome_of_frames_judged_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    evaluate = DetectorBank.evaluate

    def counted(bank: DetectorBank, groups: Sequence[Sequence[Observation]]) -> Any:
        sizes.append(len(groups))
        return evaluate(bank, groups)

    monkeypatch.setattr(DetectorBank, "evaluate", counted)
    transitions, states = outcome(TROUBLED)
    assert max(sizes) > 1
    explained = {why["kind"] for transition in transitions for why in transition.fields.get(WHY, ())}
    assert explained >= {"straggler", "loss_spike"}
    sizes.clear()
    monkeypatch.setattr(detection, "TOGETHER_MAX", 1)
    one_by_one, states_one_by_one = outcome(TROUBLED)
    assert max(sizes) == 1
    assert repr(one_by_one) == repr(transitions)
    assert states_one_by_one == states


def test_rows_of_a_recording_judged_together_give_the_incidents_of_rows_judged_one_by_one(tmp_path, monkeypatch):
    path = tmp_path / "job.csv"
    write_job(Job(8, 200, 3).inject(Slow(5, 60, 1.3), NonFinite(0, 150)), path)

    together = replayed(path)
    assert len(together.incidents[0]) > 1
    monkeypatch.setattr(detection, "TOGETHER_MAX", 1)
    assert repr(replayed(path)) == repr(together)


class Counting(Listener):
    """Counts frames, and fails in the wanted steps."""

    def __init__(self, name: str, fails: Sequence[int], heard: list[tuple[str, int]]) -> None:
        super().__init__(heard, lambda frame: (name, frame.step))
        self.name, self._fails = name, fails

    def observe(self, observation: Observation) -> Sequence[Finding]:
        super().observe(observation)
        assert isinstance(observation, Frame)
        if observation.step in self._fails:
            raise ValueError("no")
        return ()


def test_a_detector_that_fails_in_one_of_several_frames_is_replaced_before_the_next() -> None:
    heard: list[tuple[str, int]] = []
    bank = DetectorBank(lambda: [Counting("frail", [1], heard), Counting("sound", [], heard)])
    answers = bank.evaluate([[frame(step, {"loss": [1.0]})] for step in range(3)])
    assert [[failure.detector for failure in answer.failures] for answer in answers] == [[], ["frail"], []]
    assert sorted(heard) == sorted((name, step) for name in ("frail", "sound") for step in range(3))


def test_a_detector_that_fails_in_every_frame_is_switched_off_within_them() -> None:
    heard: list[tuple[str, int]] = []
    steps = range(FAILURES_MAX + 3)
    bank = DetectorBank(lambda: [Counting("frail", steps, heard)])
    answers = bank.evaluate([[frame(step, {"loss": [1.0]})] for step in steps])
    assert [len(answer.failures) for answer in answers] == [1] * FAILURES_MAX + [0] * 3
    assert len(heard) == FAILURES_MAX
