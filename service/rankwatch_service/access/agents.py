"""Enrolled agents: one for each job and host, with a secret that signs everything between it and the service.

A host is who has its key, not who has its name. The first agent of a host gets the key; others that show it get an id
that begins alike. Who does not is on another host of this name, with a record of its own, unless nobody of the project
reports under the name any more: then what is on its record goes to who comes.

A secret is derived from the service's key, the job, the host and the agent's id. So it is stored nowhere, every role
can verify a signature without asking another, and it is good for no other job or host. An agent that reports renews the
token of its job.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from hmac import compare_digest
from math import inf
from threading import Lock
from typing import Final

import structlog
from sqlalchemy import Connection, Engine, bindparam, delete, exists, func, insert, select, update

from rankwatch.signed import AGENT_BYTES, HOST_ID_DIGITS, Purpose, Signed, proof_of
from rankwatch.wire import Enrolled
from rankwatch_service.access.budgets import Rate
from rankwatch_service.access.identities import Authenticator, Identity
from rankwatch_service.access.job_filter import in_project, project_of
from rankwatch_service.access.secret_key import SecretKey
from rankwatch_service.access.tokens import renew_token
from rankwatch_service.clock import Clock
from rankwatch_service.store.engine import read, upsert, write
from rankwatch_service.store.errors import StoreError
from rankwatch_service.store.models import Agent, AgentView, HostRecord, SignedJob
from rankwatch_service.store.settings_rows import read_policy

SILENT_NS: Final = 10 * 10**9
"""An agent that has posted no view for this long gives its place to another; agents post one every second."""

HOST_FREE_NS: Final = 60 * 10**9
"""After so long without an agent under the name of a host, who comes without its key has the name's record. The time
includes a restart of this process, in which nobody could report."""

AGENTS_MAX: Final = 131_072
"""Agents that a token admits at a time if it does not say how many: one for each rank of the largest job."""

ENROLMENTS_MAX: Final = 1_024
"""Agents that enrol by one token at once, or as many as it admits at a time if that is more; as many more in
`ENROLMENTS_S`."""

ENROLMENTS_S: Final = 60.0

LEAVE_PART: Final = 64
"""One in so many agents of a full token leaves at once if it is silent: to find them is a query over all."""

SECRETS_MAX: Final = 65_536
"""Derived secrets that are kept, about 20 MB; deriving one again takes 3 us."""

CACHE_S: Final = 1.0
"""How long it is remembered that an agent is enrolled, or that a job has agents: as long as a valid token."""

CACHE_MAX: Final = 65_536
"""Agents and jobs in the cache. A full cache is emptied; each then costs one query again."""


class FullError(Exception):
    """The token admits no further host now; the message says how many it admits."""


class UnknownAgentError(Exception):
    """No agent of this id is enrolled for this job and host (any more); it should enrol again."""


class ForgedError(Exception):
    """A message is not from the agent that it names, or an unsigned one where agents have enrolled."""

    def __init__(self, what: str, agent: str, detail: str) -> None:
        super().__init__(detail)
        self.what = what
        """signature or unsigned."""
        self.agent = agent


@dataclass(frozen=True, slots=True)
class Origin:
    """The sender of a message, as far as the message names it."""

    job: str
    host: str


@dataclass(frozen=True, slots=True)
class HostProof:
    """Proof of the host that an agent is on: `signed.proof_of` its job and host by the key of the host."""

    host_id: str
    nonce: str
    proof: str


class AgentSecrets:
    """The secrets of all agents. Thread-safe."""

    def __init__(self, key: SecretKey) -> None:
        self._derive = lru_cache(SECRETS_MAX)(lambda job, host, agent: key.derive(f"agent/{agent}/{host}/{job}"))
        self._key = key

    def __call__(self, job: str, host: str, agent: str) -> bytes:
        """The secret of an agent, 32 bytes. Names hold no slash, so no two agents have the same."""
        return self._derive(job, host, agent)

    def of_host(self, name: str, host_id: str) -> bytes:
        """The key of the host of this id under this name, 32 bytes."""
        return self._key.derive(f"host/{host_id}/{name}")


class Agents:
    """Enrols agents and recognizes their messages. Thread-safe."""

    def __init__(self, engine: Engine, secrets_of: AgentSecrets, clock: Clock) -> None:
        """Do no I/O yet."""
        self._began_unix_ns = clock.unix_ns()
        self.secrets_of = secrets_of
        self._engine = engine
        self._clock = clock
        self._cache: dict[tuple[str, ...], tuple[float, bool]] = {}
        self._until = (-inf, inf)
        self._lock = Lock()

    def enrol(self, origin: Origin, token_id: str, hosts_max: int | None, claimed: HostProof | None = None) -> Enrolled:
        """Issue an identity to an agent.

        Args:
            origin: the job and the host that it speaks for.
            token_id: by which it asked.
            hosts_max: how many agents this token admits at a time; None: `AGENTS_MAX`.
            claimed: of an agent before it on its host; None, or one that is not right: it counts as another host.

        Raises:
            FullError: as many are enrolled and not silent.
        """
        now = self._clock.unix_ns()
        host_id = claimed.host_id if claimed and self._is_right(claimed, origin) else ""
        with write(self._engine) as connection:
            _make_room(connection, token_id, AGENTS_MAX if hosts_max is None else hosts_max, now)
            if not host_id:
                host_id = self._new_host(connection, origin, now)
            agent = host_id + secrets.token_hex(AGENT_BYTES)[HOST_ID_DIGITS:]
            row = {"id": agent, "job": origin.job, "host": origin.host, "token_id": token_id, "enrolled_unix_ns": now}
            connection.execute(insert(Agent).values(**row))
            signed = {"job": origin.job, "enrolled_unix_ns": now}
            connection.execute(upsert(connection, SignedJob, ("enrolled_unix_ns",)), signed)
        with self._lock:
            self._cache.pop((origin.job,), None)
        host_key = self.secrets_of.of_host(origin.host, host_id).hex()
        return Enrolled(agent, self.secrets_of(origin.job, origin.host, agent).hex(), host_key=host_key)

    def _is_right(self, claimed: HostProof, origin: Origin) -> bool:
        key = self.secrets_of.of_host(origin.host, claimed.host_id)
        return compare_digest(claimed.proof, proof_of(key, claimed.nonce, origin.job, origin.host))

    def _new_host(self, connection: Connection, origin: Origin, now_unix_ns: int) -> str:
        """The id of a host that nobody has; it gets the record of its name if nobody of the project reports under it.

        In the first `HOST_FREE_NS` of this process whoever is known counts as reporting.
        """
        project = project_of(connection, origin.job).project
        same = (Agent.host == origin.host) & in_project(Agent.job, project)
        since = now_unix_ns - HOST_FREE_NS if now_unix_ns - self._began_unix_ns >= HOST_FREE_NS else 0
        heard = exists().where(AgentView.agent == Agent.id, AgentView.at_unix_ns >= since)
        reports = select(exists().where(same, heard | (Agent.enrolled_unix_ns >= since)))
        host_id = ""
        while not host_id or connection.scalar(
            select(exists().where(Agent.host == origin.host, Agent.id.startswith(host_id)))
        ):
            host_id = secrets.token_hex(AGENT_BYTES)[:HOST_ID_DIGITS]
        if not connection.scalar(reports):
            own = (HostRecord.host == origin.host) & (HostRecord.host_id != "") & in_project(HostRecord.job, project)
            connection.execute(update(HostRecord).where(own).values(host_id=host_id))
        return host_id

    def verify(self, signed: Signed | None, purpose: Purpose, origin: Origin) -> str:
        """The agent that a message is from.

        Args:
            signed: the parts of the message; None: it is not signed.
            purpose: what it was sent for.
            origin: the sender that the message names.

        Returns:
            Its id; empty for an unsigned message of a job in which no agent has enrolled.

        Raises:
            UnknownAgentError: no such agent is enrolled.
            ForgedError: somebody else sent it.
        """
        if signed is None:
            if self._is_known(origin.job):
                detail = f"agents of job {origin.job!r} have enrolled, so its messages must be signed"
                raise ForgedError("unsigned", "", detail)
            if self._clock.unix_ns() >= self._unsigned_until_unix_ns():
                detail = "unsigned telemetry is not accepted any more: install this version of rankwatch on this host"
                raise ForgedError("unsigned", "", detail)
            return ""
        if not self._is_known(origin.job, origin.host, signed.agent):
            raise UnknownAgentError
        if not signed.is_by(self.secrets_of(origin.job, origin.host, signed.agent), purpose):
            raise ForgedError("signature", signed.agent, f"the signature is not that of agent {signed.agent}")
        return signed.agent

    def _unsigned_until_unix_ns(self) -> float:
        now_s = self._clock.monotonic_s()
        if now_s - self._until[0] > CACHE_S:
            with read(self._engine) as connection:
                until = read_policy(connection).unsigned_until_unix_ns
            self._until = (now_s, inf if until is None else until)
        return self._until[1]

    def _is_known(self, *key: str) -> bool:
        """Whether agents of (job,), or (job, host, agent), have enrolled: one query, unless it was asked just now."""
        # Without the lock: a look-up in a dict is atomic.
        entry = self._cache.get(key)
        now_s = self._clock.monotonic_s()
        if entry is not None and now_s - entry[0] <= CACHE_S:
            return entry[1]
        with read(self._engine) as connection:
            found = bool(connection.scalar(_KNOWN[len(key)], dict(zip(("job", "host", "id"), key, strict=False))))
        with self._lock:
            if len(self._cache) >= CACHE_MAX:
                self._cache.clear()
            self._cache[key] = (now_s, found)
        return found


_KNOWN: Final = {
    len(columns): select(exists().where(*(column == bindparam(column.key) for column in columns)))
    for columns in ((SignedJob.job,), (Agent.job, Agent.host, Agent.id))
}
"""Queries of `Agents._is_known`, by the length of its key. Built once: a statement refers to itself, so that only a
garbage collection frees it."""


def jobs_with_agents(connection: Connection, jobs: Collection[str]) -> set[str]:
    """The jobs, of these, for which an agent has enrolled."""
    return set(connection.scalars(select(SignedJob.job).where(SignedJob.job.in_(jobs))))


def enrolments(hosts_max: int | None) -> Rate:
    """The rate limit of enrolments with a token for at most `hosts_max` hosts."""
    return Rate("enrolments", max(ENROLMENTS_MAX, hosts_max or 0), ENROLMENTS_S)


def _make_room(connection: Connection, token_id: str, most: int, now_unix_ns: int) -> None:
    """Remove silent agents of a token that admits no more, oldest first, and of very many some more at once.

    Raises:
        FullError: those that are left are not silent.
    """
    mine = Agent.token_id == token_id
    if (connection.scalar(select(func.count()).select_from(Agent).where(mine)) or 0) < most:
        return
    heard = select(func.max(AgentView.at_unix_ns)).where(AgentView.agent == Agent.id).scalar_subquery()
    newest = func.coalesce(heard, Agent.enrolled_unix_ns)
    admitted = connection.execute(select(Agent.id, newest).where(mine).order_by(newest)).all()
    silent = [agent for agent, heard_unix_ns in admitted if heard_unix_ns < now_unix_ns - SILENT_NS]
    leave = silent[: max(len(admitted) + 1 - most, len(admitted) // LEAVE_PART)]
    if len(admitted) - len(leave) >= most:
        raise FullError(
            f"this token admits {most} hosts at a time, and as many report; "
            f"another enters {SILENT_NS // 10**9} s after one has ended or fallen silent"
        )
    connection.execute(delete(Agent).where(Agent.id.in_(leave)))


PAUSE_S: Final = 60.0
"""Time between two tries to renew one token: all its agents ask for it at the same moment."""

TRIED_MAX: Final = 4_096
"""Tokens of which the last try is remembered: as many as the authenticator remembers."""

_log = structlog.get_logger(__name__)


class Renewals:
    """The renewals of this process. Thread-safe."""

    def __init__(self, engine: Engine, authenticator: Authenticator, clock: Clock) -> None:
        """Do no I/O yet."""
        self._engine = engine
        self._authenticator = authenticator
        self._clock = clock
        self._tried_s: dict[str, float] = {}
        self._lock = Lock()

    def reported(self, identity: Identity) -> None:
        """Renew the token with which an enrolled agent has just reported, if less than half its lifetime is left.

        A failure of the database is logged: the agent's message does not depend on this, and the next one tries again.
        """
        if identity.lasts_ns is None or identity.expires_unix_ns is None:
            return
        now = self._clock.unix_ns()
        if 2 * (identity.expires_unix_ns - now) >= identity.lasts_ns or not self._may_try(identity.id):
            return
        try:
            with write(self._engine) as connection:
                renewed = renew_token(connection, identity.id, identity.actor, identity.expires_unix_ns, now)
        except StoreError as error:
            _log.warning("token_not_renewed", token=identity.id, reason=str(error))
            return
        if renewed:
            self._authenticator.clear_cache()

    def _may_try(self, token_id: str) -> bool:
        now_s = self._clock.monotonic_s()
        with self._lock:
            last_s = self._tried_s.get(token_id)
            if last_s is not None and now_s - last_s < PAUSE_S:
                return False
            if len(self._tried_s) >= TRIED_MAX:
                self._tried_s.clear()
            self._tried_s[token_id] = now_s
            return True
