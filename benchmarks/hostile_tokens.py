"""How soon posts of honest agents are accepted alone, and beside one hostile token of each scope.

    python benchmarks/hostile_tokens.py [--agents 1000] [--every 15] [--rounds 3] [--only reads,alerts] [--each]

A real api process on SQLite, with the incidents and the series of a job in its database. The agents are
enrolled, 50 to a job with a token of its own. Each has its order stream, and on a kept connection posts a signed batch
of ten steps every `--every` seconds. A real agent posts up to six such batches a second, and a view besides: one api
process on two cores takes a thousand agents only at this slower pace. A post begins when it is due and ends when the
answer is read; what is not answered within the agent's time-out is broken.

The hostile process holds a token of ingest, job, read, operate, command and alert, and does at once what `ATTACKS`
lists, or what `--only` names; `--each` does one after the other. It runs at the lowest priority (nice 19), so that the
CPU time that it burns itself does not count as the service's fault. Phases alternate, so that what else the machine
does concerns both; figures are medians over the phases.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from sqlalchemy import insert

from rankwatch.agent.enrolment import AgentIdentity
from rankwatch.agent.service_connection import REQUEST_TIMEOUT_S
from rankwatch.signed import Purpose
from rankwatch_detectors.base import Frame, StepKind
from rankwatch_service.access.grants import Scope
from rankwatch_service.access.tokens import TokenKind, create_token
from rankwatch_service.clock import SystemClock
from rankwatch_service.series.writer import SeriesWriter
from rankwatch_service.store.engine import open_engine, write
from rankwatch_service.store.migrate import upgrade
from rankwatch_service.store.models import Attempt, Incident, Job
from tests.support.service.api import api_process, cpu_seconds
from tests.support.service.hostile import (
    ATTACKS,
    HOSTILE_JOB,
    WIDE,
    AskingConnection,
    HostileTarget,
    connected,
    hostile,
    more_files,
    small_batch,
)
from tests.support.values.incidents import incident_row

JOB_AGENTS: Final = 50
SETTLE_S: Final = 8.0
"""Before a phase is measured: the hostile process has begun, or what it began has ended."""
WIDE_RANKS, WIDE_STEPS = 256, 1_000
INCIDENTS: Final = 2_000


@dataclass
class LoadPhase:
    """What honest agents saw of a phase."""

    latencies_s: list[float] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    open: int = 0
    """Posts that are not answered yet."""
    cpu: float = 0.0
    """Of the api process, in cores."""

    def quantile_ms(self, part: float) -> float:
        return float(np.quantile(self.latencies_s or [np.inf], part)) * 1e3


class HonestFleet:
    """All honest agents."""

    def __init__(self, port: int, tokens: dict[str, str], agents: int, every_s: float) -> None:
        self._port, self._tokens, self._agents, self._every_s = port, tokens, agents, every_s
        self.phase = LoadPhase()
        self._enrolling = asyncio.Semaphore(16)
        self.listening = 0

    async def run(self) -> None:
        began_s = time.monotonic()
        jobs = list(self._tokens)
        async with asyncio.TaskGroup() as group:
            for number in range(self._agents):
                job, host = jobs[number // JOB_AGENTS], number % JOB_AGENTS
                group.create_task(self._agent(job, host, began_s + self._every_s * (1 + number / self._agents)))

    async def _agent(self, job: str, host: int, due_s: float) -> None:
        async with self._enrolling, connected(self._port, self._tokens[job]) as one:
            identity = await one.enrol(job, f"node-{host}")
        await asyncio.gather(self._listen(job, host, identity), self._post(job, host, identity, due_s))

    async def _listen(self, job: str, host: int, identity: AgentIdentity) -> None:
        while True:
            with contextlib.suppress(OSError, EOFError):
                async with connected(self._port, self._tokens[job]) as one:
                    one.listen(identity, job, f"node-{host}")
                    if b" 200 " in await one.reader.readline():
                        self.listening += 1
                        try:
                            while await one.reader.read(65_536):
                                pass
                        finally:
                            self.listening -= 1
            self.phase.failed["stream"] += 1
            await asyncio.sleep(1.0)

    async def _post(self, job: str, host: int, identity: AgentIdentity, due_s: float) -> None:
        seq = 0
        while True:
            await asyncio.sleep(due_s - time.monotonic())  # a connection that asks nothing is closed
            with contextlib.suppress(OSError, EOFError):
                async with connected(self._port, self._tokens[job]) as one:
                    while True:
                        sent = identity.sign(Purpose.BATCH, small_batch(job, host, JOB_AGENTS, seq))
                        await asyncio.sleep(due_s - time.monotonic())
                        seq += await self._posted(one, sent, due_s)
                        due_s = max(due_s + self._every_s, time.monotonic())

    async def _posted(self, one: AskingConnection, sent: bytes, due_s: float) -> bool:
        """Whether the batch was accepted."""
        phase = self.phase
        phase.open += 1
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                status, _ = await one.ask("POST", "telemetry", sent)
        except (OSError, EOFError) as error:
            phase.failed[type(error).__name__] += 1
            raise
        finally:
            phase.open -= 1
        if status != 202:
            phase.failed[str(status)] += 1
            return False
        phase.latencies_s.append(time.monotonic() - due_s)
        return True


def store(url: str, jobs: list[str]) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Fill the database; tokens of the honest jobs, hostile tokens by scope, and the ids of incidents."""
    engine = open_engine(url)
    upgrade(engine)
    now = time.time_ns()
    seen = dict.fromkeys(("first_seen_unix_ns", "last_seen_unix_ns", "last_progress_unix_ns"), now)
    wide = {"name": WIDE, "state": "running", "attempt": "l.0", "step": WIDE_STEPS - 1, "world_size": WIDE_RANKS}
    attempt = {"job": WIDE, "attempt": "l.0", "started_unix_ns": now, "number": 1, "first_step": 0}
    found = [
        incident_row(id=f"inc_{number:032x}", number=number + 1, job=WIDE, episode=number + 1, scope=f"rank:{number}")
        for number in range(INCIDENTS)
    ]

    with write(engine) as connection:
        connection.execute(insert(Job).values(**wide, ranks_reporting=WIDE_RANKS, step_time_s=0.25, loss=2.3, **seen))
        connection.execute(
            insert(Attempt).values(**attempt, last_step=WIDE_STEPS - 1, world_size=WIDE_RANKS, topology={})
        )
        connection.execute(insert(Incident), found)

        def token(kind: TokenKind, name: str, scope: Scope, job: str = "") -> str:
            return create_token(connection, kind, name, [scope], now, job=job)[1]

        honest = {job: token(TokenKind.JOB, job, Scope.INGEST, job) for job in jobs}
        own = {scope: token(TokenKind.API, f"hostile {scope}", scope) for scope in Scope if scope is not Scope.ADMIN}
        own["job"] = token(TokenKind.JOB, "hostile job", Scope.INGEST, HOSTILE_JOB)
    series, everyone = SeriesWriter(engine, SystemClock()), np.ones(WIDE_RANKS, dtype=bool)
    for step in range(WIDE_STEPS):
        values = {name: np.random.default_rng(step).random(WIDE_RANKS) for name in ("busy_s", "step_time_s")}
        series.add(WIDE, Frame("l.0", "steps", step, StepKind.TRAIN, 0.0, values, dict.fromkeys(values, everyone)))
    series.close(WIDE)
    engine.dispose()
    return honest, {str(scope): text for scope, text in own.items()}, [str(one["id"]) for one in found]


async def measured(fleet: HonestFleet, pid: int, target: HostileTarget, names: list[str], seconds: float) -> LoadPhase:
    """One phase, beside a hostile process that does all of `names`."""
    spawn = multiprocessing.get_context("spawn")
    ready, limit_s = spawn.Event(), SETTLE_S + seconds + 2 * REQUEST_TIMEOUT_S
    process = spawn.Process(target=hostile, args=(target, names, limit_s, ready), daemon=True)
    if names:
        process.start()
        await asyncio.to_thread(ready.wait, 60.0)
    try:
        await asyncio.sleep(SETTLE_S)
        fleet.phase = phase = LoadPhase()
        before_s, began_s = cpu_seconds(pid), time.monotonic()
        await asyncio.sleep(seconds)
        phase.cpu = (cpu_seconds(pid) - before_s) / (time.monotonic() - began_s)
        fleet.phase = LoadPhase()
        await asyncio.sleep(REQUEST_TIMEOUT_S if phase.open else 0.0)
    finally:
        if names:
            process.terminate()
            process.join()
    return phase


async def compare(
    pid: int, fleet: HonestFleet, target: HostileTarget, options: argparse.Namespace
) -> dict[str, list[LoadPhase]]:
    """All phases, by what the hostile process did."""
    names = options.only.split(",") if options.only else list(ATTACKS)
    beside = {name: [name] for name in names} if options.each else {", ".join(names) if options.only else "all": names}
    found: dict[str, list[LoadPhase]] = {"": []} | {name: [] for name in beside}
    running = asyncio.create_task(fleet.run())
    try:
        while fleet.listening < options.agents:
            await asyncio.wait([running], timeout=0.1)
            if running.done():
                running.result()
        await asyncio.sleep(options.every)
        for _ in range(options.rounds):
            for title, attacks in beside.items():
                found[""].append(await measured(fleet, pid, target, [], options.seconds))
                found[title].append(await measured(fleet, pid, target, attacks, options.seconds))
                for each in ("", title):
                    last = found[each][-1]
                    p50, p99 = last.quantile_ms(0.5), last.quantile_ms(0.99)
                    print(f"  {each or 'alone'}: {p50:.0f} {p99:.0f} ms {dict(last.failed)}", file=sys.stderr)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    return found


def row(title: str, phases: list[LoadPhase], alone_ms: float) -> str:
    """A line of the table."""
    p50, p99 = (statistics.median(one.quantile_ms(part) for one in phases) for part in (0.5, 0.99))
    failed = sum((one.failed for one in phases), Counter[str]())
    reported = ", ".join(f"{what}: {times}" for what, times in sorted(failed.items())) or "0"
    posts, cpu = sum(len(one.latencies_s) for one in phases), statistics.median(one.cpu for one in phases)
    return f"| {title or 'alone'} | {posts} | {p50:.0f} | {p99:.0f} | {p99 / alone_ms:.2f} | {reported} | {cpu:.2f} |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=1_000)
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two posts of an agent")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a phase")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help=f"some of {','.join(ATTACKS)}")
    parser.add_argument("--each", action="store_true", help="one attack after the other")
    options = parser.parse_args()
    gc.disable()  # looking through the objects of thousands of connections, this process would measure itself
    files = more_files()
    jobs = [f"honest-{number}" for number in range(-(-options.agents // JOB_AGENTS))]
    with tempfile.TemporaryDirectory(prefix="rankwatch-hostile-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        url = f"sqlite:///{folder / 'rankwatch.db'}"
        honest, own, incidents = store(url, jobs)
        port, pid = stack.enter_context(api_process(url, folder))
        fleet = HonestFleet(port, honest, options.agents, options.every)
        found = asyncio.run(compare(pid, fleet, HostileTarget(port, own, incidents), options))
    print(f"python benchmarks/hostile_tokens.py {' '.join(sys.argv[1:])}")
    print(f"CPython {platform.python_version()}, {os.cpu_count()} cores, {files} open files, SQLite")
    print(f"load of the machine (1 min): {os.getloadavg()[0]:.1f}; {options.agents} agents, each posts every")
    print(f"{options.every:g} s; {options.rounds} phases of {options.seconds:g} s each, medians of them")
    print("| beside | posts | p50, ms | p99, ms | p99 / alone | refused or broken | CPU of the api, cores |")
    print("| --- | ---: | ---: | ---: | ---: | --- | ---: |")
    alone_ms = statistics.median(one.quantile_ms(0.99) for one in found[""])
    for title, phases in found.items():
        print(row(title, phases, alone_ms))


if __name__ == "__main__":
    main()
