"""Reads from the database what a job trains now: its attempt, its ranks, and what they can be asked to do.

The attempt comes from agents' views, which arrive every second whether stream runs or not. Its ranks come from the
topology, which stream stores once the ranks have reported what they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from sqlalchemy import Connection, Engine, select

from rankwatch.wire import Progress, View
from rankwatch_service.orders.order import HostView
from rankwatch_service.policy.checkpoint_ledger import LedgerEntry
from rankwatch_service.store.engine import write_aside
from rankwatch_service.store.models import AgentView, Attempt, Checkpoint, Job
from rankwatch_service.store.rows import checkpoint_of
from rankwatch_service.store.upsert import upsert

LIVE_NS: Final = 5 * 10**9
"""An attempt with a view younger than this is running; agents post at least one every second."""

_RANKS: Final = msgspec.msgpack.Decoder(tuple[Progress, ...])
_ENCODER: Final = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class Training:
    """One attempt of a job, as far as it is known."""

    job: str
    attempt: str
    hosts: Mapping[str, tuple[int, ...]]
    """Ranks by host; empty until stream has stored the topology."""
    can: frozenset[str]
    """What every rank can be asked to do; empty while unknown."""
    replicas: tuple[tuple[int, ...], ...]
    """Groups of ranks with bit-equal parameters."""
    step_time_s: float | None

    @property
    def world_size(self) -> int:
        """Ranks of the attempt; 0 while unknown."""
        return sum(len(ranks) for ranks in self.hosts.values())


def launch_of(attempt: str) -> str:
    """The LAUNCH of LAUNCH.k."""
    return attempt.rpartition(".")[0]


def k_of(attempt: str) -> int:
    """The k of LAUNCH.k; 0 for a text that has none."""
    k = attempt.rpartition(".")[2]
    return int(k) if k.isdecimal() else 0


def store_views(engine: Engine, views: Sequence[View], now_unix_ns: int) -> None:
    """Store the newest view of each host, all in one transaction. A repeated view changes only its time."""
    # In the order of their keys, as `write_aside` requires.
    newest = dict(sorted({(view.job, view.attempt, view.host): view for view in views}.items()))
    rows = [
        {
            "job": view.job,
            "attempt": view.attempt,
            "host": view.host,
            "boot": view.boot,
            "ranks": _ENCODER.encode(view.ranks),
            "at_unix_ns": now_unix_ns,
        }
        for view in newest.values()
    ]
    with write_aside(engine) as connection:
        connection.execute(upsert(connection, AgentView, ("boot", "ranks", "at_unix_ns")), rows)


def host_views(connection: Connection, job: str, attempts: Sequence[str]) -> dict[str, HostView]:
    """Each host's newest view in any of these attempts of a job: a rollback changes the attempt between two views."""
    rows = connection.execute(
        select(AgentView.host, AgentView.at_unix_ns, AgentView.ranks)
        .where(AgentView.job == job, AgentView.attempt.in_(attempts))
        .order_by(AgentView.at_unix_ns)
    )
    return {host: HostView(at_unix_ns, _RANKS.decode(ranks)) for host, at_unix_ns, ranks in rows}


def current_attempt(connection: Connection, job: str, now_unix_ns: int) -> str | None:
    """The attempt that trains now, else the last known one; None for an unknown job."""
    live = connection.execute(
        select(AgentView.attempt).where(AgentView.job == job, AgentView.at_unix_ns > now_unix_ns - LIVE_NS).distinct()
    ).scalars()
    if attempts := list(live):
        return max(attempts, key=lambda attempt: (_number(connection, job, attempt), k_of(attempt)))
    return connection.scalar(select(Job.attempt).where(Job.name == job))


def launches_at_once(connection: Connection, jobs: Sequence[str], now_unix_ns: int) -> dict[str, list[str]]:
    """Those of the jobs that have several launches training now, with these launches, sorted.

    They are several jobs under one name: their steps, checkpoints and orders are mixed up.
    """
    live = (AgentView.job.in_(jobs), AgentView.at_unix_ns > now_unix_ns - LIVE_NS)
    launches = defaultdict(set)
    for job, attempt in connection.execute(select(AgentView.job, AgentView.attempt).where(*live).distinct()):
        launches[job].add(launch_of(attempt))
    several = [job for job, mine in launches.items() if len(mine) > 1]
    # Agents still report a launch that has just ended: only ranks that train count. There is rarely one to decode.
    training = defaultdict(set)
    ranks_of = select(AgentView.job, AgentView.attempt, AgentView.ranks)
    for job, attempt, ranks in connection.execute(ranks_of.where(*live, AgentView.job.in_(several))):
        if any(rank.state in ("running", "held") for rank in _RANKS.decode(ranks)):
            training[job].add(launch_of(attempt))
    return {job: sorted(mine) for job, mine in training.items() if len(mine) > 1}


def superseded(connection: Connection, job: str, attempt: str, k: int, since_unix_ns: int) -> bool:
    """Whether agents have reported since `since_unix_ns` a newer launch, or a rollback number of this one above `k`."""
    others = connection.execute(
        select(AgentView.attempt)
        .where(AgentView.job == job, AgentView.attempt != attempt, AgentView.at_unix_ns > since_unix_ns)
        .distinct()
    ).scalars()
    for other in others:
        if launch_of(other) == launch_of(attempt):
            if k_of(other) > k:
                return True
        # Agents of an older launch may still report how it ended.
        elif _number(connection, job, other) > _number(connection, job, attempt):
            return True
    return False


def read_training(connection: Connection, job: str, attempt: str) -> Training:
    """What is known of an attempt.

    While its own topology is not stored yet, as after a rollback, it is the newest one of its launch.
    """
    prefix = launch_of(attempt) + "."
    rows = connection.execute(
        select(Attempt.attempt, Attempt.topology)
        .where(Attempt.job == job, Attempt.attempt.startswith(prefix, autoescape=True))
        .order_by(Attempt.number)
    )
    # The prefix alone also finds launches whose name begins like this one: "a." that of "a.b.0".
    topologies = {name: topology for name, topology in rows if launch_of(name) == launch_of(attempt)}
    topology: dict[str, Any] = topologies.get(attempt) or next(reversed(topologies.values()), {})
    hosts, groups = defaultdict(list), defaultdict(list)
    for rank in topology.get("ranks", ()):
        hosts[rank["host"]].append(rank["rank"])
        groups[tuple(rank[axis] for axis in ("tp", "pp", "cp", "ep"))].append(rank["rank"])
    return Training(
        job,
        attempt,
        {host: tuple(ranks) for host, ranks in hosts.items()},
        frozenset(topology.get("can", ())),
        tuple(tuple(group) for group in groups.values()) if topology.get("replicated") else (),
        connection.scalar(select(Job.step_time_s).where(Job.name == job)),
    )


def checkpoints(connection: Connection, job: str) -> list[LedgerEntry]:
    """The job's ledger as stored, oldest checkpoint first."""
    rows = connection.execute(
        select(Checkpoint.__table__).where(Checkpoint.job == job).order_by(Checkpoint.saved_unix_ns)
    )
    return [checkpoint_of(row) for row in rows.mappings()]


def _number(connection: Connection, job: str, attempt: str) -> float:
    """The launch's place among the job's launches; a launch that stream has not stored yet is the newest."""
    prefix = launch_of(attempt) + "."
    number = connection.scalar(
        select(Attempt.number)
        .where(Attempt.job == job, Attempt.attempt.startswith(prefix, autoescape=True))
        .order_by(Attempt.number)
        .limit(1)
    )
    return float("inf") if number is None else number
