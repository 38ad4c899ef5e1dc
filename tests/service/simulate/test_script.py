"""Synthetic jobs as text: every fault can be written, alone and with others."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from rankwatch_detectors.base import Frame
from rankwatch_service.simulate.faults import Hang, Restart
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job, Noise, RankPlacement
from rankwatch_service.simulate.script import FAULTS, HARMLESS, ScriptError, apply, usage

VALUES = {"rank": "3", "at": "40", "until": "60", "host": "host-1", "to": "20", "stage": "1", "after": "30.5"}

COMBINED = {
    "skipped steps and NaN": "scaler_skip:at=20 nonfinite:rank=5,at=20 nonfinite:rank=1+2,at=20 scaler_skip:at=20",
    "flips around a rollback": "corruption:rank=2,at=15 rollback:at=20,to=10 corruption:rank=2,at=45",
    "a killed rank and a relaunch": (
        "nonfinite:rank=1,at=40 corruption:rank=2,at=40 rank_lost:rank=3,at=40 restart:at=40,to=35 "
        "telemetry_lost:host=host-1,at=30,until=50"
    ),
    "all noise": (
        "uneven:cv=0.1,tokens=yes gc hiccups:probability=0.01 bursts:probability=0.01 warm_up wave wander:every=20 "
        "heavy_stage:stage=1 straggler:rank=host-1,at=30,by=data straggler:rank=3+5,at=30,by=descheduled,every=2 "
        "slowdown:at=50,until=60 loss_bump:at=44"
    ),
    "standing still": (
        "eval:every=20 save:every=30 pause:at=50 flap:at=60 hang:rank=3-5,at=70,by=stopped host_lost:host=host-0,at=80"
    ),
}


def written(name: str) -> str:
    """An entry with a value for each parameter that must be given."""
    if name == "lean_host":
        return "lean_host:host=1"
    required = re.sub(r"\[[^]]*\]", "", usage(name)).partition(":")[2]
    names = [one.split("=")[0] for one in required.split(",") if one]
    return f"{name}:{','.join(f'{one}={VALUES[one]}' for one in names)}".rstrip(":")


def job() -> Job:
    return Job(16, 100, 1, placement=RankPlacement(pp=2))


@pytest.mark.parametrize("name", [*FAULTS, *HARMLESS])
def test_every_entry_can_be_played_and_only_a_fault_leaves_a_label(name: str) -> None:
    one = apply(written(name), job())
    assert any(isinstance(observation, Frame) for observation in generate(one))
    assert len(one.labels) == (name in FAULTS)


@pytest.mark.parametrize("name", COMBINED)
def test_entries_play_together_on_accelerators_on_cpus_and_with_late_values(name: str) -> None:
    cpu = Noise(contention=0.3, busy=0.04, silicon=0.03)
    late = {"late_values": True, "fingerprint_every": 0, "tick_s": 5.0, "ends": False, "noise": Noise(loss=0.015)}
    on_cpu = {"step_s": 0.1, "noise": cpu, "placement": RankPlacement(pp=2, accelerated=False)}
    for how in ({}, on_cpu, late):
        one = dataclasses.replace(job(), **how)
        for text in COMBINED[name].split():
            one = apply(text, one)
        steps = [frame.step for frame in generate(one) if isinstance(frame, Frame) and frame.family == "steps"]
        assert min(steps) == 0
        assert max(steps) > 40


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("5", (5,)), ("3+12", (3, 12)), ("4-7", (4, 5, 6, 7)), ("1+4-5", (1, 4, 5)), ("host-1", tuple(range(8, 16)))],
)
def test_ranks_are_named_one_by_one_by_range_or_by_host(text: str, ranks: tuple[int, ...]) -> None:
    world = apply(f"straggler:rank={text},at=40,factor=1.5", job())
    assert world.labels[0].ranks == ranks


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("stragler:rank=1,at=2", "did you mean straggler"),
        ("xyz", "--list-faults"),
        ("hang", "rank, at must be given"),
        ("hang:rank=16,at=5", "ranks 0 to 15"),
        ("hang:rank=-1,at=5", "rank"),
        ("hang:rank=1,at=100", "steps 0 to 99"),
        ("hang:rank=1,at=x", "'x' is not a number"),
        ("hang:rank=1,at=5,speed=3", "no parameter 'speed'"),
        ("hang:rank=1,at=5,at=6", "at is given twice"),
        ("hang:rank=1,at=5,seconds=-2", "from 0 to 604800"),
        ("hang:rank=1,at=5,seconds=nan", "from 0 to 604800"),
        ("hang:rank=1,at=5,seconds=1e30", "from 0 to 604800"),
        ("slowdown:at=10,factor=1e300", "from 0 to 1000"),
        ("loss_spike:at=10,factor=-1", "0 or more"),
        ("hang:rank=1,at=5,by=magic", "loop or stopped"),
        ("hang:3", "'3' is not name=value"),
        ("telemetry_lost:host=host-9,at=1,until=5", "hosts host-0 to host-1"),
        ("heavy_stage:stage=2", "stages 0 to 1"),
        ("straggler:rank=7-3,at=5", "names no rank"),
        ("straggler:rank=3,at=10,until=5", "until: must be after 10"),
        ("slowdown:at=10,until=10", "until: must be after 10"),
        ("telemetry_lost:host=host-1,at=20,until=10", "until: must be after 20"),
        ("absent:rank=1,at=20,until=10", "until: must be after 20"),
        ("restart:at=10,to=40", "to: must not be after 10"),
        ("rollback:at=10,to=11", "to: must not be after 10"),
    ],
)
def test_a_wrong_fault_is_reported_with_what_is_wrong_and_how_it_is_written(text: str, reported: str) -> None:
    with pytest.raises(ScriptError, match=re.escape(reported)) as error:
        apply(text, job())
    name = text.partition(":")[0]
    assert name not in FAULTS or usage(name) in str(error.value)


def test_faults_that_end_an_attempt_happen_once_though_their_step_is_repeated() -> None:
    world = Job(16, 100, 1).inject(Hang(3, 50, 40.0), Restart(50, 20))
    standing = [o for o in generate(world) if getattr(o, "presence", None) and o.presence.phase[3] == "forward"]
    assert len(standing) == 40


def test_every_rank_collects_garbage_at_steps_of_its_own() -> None:
    world = apply("gc:every=20,seconds=0.4", Job(16, 100, 1, noise=Noise(busy=0.0, silicon=0.0)))
    slow = {rank: [] for rank in range(16)}
    for frame in generate(world):
        if isinstance(frame, Frame):
            for rank in np.flatnonzero(frame.values["busy_s"] > 1.0).tolist():
                slow[rank].append(frame.step)
    assert all(len(steps) == 5 and np.all(np.diff(steps) == 20) for steps in slow.values())
    assert len({steps[0] for steps in slow.values()}) == 16
