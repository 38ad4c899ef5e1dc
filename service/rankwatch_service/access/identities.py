"""The identity behind a token, and the part of the service that finds it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from hmac import compare_digest
from threading import Lock
from typing import Final, TypeVar

from sqlalchemy import Engine, select, update

from rankwatch_service.access.grants import GroupGrant, Scope
from rankwatch_service.access.job_filter import JobFilter, JobProjects
from rankwatch_service.access.tokens import LOCAL_NAME, LOGIN_NAME, digest, split_token, token_state
from rankwatch_service.clock import Clock
from rankwatch_service.store.engine import read, write_aside
from rankwatch_service.store.models import Token

CACHE_S: Final = 1.0
"""How long a valid token stays in the cache. A token revoked by another process is refused at most this much later."""

CACHE_MAX: Final = 4_096
"""Tokens in the cache, about 1 MB. A full cache is emptied; each token then costs one query again."""

KNOWN_MAX: Final = 16_384
"""Tokens that were valid some time, about 2 MB; the ones that were valid first make room."""

ENDED_S: Final = 10.0
"""How long it is remembered that a token has ended, so that whoever goes on sending it costs no query."""

LAST_USED_EVERY_NS: Final = 300 * 10**9
"""Resolution of `last_used_unix_ns`: a write for each request would cost more than the request."""


_Entry = TypeVar("_Entry")


@dataclass(frozen=True, slots=True)
class Identity:
    """Who sent a request."""

    id: str
    kind: str
    name: str
    scopes: frozenset[str]
    jobs: JobFilter
    """Those that it may access."""
    expires_unix_ns: int | None
    hosts_max: int | None = None
    """How many agents it admits at a time; None: `AGENTS_MAX`."""
    loopback: bool = False
    """Whether it is valid only on the machine of the service."""
    enrolment_key: bytes = field(default=b"", repr=False)
    """By which the service proves to agents that it has issued the token."""
    lasts_ns: int | None = None
    """By how much its expiry moves on while enrolled agents report with it; None: it does not."""
    subject: str = ""
    """Whom the OIDC provider knows by this; empty: who uses a token."""
    grants: tuple[GroupGrant, ...] = ()
    """Where several groups allow different things: what each of them does. Otherwise `scopes` hold in `jobs`."""
    project: str = ""
    """What jobs that begin by it get; empty: nothing. The same for owner."""
    owner: str = ""
    makers: tuple[str, ...] = ()
    """The actor that made its token, the actor that made that one's token, and so on."""
    by_cookie: bool = False

    @property
    def actor(self) -> str:
        """Its name in the audit trail."""
        return f"{self.name} ({self.id})"

    @property
    def person(self) -> str:
        """The person, whatever token or session they use: tokens of the same name belong to one person.

        What `rankwatch up` issues on its machine is used by whoever started it.
        """
        if self.subject:
            return self.subject
        return LOCAL_NAME if self.name == LOGIN_NAME else self.name.strip().casefold()

    def holds(self, scope: Scope) -> bool:
        """Whether its token grants this scope."""
        return scope in self.scopes or Scope.ADMIN in self.scopes

    def within(self, scope: Scope) -> Identity | None:
        """This identity with those of its jobs in which it holds a scope; None if it does in none."""
        if not self.grants:
            return self if self.holds(scope) else None
        holding = [grant.jobs for grant in self.grants if grant.holds(scope)]
        return replace(self, jobs=JobFilter.any_of(holding)) if holding else None

    def has_requested(self, requester: str, requested_by: str) -> bool:
        """Whether this person, by whatever token or session, requested a command with these two columns."""
        name = requested_by.rpartition(" (")[0]
        return requester == self.person or (requester != "" and name.strip().casefold() == self.name.strip().casefold())

    def may_see(self, job: str) -> bool:
        """Whether it may access this job."""
        return self.jobs.includes(job)

    def may_send(self, job: str) -> bool:
        """Whether it may send telemetry of this job, which may be a new one."""
        return self.jobs.admits(job)


class Authenticator:
    """Finds the identity behind a token, with a short-lived cache. Thread-safe."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        """Do no I/O yet."""
        self.projects = JobProjects(engine, clock)
        self._engine = engine
        self._clock = clock
        self._cache: dict[str, tuple[float, Identity]] = {}
        self._known: dict[str, None] = {}
        self._ended: dict[str, tuple[float, str]] = {}
        self._last_used: dict[str, int] = {}
        self._lock = Lock()

    def cached(self, text: str) -> Identity | None:
        """The identity of a token that was valid less than `CACHE_S` ago; does no I/O."""
        # Without the lock: a look-up in a dict is atomic.
        entry = self._cache.get(digest(text))
        if entry is None or self._clock.monotonic_s() - entry[0] > CACHE_S:
            return None
        return entry[1]

    def knows(self, text: str) -> bool:
        """Whether this token was valid some time: its holder does not guess. Does no I/O."""
        return digest(text) in self._known

    def ended(self, text: str) -> str:
        """Why a token is not valid now, as a sentence; "" for any other token. Does no I/O.

        It is known for `ENDED_S` after `authenticate` has found it out.
        """
        since_s, why = self._ended.get(digest(text), (0.0, ""))
        return why if why and self._clock.monotonic_s() - since_s <= ENDED_S else ""

    def authenticate(self, text: str) -> Identity | None:
        """The identity of a token; None if it is unknown, revoked, expired or malformed. One query."""
        parts = split_token(text)
        if parts is None:
            return None
        with read(self._engine) as connection:
            row = connection.execute(select(Token.__table__).where(Token.id == parts.id)).one_or_none()
        now = self._clock.unix_ns()
        # Compare even without a row, so that the response time does not reveal which ids exist.
        matches = compare_digest(row.secret_sha256 if row else "", digest(parts.secret))
        if row is None or not matches or row.kind != parts.kind:
            return None
        if why := _why_not_valid(row.revoked, row.admitted, row.expires_unix_ns, now):
            with self._lock:
                _put_last(self._ended, digest(text), (self._clock.monotonic_s(), why), CACHE_MAX)
                _put_last(self._known, digest(text), None, KNOWN_MAX)
            return None
        scopes = frozenset(row.scopes)
        grants = tuple(map(GroupGrant.of, row.grants))
        key = bytes.fromhex(row.enrolment_key)
        whose = (row.person, grants, row.project, row.owner, tuple(row.makers))
        more = (row.hosts_max, row.loopback, key, row.lasts_ns, *whose)
        jobs = JobFilter.any_of(grant.jobs for grant in grants) if grants else JobFilter.of(row.job)
        if row.project and not row.job:  # the token of one job goes on when a person moves the job
            jobs = replace(jobs, project=row.project, project_of=self.projects.project_of)
        identity = Identity(row.id, row.kind, row.name, scopes, jobs, row.expires_unix_ns, *more)
        with self._lock:
            if len(self._cache) >= CACHE_MAX:
                self._cache.clear()
            self._cache[digest(text)] = (self._clock.monotonic_s(), identity)
            _put_last(self._known, digest(text), None, KNOWN_MAX)
            if now - (row.last_used_unix_ns or 0) > LAST_USED_EVERY_NS:
                self._last_used[row.id] = now
        return identity

    def clear_cache(self) -> None:
        """Query every token again; call it after a token was revoked or admitted."""
        with self._lock:
            self._cache.clear()
            self._ended.clear()

    def store_last_used(self) -> None:
        """Write when tokens were last used, for those whose stored time is older than `LAST_USED_EVERY_NS`."""
        with self._lock:
            last_used, self._last_used = self._last_used, {}
        if last_used:
            with write_aside(self._engine) as connection:
                # In the order of their keys, as `write_aside` requires.
                for token_id, at_unix_ns in sorted(last_used.items()):
                    connection.execute(update(Token).where(Token.id == token_id).values(last_used_unix_ns=at_unix_ns))


def _why_not_valid(revoked: bool, admitted: bool, expires_unix_ns: int | None, now_unix_ns: int) -> str:
    """Why a token with the right secret is not valid; "" if it is."""
    match token_state(revoked, admitted, expires_unix_ns, now_unix_ns):
        case "revoked":
            return "this token was revoked"
        case "expired":
            return f"this token expired {(now_unix_ns - (expires_unix_ns or 0)) / 1e9:.0f} s ago"
        case "waiting":
            return "this token waits for the approval of a second person"
    return ""


def _put_last(entries: dict[str, _Entry], key: str, entry: _Entry, most: int) -> None:
    """Set an entry as the newest; the oldest makes room."""
    entries.pop(key, None)
    if len(entries) >= most:
        del entries[next(iter(entries))]
    entries[key] = entry
