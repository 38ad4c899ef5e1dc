"""Reads from the database what a job trains now: its attempt, its ranks, their pace, and what they can be asked to do.

The attempt comes from agents' views, which arrive every second whether stream runs or not. Its ranks come from the
topology, which stream stores once the ranks have reported what they are.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec
from sqlalchemy import Connection, Engine, bindparam, delete, func, select
from sqlalchemy.orm import aliased

from rankwatch.wire import Progress, View
from rankwatch_service.names import launch_of, plain_host
from rankwatch_service.orders.order import HostView
from rankwatch_service.policy.checkpoint_ledger import LedgerEntry
from rankwatch_service.store.engine import upsert, write_aside
from rankwatch_service.store.models import AgentView, Attempt, Checkpoint, Job
from rankwatch_service.store.rows import checkpoint_of

LIVE_NS: Final = 5 * 10**9
"""An attempt with a view younger than this is running; agents post at least one every second."""

ATTEMPTS_MAX: Final = 4
"""Attempts of an agent whose newest view is kept: one, two around a rollback or a restart, and more where several
launches have one name."""

AGENTS_REMEMBERED: Final = 65_536
"""Agents in `ViewSizes`, 26 MB."""

_RANKS: Final = msgspec.msgpack.Decoder(tuple[Progress, ...])
_ENCODER: Final = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class Training:
    """One attempt of a job, as far as it is known."""

    job: str
    attempt: str
    hosts: Mapping[str, tuple[int, ...]]
    """Ranks by host; empty until stream has stored the topology."""
    agents: Mapping[int, str]
    """The agent that has introduced it, by rank; without ranks of agents that have not enrolled."""
    can: frozenset[str]
    """What every rank can be asked to do; empty while unknown."""
    replicas: tuple[tuple[int, ...], ...]
    """Groups of ranks that must answer a rollback with the same fingerprint: those with bit-equal parameters, or with
    the same slices of a sharded model."""
    step_time_s: float | None
    world_size: int
    """Ranks that its launch declares; 0 while unknown."""


def k_of(attempt: str) -> int:
    """The k of LAUNCH.k; 0 for a text that has none."""
    k = attempt.rpartition(".")[2]
    return int(k) if k.isdecimal() else 0


class ReceivedView(NamedTuple):
    """A view, and the agent that signed it; empty: it was not signed."""

    view: View
    agent: str = ""
    is_first: bool = False
    """Whether there may be no row of this attempt yet."""

    @property
    def host(self) -> str:
        """`AgentView.host`."""
        return f"{self.view.host}/{self.agent}" if self.agent else self.view.host


@dataclass(slots=True)
class ViewSize:
    """What this process knows of the row of an agent and attempt."""

    largest_bytes: int = 0
    """Size of its largest view; 0: there was none."""
    is_stored: bool = False
    """Whether it was stored, and the agent's earlier attempts removed for it."""


class ViewSizes:
    """How large the views were that this process has taken: what a further one may add to its row."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[tuple[str, str], dict[str, ViewSize]] = OrderedDict()
        """By job and host, those with the newest view at the end; by attempt, likewise."""

    def of(self, one: ReceivedView) -> ViewSize:
        """What is known of the row of a view; the caller changes it."""
        return self._sizes.get((one.view.job, one.host), {}).get(one.view.attempt) or ViewSize()

    def remember(self, one: ReceivedView, size: ViewSize) -> None:
        """Remember the row of a view that was received now."""
        key, attempt = (one.view.job, one.host), one.view.attempt
        attempts = self._sizes.setdefault(key, {})
        self._sizes.move_to_end(key)
        attempts.pop(attempt, None)
        attempts[attempt] = size
        if len(attempts) > ATTEMPTS_MAX:
            del attempts[next(iter(attempts))]
        if len(self._sizes) > AGENTS_REMEMBERED:
            self._sizes.popitem(last=False)


def store_views(engine: Engine, views: Sequence[ReceivedView], now_unix_ns: int) -> None:
    """Store the newest view of each agent and attempt, and remove those of its earlier attempts beyond `ATTEMPTS_MAX`.

    A repeated view changes only its time.
    """
    newest = {(one.view.job, one.host, one.view.attempt): one for one in views}
    rows = [
        {
            "job": job,
            "host": host,
            "attempt": attempt,
            "agent": one.agent,
            "boot": one.view.boot,
            "ranks": _ENCODER.encode(one.view.ranks),
            "at_unix_ns": now_unix_ns,
        }
        # In the order of their keys, as `write_aside` requires.
        for (job, host, attempt), one in sorted(newest.items())
    ]
    with write_aside(engine) as connection:
        connection.execute(upsert(connection, AgentView, ("agent", "boot", "ranks", "at_unix_ns")), rows)
    first = sorted({(one.view.job, one.host) for one in views if one.is_first})
    if first:
        with write_aside(engine) as connection:
            connection.execute(_EARLIER, [{"of_job": job, "of_host": host} for job, host in first])


_OTHER: Final = aliased(AgentView)
_KEPT: Final = (
    select(_OTHER.attempt)
    .where(_OTHER.job == bindparam("of_job"), _OTHER.host == bindparam("of_host"))
    .order_by(_OTHER.at_unix_ns.desc())
    .limit(ATTEMPTS_MAX)
)
_EARLIER: Final = delete(AgentView).where(
    AgentView.job == bindparam("of_job"), AgentView.host == bindparam("of_host"), AgentView.attempt.not_in(_KEPT)
)
"""Removes the views of an agent that are not its newest."""


def host_views(connection: Connection, training: Training, attempts: Sequence[str]) -> dict[str, HostView]:
    """Each host's newest view in any of these attempts of a job: a rollback changes the attempt between two views.

    Of a rank that an agent has introduced, only this agent's views count. A host of several agents is as silent as the
    most silent of them. A host has its name in the topology, where two of one name are distinguished.
    """
    host_of_rank = {rank: host for host, ranks in training.hosts.items() for rank in ranks}
    rows = connection.execute(
        select(AgentView.host, AgentView.agent, AgentView.at_unix_ns, AgentView.ranks)
        .where(AgentView.job == training.job, AgentView.attempt.in_(attempts))
        .order_by(AgentView.at_unix_ns)
    )
    newest: dict[tuple[str, str], HostView] = {}
    for name, agent, at_unix_ns, ranks in rows:
        own = [rank for rank in _RANKS.decode(ranks) if training.agents.get(rank.rank, agent) == agent]
        if own or not training.agents:
            host = host_of_rank.get(own[0].rank, plain_host(name)) if own else plain_host(name)
            newest[host, agent] = HostView(at_unix_ns, tuple(own))
    views: dict[str, HostView] = {}
    for (host, _), view in newest.items():
        other = views.get(host)
        views[host] = view if other is None else other.joined(view)
    return views


def current_attempt(connection: Connection, job: str, now_unix_ns: int) -> str | None:
    """The attempt that trains now, else the last known one; None for an unknown job.

    A launch that stream has accepted comes before one that only a view names.
    """
    if live := _reported(connection, job, now_unix_ns - LIVE_NS):
        launch = max({launch_of(attempt) for attempt, _ in live}, key=lambda launch: _number(connection, job, launch))
        agents = set(_agents(_topologies(connection, job, launch)).values())
        own = [attempt for attempt, agent in live if launch_of(attempt) == launch and (not agents or agent in agents)]
        if own:
            return max(own, key=k_of)
    return connection.scalar(select(Job.attempt).where(Job.name == job))


def launches_at_once(connection: Connection, jobs: Sequence[str], now_unix_ns: int) -> dict[str, list[str]]:
    """The jobs, of these, with several launches that train now, and these launches, sorted.

    They are several jobs under one name: their steps, checkpoints and orders are mixed up. Where agents have enrolled,
    only those count that carry ranks; that others report beside them is an incident of the job.
    """
    live = (AgentView.job.in_(jobs), AgentView.at_unix_ns > now_unix_ns - LIVE_NS)
    attempts = defaultdict(set)
    for job, attempt in connection.execute(select(AgentView.job, AgentView.attempt).where(*live).distinct()):
        attempts[job].add(attempt)
    several = [job for job, mine in attempts.items() if len(set(map(launch_of, mine))) > 1]
    # Agents still report a launch that has just ended: only ranks that train count. There is rarely one to decode.
    training = defaultdict(set)
    ranks_of = select(AgentView.job, AgentView.attempt, AgentView.agent, AgentView.ranks)
    owners = {job: _owners(connection, job, attempts[job]) for job in several}
    for job, attempt, agent, ranks in connection.execute(ranks_of.where(*live, AgentView.job.in_(several))):
        if owners[job] and agent not in owners[job]:
            continue  # it may say that it is of any attempt
        if any(rank.state in ("running", "held") for rank in _RANKS.decode(ranks)):
            training[job].add(launch_of(attempt))
    return {job: sorted(mine) for job, mine in training.items() if len(mine) > 1}


def superseded(connection: Connection, training: Training, k: int, since_unix_ns: int) -> bool:
    """Whether agents have reported since `since_unix_ns` a newer launch, or a rollback number of this one above `k`.

    A launch is newer once stream has accepted it.
    """
    job, launch = training.job, launch_of(training.attempt)
    number = _number(connection, job, launch)
    agents = set(training.agents.values())
    for attempt, agent in _reported(connection, job, since_unix_ns):
        if launch_of(attempt) == launch:
            if k_of(attempt) > k and (not agents or agent in agents):
                return True
        # Agents of an older launch may still report how it ended.
        elif _number(connection, job, launch_of(attempt)) > number:
            return True
    return False


def _reported(connection: Connection, job: str, since_unix_ns: int) -> list[tuple[str, str]]:
    """The attempts with a view since then, each with the agents that posted one."""
    mine = (AgentView.job == job, AgentView.at_unix_ns > since_unix_ns)
    rows = connection.execute(select(AgentView.attempt, AgentView.agent).where(*mine).distinct())
    return [(attempt, agent) for attempt, agent in rows]


def read_training(connection: Connection, job: str, attempt: str) -> Training:
    """What is known of an attempt.

    While its own topology is not stored yet, as after a rollback, it is the newest one of its launch.
    """
    topologies = _topologies(connection, job, launch_of(attempt))
    topology: dict[str, Any] = topologies.get(attempt) or next(reversed(topologies.values()), {})
    declared = select(func.max(Attempt.world_size)).where(Attempt.job == job, Attempt.attempt.in_(topologies))
    hosts, groups = defaultdict(list), defaultdict(list)
    for rank in topology.get("ranks", ()):
        hosts[rank["host"]].append(rank["rank"])
        groups[tuple(rank[axis] for axis in ("tp", "pp", "cp", "ep"))].append(rank["rank"])
    replicas = groups.values() if topology.get("replicated") else topology.get("shared_slices", ())
    return Training(
        job,
        attempt,
        {host: tuple(ranks) for host, ranks in hosts.items()},
        _agents({attempt: topology}),
        frozenset(topology.get("can", ())),
        tuple(tuple(group) for group in replicas),
        connection.scalar(select(Job.step_time_s).where(Job.name == job)),
        connection.scalar(declared) or 0,
    )


def checkpoints(connection: Connection, job: str) -> list[LedgerEntry]:
    """The job's ledger as stored, oldest checkpoint first."""
    rows = connection.execute(
        select(Checkpoint.__table__).where(Checkpoint.job == job).order_by(Checkpoint.saved_unix_ns)
    )
    return [checkpoint_of(row) for row in rows.mappings()]


def _topologies(connection: Connection, job: str, launch: str) -> dict[str, dict[str, Any]]:
    """The stored topologies of a launch by attempt, oldest first."""
    rows = connection.execute(
        select(Attempt.attempt, Attempt.topology)
        .where(Attempt.job == job, Attempt.attempt.startswith(f"{launch}.", autoescape=True))
        .order_by(Attempt.number)
    )
    # The prefix alone also finds launches whose name begins like this one: "a." that of "a.b.0".
    return {name: topology for name, topology in rows if launch_of(name) == launch}


def _agents(topologies: Mapping[str, Mapping[str, Any]]) -> dict[int, str]:
    """The agents in these topologies, the last of which counts, by rank."""
    ranks = (rank for topology in topologies.values() for rank in topology.get("ranks", ()))
    return {rank["rank"]: rank["agent"] for rank in ranks if rank.get("agent")}


def _owners(connection: Connection, job: str, attempts: Iterable[str]) -> set[str]:
    """The agents that carry ranks of any of these attempts, or of the job's newest one."""
    newest = select(Job.attempt).where(Job.name == job).scalar_subquery()
    any_of = Attempt.attempt.in_(attempts) | (Attempt.attempt == newest)
    topologies = connection.scalars(select(Attempt.topology).where(Attempt.job == job, any_of))
    return {agent for topology in topologies for agent in _agents({"": topology}).values()}


def _number(connection: Connection, job: str, launch: str) -> int:
    """The launch's place among the job's launches, from 1; 0 for a launch that stream has not accepted."""
    number = connection.scalar(
        select(Attempt.number)
        .where(Attempt.job == job, Attempt.attempt.startswith(f"{launch}.", autoescape=True))
        .order_by(Attempt.number)
        .limit(1)
    )
    return number or 0


STEP_TIME_S_MIN: Final = 0.001
"""Lower bound of the estimate, so that an order's margin in steps stays finite."""

STILL_S: Final = 3.0
"""If no new step is seen for this long, the time watched so far is taken as the step time."""

PACES_MAX: Final = 256
"""Attempts remembered, each with an open order. A full map is emptied; the estimates then begin again."""


class Paces:
    """Remembers the first view of each attempt, and compares later ones with it."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, str], tuple[int, int]] = {}

    def step_time_s(self, training: Training, views: Mapping[str, HostView]) -> float | None:
        """Seconds per step: as stream measured it, else as the views show it; None until they do."""
        if training.step_time_s:
            return max(training.step_time_s, STEP_TIME_S_MIN)
        newest = [(view.at_unix_ns, rank.step) for view in views.values() for rank in view.ranks]
        if not newest:
            return None
        at_unix_ns, step = max(at for at, _ in newest), max(step for _, step in newest)
        if len(self._first) >= PACES_MAX:
            self._first.clear()
        first_unix_ns, first_step = self._first.setdefault((training.job, training.attempt), (at_unix_ns, step))
        watched_s = (at_unix_ns - first_unix_ns) / 1e9
        if step > first_step:
            return max(watched_s / (step - first_step), STEP_TIME_S_MIN)
        return watched_s if watched_s >= STILL_S else None
