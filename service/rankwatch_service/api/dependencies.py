"""What routes depend on: the parts of the application, filters, preconditions, signatures and event streams."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Hashable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from math import ceil
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from fastapi import Depends, Header, Query, Request, Response
from pydantic import AfterValidator, BaseModel
from sqlalchemy import Connection, Engine, Select, delete, func, insert, select
from starlette.concurrency import run_in_threadpool

from rankwatch.signed import Purpose, Signed, code_of
from rankwatch.wire import SignedOrders
from rankwatch_service.access.agents import Agents, ForgedError, Origin, Renewals, UnknownAgentError
from rankwatch_service.access.budgets import STREAMS, Budgets, Rate, account_of
from rankwatch_service.access.grants import Scope
from rankwatch_service.access.identities import Authenticator, Identity
from rankwatch_service.access.oidc_provider import OidcProvider
from rankwatch_service.access.refusals import Refusals
from rankwatch_service.access.secret_key import SecretKey
from rankwatch_service.api.background.change_feed import ChangeFeed, FeedTail
from rankwatch_service.api.background.counters import Counters
from rankwatch_service.api.background.driver_thread import DriverThread
from rankwatch_service.api.background.health_facts import HealthReader
from rankwatch_service.api.background.housekeeping import REPLY_NS
from rankwatch_service.api.background.order_cache import OrderCache
from rankwatch_service.api.background.order_feed import OrderFeed
from rankwatch_service.api.http.gate import presented_token, source_of
from rankwatch_service.api.http.paging import CursorSigner, Key, Time, any_of, full_ids
from rankwatch_service.api.http.problem import RETRY_AFTER_S, ProblemError
from rankwatch_service.api.ingest import Batcher, Forgeries, Intake, NewJobs
from rankwatch_service.clock import Clock
from rankwatch_service.log.control_log import ControlLog
from rankwatch_service.names import ALL_JOBS, is_name
from rankwatch_service.orders import commands
from rankwatch_service.orders.running_attempt import ReceivedView, ViewSizes
from rankwatch_service.policy.actions import Action
from rankwatch_service.policy.control_records import JobOwnership
from rankwatch_service.settings import Settings
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Command, IdempotentReply, Incident

Value = TypeVar("Value")


class SingleFlight:
    """Makes one read at a time. A request gets the value of a read that began after the request came, so that nobody is
    given less than was committed before; all that came meanwhile with the same key share it. Holds nothing between.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._guard = threading.Lock()
        self._waiting: dict[Hashable, Future[Any]] = {}
        """Reads that have not begun, by key."""

    def read(self, key: Hashable, read: Callable[[], Value]) -> Value:
        """The value of the next read of this key; blocks until it is made, and raises its error."""
        with self._guard:
            leads = key not in self._waiting
            shared: Future[Value] = self._waiting.setdefault(key, Future())
        if leads:
            with self._turn:
                with self._guard:
                    del self._waiting[key]
                try:
                    shared.set_result(read())
                except Exception as error:  # noqa: BLE001 - each of those that share it raises it
                    shared.set_exception(error)
        return shared.result()


@dataclass(frozen=True)
class Context:
    """Created once by `create_app`."""

    settings: Settings
    engine: Engine
    controls: ControlLog
    clock: Clock
    authenticator: Authenticator
    refusals: Refusals
    secret_key: SecretKey
    budgets: Budgets
    new_jobs: NewJobs
    cursors: CursorSigner
    changes: ChangeFeed
    tail: FeedTail
    orders: OrderCache
    order_feed: OrderFeed
    intake: Intake
    views: Batcher[ReceivedView]
    view_sizes: ViewSizes
    counters: Counters
    driver: DriverThread
    agents: Agents
    forgeries: Forgeries
    renewals: Renewals
    health: HealthReader
    provider: OidcProvider | None
    """OIDC provider for logins; None: people log in with tokens only."""
    totals: SingleFlight = field(default_factory=SingleFlight)
    """Shared reads of the totals of incidents and jobs, which all open pages request at once."""
    listening: dict[str, EventStream] = field(default_factory=dict)
    """The order stream of each agent."""

    def signed_orders(self, origin: Origin, agent: str, nonce: str, orders: bytes, sequence: int) -> bytes:
        """Orders for one agent, signed with its secret: `wire.SignedOrders` as JSON."""
        reported = SignedOrders(orders.decode(), nonce, sequence, self.clock.unix_ns())
        secret = self.agents.secrets_of(origin.job, origin.host, agent)
        code = code_of(Purpose.ORDERS, agent, secret, reported.signed_part()).hex()
        return msgspec.json.encode(msgspec.structs.replace(reported, code=code))


async def _context(request: Request) -> Context:  # not in a thread, as all that does not wait
    context: Context = request.app.state.context
    return context


Ctx = Annotated[Context, Depends(_context)]


def _is_name(text: str) -> str:
    if text and not is_name(text):
        raise ValueError("this is not a valid name")
    return text


NameOrNone = Annotated[str, AfterValidator(_is_name)]
"""A name, or an empty text."""

CommandOrder = Literal["newest", "oldest", "changed"]
CHANGED: Final = func.coalesce(Command.finished_unix_ns, Command.applied_unix_ns, Command.requested_unix_ns)
ORDERS: Final[dict[CommandOrder, tuple[Key, ...]]] = {
    "newest": (Command.requested_unix_ns, Command.id),
    "oldest": ((-Command.requested_unix_ns).label("oldest"), Command.id),
    "changed": (CHANGED.label("changed"), Command.id),
}
"""Keys of each order, all descending."""
ORDERS_MEAN: Final = "newest, oldest: by request; changed: requested, applied or finished last comes first"


OtherAction = Literal["stacks", "set_approvals", "make_token"]
"""What commands can be besides those that people request of a job."""


class CommandFilters:
    """The filters of a request. All must match; one that is given several times matches each of its values."""

    def __init__(
        self,
        context: Ctx,
        job: Annotated[list[str] | None, Query()] = None,
        state: Annotated[list[str] | None, Query()] = None,
        incident: Annotated[list[str] | None, Query()] = None,
        waiting: Annotated[bool, Query(description="Only those that wait for an approval")] = False,
        action: Annotated[list[Action | OtherAction] | None, Query()] = None,
        attempt: Annotated[list[str] | None, Query()] = None,
        from_unix_ns: Time = None,
        to_unix_ns: Time = None,
    ) -> None:
        """`from_unix_ns` and `to_unix_ns` are ends of a range in which commands were requested."""
        self._now = context.clock.unix_ns
        self._incidents = incident
        self._waiting = waiting
        self._columns = {Command.job: job, Command.state: state, Command.action: action, Command.attempt: attempt}
        self._from, self._to = from_unix_ns, to_unix_ns
        self.purpose = str([job, state, incident, waiting, action, attempt, from_unix_ns, to_unix_ns])
        """Names the filters, for cursors."""

    def apply(self, query: Select[Any], connection: Connection, identity: Identity) -> Select[Any]:
        """Restrict a query of commands to those that match and that the identity may see.

        Raises:
            ProblemError: the id of an incident is a prefix of several.
        """
        query = query.where(identity.jobs.clause(Command.job))
        if not identity.jobs.every:
            query = query.where(Command.job != ALL_JOBS)
        for column, values in self._columns.items():
            query = any_of(query, column, values)
        query = any_of(query, Command.incident_id, full_ids(connection, Incident, self._incidents, identity))
        if self._waiting:
            query = query.where(commands.waits_for_approval(self._now()))
        if self._from is not None:
            query = query.where(Command.requested_unix_ns >= self._from)
        if self._to is not None:
            query = query.where(Command.requested_unix_ns < self._to)
        return query


CommandFiltersDep = Annotated[CommandFilters, Depends()]

IF_MATCH_CHARS_MAX: Final = 1_000
TAG_CHARS: Final = 32

Content = TypeVar("Content", bound=BaseModel)


def entity_tag(content: BaseModel) -> str:
    """The ETag of what a reader is shown: equal for equal content."""
    return f'"{sha256(content.model_dump_json().encode()).hexdigest()[:TAG_CHARS]}"'


class Precondition:
    """Gives readers the ETag, and refuses a write that was made for another one."""

    def __init__(
        self,
        response: Response,
        if_match: Annotated[
            str | None, Header(max_length=IF_MATCH_CHARS_MAX, description="ETag of what was read")
        ] = None,
    ) -> None:
        self._response = response
        self._wanted = None if if_match is None else {one.strip() for one in if_match.split(",")}

    def show(self, content: Content, editable: BaseModel | None = None) -> Content:
        """The content, after the ETag has been added to the response.

        Args:
            content: what the reader is shown.
            editable: the part of it that people edit, which the ETag is about; None: all of it.
        """
        self._response.headers["ETag"] = entity_tag(editable or content)
        return content

    def check(self, current: BaseModel) -> None:
        """Call it in the transaction of the write, before it.

        Raises:
            ProblemError: 412, the client has read something else.
        """
        if self._wanted is not None and not self._wanted & {"*", entity_tag(current)}:
            raise ProblemError(412, "somebody has changed it since it was read; read it again, then repeat the change")


PreconditionDep = Annotated[Precondition, Depends()]

KEY_CHARS_MAX: Final = 200
JSON: Final = "application/json"


class Idempotency:
    """Carries out the write of a request in one transaction, at most once for each key of a token."""

    def __init__(
        self,
        request: Request,
        context: Ctx,
        idempotency_key: Annotated[str | None, Header(max_length=KEY_CHARS_MAX)] = None,
    ) -> None:
        self._request = request
        self._context = context
        self.key = idempotency_key
        self.source = request.client.host if request.client else ""
        """The client's address, for the audit trail."""

    def write(
        self, identity: Identity, body: BaseModel | None, status: int, work: Callable[[Connection], BaseModel]
    ) -> Response:
        """Run `work` in a write transaction and reply with what it returns.

        Args:
            identity: who sends the request; each token has its own keys.
            body: of the request; a key that is reused with another body is refused.
            status: of the reply.
            work: does the write and returns the content of the reply.

        Raises:
            ProblemError: the key was used for another request (422), or `work` raised it; nothing is stored then.
        """
        content = body.model_dump_json() if body is not None else ""
        request = f"{self._request.method} {self._request.url.path}\n{content}"
        digest = sha256(request.encode()).hexdigest()
        now = self._context.clock.unix_ns()
        with write(self._context.engine) as connection:
            if self.key is None:
                return Response(work(connection).model_dump_json(), status, media_type=JSON)
            mine = (IdempotentReply.token_id == identity.id) & (IdempotentReply.key == self.key)
            stored = connection.execute(select(IdempotentReply.__table__).where(mine)).one_or_none()
            if stored is not None and now - stored.at_unix_ns < REPLY_NS:
                if stored.request_sha256 != digest:
                    raise ProblemError(422, "this Idempotency-Key has already been used for another request")
                reply = self._context.secret_key.decrypt(stored.body.decode())
                return Response(reply, stored.status, {"Idempotent-Replay": "true"}, JSON)
            reply = work(connection).model_dump_json()
            encrypted = self._context.secret_key.encrypt(reply).encode()  # it may hold a receiver's secret
            connection.execute(delete(IdempotentReply).where(mine))
            connection.execute(
                insert(IdempotentReply).values(
                    token_id=identity.id,
                    key=self.key,
                    request_sha256=digest,
                    status=status,
                    body=encrypted,
                    at_unix_ns=now,
                )
            )
            return Response(reply, status, media_type=JSON)


IdempotencyDep = Annotated[Idempotency, Depends()]

CHECK_S: Final = 10.0
"""How often the token of an open stream is checked again."""


class EventStream:
    """One open stream of an account."""

    def __init__(self, context: Context, request: Request) -> None:
        self._context = context
        self._account = account_of(request.scope["identity"])
        self._token, _ = presented_token(request.headers)
        self._checked_s = context.clock.monotonic_s()
        self._connection = request.scope.get("state", {}).get("connection")
        self.has_ended = False

    @property
    def is_idle(self) -> bool:
        """Whether it waits for its reader."""
        return self._connection is not None and self._connection.is_idle

    def open(self) -> None:
        """Reserve a stream of the account; `close` releases it.

        Raises:
            ProblemError: the account has its part (503).
        """
        gone = self._context.budgets.reserve(STREAMS, self._account, self)
        if gone is self:
            detail = "too many event streams are open"
            raise ProblemError(503, detail, headers={"Retry-After": str(RETRY_AFTER_S)})
        if gone is not None:
            gone.end()

    def close(self) -> None:
        """The response is over."""
        self.has_ended = True
        self._context.budgets.release(STREAMS, self)

    def end(self) -> None:
        """End this stream in favour of another one."""
        self.close()
        if self._connection is not None:
            self._connection.cut_off()

    async def still_allowed(self) -> bool:
        """Whether nobody has ended it, and the token that opened it is valid, which is looked up every `CHECK_S`."""
        now_s = self._context.clock.monotonic_s()
        if now_s - self._checked_s < CHECK_S:
            return not self.has_ended
        self._checked_s = now_s
        authenticator = self._context.authenticator
        if authenticator.cached(self._token) is None:  # the agents of a job have one token, and use it all the time
            return await run_in_threadpool(authenticator.authenticate, self._token) is not None
        return not self.has_ended


@asynccontextmanager
async def opened_stream(context: Context, request: Request) -> AsyncIterator[EventStream]:
    """A stream that counts for the account of the request until the response is over.

    Raises:
        ProblemError: see `EventStream.open`.
    """
    stream = EventStream(context, request)
    stream.open()
    try:
        yield stream
    finally:
        stream.close()


async def _event_stream(context: Ctx, request: Request) -> AsyncIterator[EventStream]:
    async with opened_stream(context, request) as stream:
        yield stream


EventStreamDep = Annotated[EventStream, Depends(_event_stream)]


def require_job(identity: Identity, job: str) -> None:
    """Refuse an agent whose token is not for this job. May query.

    Raises:
        ProblemError: it is not (403).
    """
    if not identity.may_send(job):
        raise ProblemError(403, f"this token is restricted to {identity.jobs}")


def spend(context: Context, identity: Identity, rate: Rate, amount: float) -> None:
    """Use up an amount of what the account of a token has.

    Raises:
        ProblemError: it has less now (429).
    """
    if wait_s := context.budgets.spend(rate, account_of(identity), amount):
        most = f"{rate.most:,.0f} in {rate.period_s:,.0f} s"
        detail = f"token {identity.name!r} has used up its {rate.what}: {most}; try again later"
        raise ProblemError(429, detail, headers={"Retry-After": str(ceil(wait_s))})


def begin_job(context: Context, request: Request, identity: Identity, job: str) -> None:
    """Assign the project and owner of a token to a job that begins with it. May write.

    Raises:
        ProblemError: it has begun in another project meanwhile, to which the token is no access (403).
    """
    if identity.project or identity.owner:
        whose = JobOwnership(job, identity.project, identity.owner)
        context.authenticator.projects.begin(whose, context.controls, identity.actor, source_of(request.scope))
        require_job(identity, job)


def verified(
    context: Context, request: Request, identity: Identity, signed: Signed | None, purpose: Purpose, origin: Origin
) -> str:
    """The id of the agent that sent a message; empty for an unsigned one where no agent has enrolled. May query.

    An agent that is known renews its token.

    Raises:
        ProblemError: the agent should enrol again (409); its token is not for this job, or somebody else sent the
            message (403).
    """
    require_job(identity, origin.job)
    try:
        agent = context.agents.verify(signed, purpose, origin)
    except UnknownAgentError as error:
        detail = f"no such agent is enrolled for job {origin.job!r} on host {origin.host!r}; enrol again"
        raise ProblemError(409, detail) from error
    except ForgedError as error:
        context.counters.forged.labels(error.what).inc()
        context.forgeries.add(origin, error, source_of(request.scope))
        raise ProblemError(403, str(error)) from error
    if agent:
        context.renewals.reported(request.scope["identity"])
    return agent


class Require:
    """Dependency of a route: returns the request's identity, which must hold a scope."""

    def __init__(self, scope: Scope, *, every_job: bool = False) -> None:
        """Check nothing yet.

        Args:
            scope: what the identity must hold.
            every_job: whether a token that is restricted to some jobs is refused, since the route serves no single job.
        """
        self.scope = scope
        self.every_job = every_job

    async def __call__(self, request: Request) -> Identity:
        """The identity of a request, with the jobs in which it holds the scope.

        Raises:
            ProblemError: no identity (401), not the scope (403), or not this job (403, or 404 as for an unknown job).
        """
        identity: Identity | None = request.scope.get("identity")
        if identity is None:
            raise ProblemError(401, "a token is required", headers={"WWW-Authenticate": "Bearer"})
        holder = identity.within(self.scope)
        if holder is None:
            raise ProblemError(403, f"a token with scope {self.scope} is required")
        if self.every_job and not holder.jobs.every:
            raise ProblemError(403, f"this token is restricted to {holder.jobs}")
        job = request.path_params.get("job")
        if job is not None and not await run_in_threadpool(holder.may_see, job):
            reader = identity.within(Scope.READ)
            if reader is not None and await run_in_threadpool(reader.may_see, job):
                raise ProblemError(403, f"scope {self.scope} is required in job {job!r}")
            raise ProblemError(404, f"there is no job {job!r}")
        return holder
