"""A recorder file in this process, its reader, and a watch whose clock only the test moves."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rankwatch import layout
from rankwatch.agent.ranks import LocalRank
from rankwatch.identity import RankIdentity
from rankwatch.layout import Answer, Directive
from rankwatch.reader import Entry, RingReader, StepEntry
from rankwatch.recorder import Recorder
from rankwatch.watch import Watch
from tests.support.clock import FakeClock

UNIX_NS = 1_700_000_000_000_000_000


def a_recorder(directory: Path, monotonic_ns: int = 1_000, **identity: object) -> Recorder:
    identity = {"job": "gpt", "launch": "l", "rank": 3} | identity
    return Recorder.create(identity, [str(directory)], monotonic_ns=monotonic_ns, unix_ns=UNIX_NS)


@contextmanager
def local_rank(recorder: Recorder) -> Iterator[LocalRank]:
    """The rank as its host's agent has it."""
    reader = RingReader(recorder.path, writable=True)
    yield LocalRank(recorder.path, reader, reader.header, None, 0, 0)
    reader.close()


def write_step(recorder: Recorder, step: int, **fields: object) -> None:
    """One entry; without further fields a train step of 40 ns."""
    usual = {"k": 0, "kind": 0, "relative_step": step + 1, "end_ns": 2_000, "phases_ns": [], "mask": 0}
    usual |= {"step_ns": 40, "busy_ns": 30, "busy_cpu_ns": 20, "wait_ns": 10}
    recorder.write_step(step=step, **usual | fields)  # type: ignore[arg-type]


def everything_in(recorder: Recorder) -> list[Entry]:
    reader = RingReader(recorder.path)
    try:
        poll = reader.poll()
        assert poll.lost == {}
        return poll.entries
    finally:
        reader.close()


class Rank:
    """One rank under a fake clock, with the agent's hand on its directive cell."""

    def __init__(self, directory: Path, number: int = 3) -> None:
        self.clock = FakeClock()
        self.recorder = a_recorder(directory, self.clock.now_ns)
        self.ended: list[int] = []
        self.sleeps = 0
        self.plan: dict[int, Directive] = {}
        self.watch = Watch(
            RankIdentity("gpt", "l", number, 4),
            self.recorder,
            directory=str(directory),
            now=self.clock.unix_ns,
            cpu=self.clock.unix_ns,
            sleep=self._sleep,
            end_process=self._end,
        )

    def write(self, order: str, phase: str, action: str = "pause", step: int = -1, **fields: object) -> None:
        """What the agent writes, now."""
        attempt = f"l.{self.watch._meter.k}"
        self._put(Directive(order, attempt, phase, action, step, **fields))  # type: ignore[arg-type]

    def write_after(self, sleeps: int, directive: Directive) -> None:
        """What the agent writes after so many more sleeps of the held rank."""
        self.plan[self.sleeps + sleeps] = directive

    def order(self, action: str, step: int, **fields: object) -> None:
        """Ordered by the service now: to hold before this step, act, and go on."""
        hold = Directive("o", "l.0", "hold", action, step, **fields)  # type: ignore[arg-type]
        self._put(hold)
        self.write_after(1, hold._replace(phase="do", lease_s=120.0))
        self.write_after(3, hold._replace(phase="go"))

    @property
    def identity(self) -> Mapping[str, Any]:
        """All that it declares."""
        reader = RingReader(self.recorder.path)
        found: Mapping[str, Any] = reader.header.identity
        reader.close()
        return found

    @property
    def can(self) -> list[str]:
        """What it says it can do when it is ordered to."""
        found: list[str] = self.identity.get("can", [])
        return found

    @property
    def answer(self) -> Answer:
        found = self.recorder.answer.read()
        return layout.decode_answer(found[1]) if found is not None else Answer()

    @property
    def state(self) -> str:
        return layout.STATES[self.recorder.words[layout.STATE]]

    @property
    def outside_ns(self) -> int:
        """The time since which it is outside its step; 0 within one."""
        return int(self.recorder.words[layout.OUTSIDE])

    @property
    def entries(self) -> list[Entry]:
        return everything_in(self.recorder)

    @property
    def steps(self) -> list[StepEntry]:
        return [entry for entry in self.entries if isinstance(entry, StepEntry)]

    def notes(self, kind: str) -> list[dict[str, object]]:
        return [dict(entry.fields) for entry in self.entries if getattr(entry, "kind", None) == kind]

    def _put(self, directive: Directive) -> None:
        layout.directive_cell(self.recorder._view).write(layout.encode_directive(directive))

    def _sleep(self, seconds: float) -> None:
        self.sleeps += 1
        self.clock.advance(seconds)
        directive = self.plan.pop(self.sleeps, None)
        if directive is not None:
            self._put(directive)

    def _end(self) -> None:
        self.ended.append(75)
        raise SystemExit(75)


class Probe:
    """Implements rankwatch.sink.Probe and keeps the calls."""

    def __init__(self) -> None:
        self.calls = []

    def step_begin(self, step: int, k: int) -> None:
        self.calls.append(("begin", step, k))

    def step_end(self, step: int, k: int) -> None:
        self.calls.append(("end", step, k))

    def log(self, name: str, value: object) -> None:
        self.calls.append(("log", name))

    def after_restore(self) -> int:
        self.calls.append(("restored",))
        return 4711

    def close(self) -> None:
        self.calls.append(("closed",))


class StatefulLoader:
    """Data of one epoch that keeps where it is, and whose iterators cannot be moved."""

    def __init__(self, batches: int = 100) -> None:
        self.at = 0
        self.batches = batches

    def __iter__(self) -> Iterator[int]:
        random.random()  # as the making of a shuffling loader's iterator does
        return self._epoch()

    def _epoch(self) -> Iterator[int]:
        while self.at < self.batches:
            self.at += 1
            yield self.at
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Model:
    """State that each step changes, and that decides the next."""

    def __init__(self) -> None:
        self.weight = [0.0]

    def state_dict(self) -> dict[str, list[float]]:
        return {"weight": self.weight}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        self.weight = state["weight"]  # keeps what it is given, as optimizers do

    def train(self, batch: float) -> None:
        self.weight[0] = self.weight[0] * 0.9 + batch * random.random()
