"""A scenario and a seed give the same job in every version: recorded digests stand in `tests/golden/simulate.json`.

Floats are compared as 32-bit ones, since the last digits of `exp` and `log` differ between processors.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest

from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job
from rankwatch_service.simulate.mix import add_mix
from rankwatch_service.simulate.noise import Noise
from rankwatch_service.simulate.placement import RankPlacement
from rankwatch_service.simulate.script import FAULTS, HARMLESS, apply, usage

GOLDEN = json.loads((Path(__file__).parents[2] / "golden/simulate.json").read_text())

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


SET_BY_SERVICE = frozenset({"awaits_times", "rules"})
"""Fields of observations that a job does not decide."""


def digest(values: Iterable[object]) -> str:
    """Of values of any depth."""
    sha = hashlib.sha256()

    def feed(value: object) -> None:
        match value:
            case np.ndarray():
                sha.update((value.astype("<f4") if value.dtype.kind == "f" else value).tobytes())
            case float():
                sha.update(np.float32(value).tobytes())
            case Mapping():
                for name, one in value.items():
                    sha.update(name.encode())
                    feed(one)
            case list() | tuple():
                for one in value:
                    feed(one)
            case _ if dataclasses.is_dataclass(value):
                for field in dataclasses.fields(value):
                    if field.init and field.name not in SET_BY_SERVICE:
                        feed(getattr(value, field.name))
            case _:
                sha.update(repr(value).encode())

    for value in values:
        feed(value)
    return sha.hexdigest()[:16]


def played(job: Job, texts: Iterable[str]) -> str:
    for text in texts:
        job = apply(text, job)
    return digest([*generate(job), *job.labels, *job.played_labels()])


@pytest.mark.parametrize("name", [*FAULTS, *HARMLESS])
def test_each_entry_plays_as_it_always_did(name: str) -> None:
    assert played(Job(16, 100, 1, placement=RankPlacement(pp=2)), [written(name)]) == GOLDEN["entries"][name]


@pytest.mark.parametrize("name", COMBINED)
def test_several_entries_together_play_as_they_always_did(name: str) -> None:
    assert played(Job(16, 100, 1, placement=RankPlacement(pp=2)), COMBINED[name].split()) == GOLDEN["combined"][name]


@pytest.mark.parametrize("name", COMBINED)
def test_a_job_of_cpu_ranks_plays_as_it_always_did(name: str) -> None:
    job = Job(
        16,
        100,
        1,
        step_s=0.1,
        noise=Noise(contention=0.3, busy=0.04, silicon=0.03),
        placement=RankPlacement(pp=2, accelerated=False),
    )
    assert played(job, COMBINED[name].split()) == GOLDEN["cpu"][name]


@pytest.mark.parametrize("name", COMBINED)
def test_a_job_with_late_values_plays_as_it_always_did(name: str) -> None:
    job = Job(
        16,
        100,
        1,
        late_values=True,
        fingerprint_every=0,
        tick_s=5.0,
        ends=False,
        noise=Noise(loss=0.015),
        placement=RankPlacement(pp=2),
    )
    assert played(job, COMBINED[name].split()) == GOLDEN["late values"][name]


@pytest.mark.parametrize("seed", range(3))
def test_a_mix_is_drawn_as_it_always_was(seed: int) -> None:
    job = Job(16, 1600, seed, step_s=0.2)
    job, _ = add_mix(job, 8)
    assert played(job, []) == GOLDEN["mix"][seed]
