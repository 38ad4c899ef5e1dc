"""A hostile process with a token of each scope: all that each can do at once to be in the way of others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing.synchronize import Event
from typing import Any, Final
from urllib.parse import urlencode

import msgspec

from rankwatch import wire
from rankwatch.agent.enrolment import AgentIdentity
from rankwatch.agent.service_connection import MSGPACK
from rankwatch.signed import Purpose
from tests.support.values.batches import batch, progress, table

JSON: Final = "application/json"
WIDE: Final = "wide"
"""The job whose series and incidents are read."""
BATCH_STEPS: Final = 10
FLOOD: Final = 64
"""Connections of a flood."""
HALF_SENT: Final = 1_000
"""Connections of one token that send a byte every `TRICKLE_S`."""
TRICKLE_S: Final = 2.0


class AskingConnection:
    """A kept connection, which asks with one token."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str) -> None:
        self.reader, self.writer, self._token = reader, writer, token

    async def ask(self, method: str, path: str, body: bytes = b"", content_type: str = MSGPACK) -> tuple[int, bytes]:
        """Status and body of the answer."""
        self.writer.write(self.head(method, path, len(body), content_type) + body)
        answer = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        length = answer.partition(b"content-length: ")[2].partition(b"\r")[0]
        return int(answer.split(b" ", 2)[1]), await self.reader.readexactly(int(length or 0))

    def head(self, method: str, path: str, length: int = 0, content_type: str = MSGPACK) -> bytes:
        lines = (
            f"{method} /api/v1/{path} HTTP/1.1" if path[0] != "/" else f"{method} {path} HTTP/1.1",
            "Host: 127.0.0.1",
            f"Authorization: Bearer {self._token.partition('.')[0]}",
            f"Content-Type: {content_type}",
            f"Content-Length: {length}",
        )
        return "".join(f"{line}\r\n" for line in (*lines, "")).encode()

    async def enrol(self, job: str, host: str) -> AgentIdentity:
        asked = wire.EnrolmentRequest(job, host, secrets.token_hex(16))
        status, body = await self.ask("POST", "agents/enrol", msgspec.json.encode(asked), JSON)
        if status != 201:
            raise ConnectionError(f"not enrolled: {status} {body!r}")
        reported = msgspec.json.decode(body, type=wire.Enrolled)
        return AgentIdentity(reported.agent, bytes.fromhex(reported.secret))

    def listen(self, identity: AgentIdentity, job: str, host: str) -> None:
        """Ask for the order stream."""
        signed = identity.sign(Purpose.LISTEN, os.urandom(wire.LISTEN_BYTES)).hex()
        asked = urlencode({"job": job, "host": host, "boot": "b1", "signed": signed})
        self.writer.write(self.head("GET", f"agents/orders?{asked}"))


@contextlib.asynccontextmanager
async def connected(port: int, token: str, **how: Any) -> AsyncIterator[AskingConnection]:
    """A new connection, cut off at the end. `how`: arguments of `asyncio.open_connection`."""
    reader, writer = await asyncio.open_connection(None if how else "127.0.0.1", None if how else port, **how)
    try:
        yield AskingConnection(reader, writer, token)
    finally:
        writer.transport.abort()


def small_batch(job: str, host: int, world_size: int, seq: int) -> bytes:
    """Ten steps of one rank."""
    steps = range(seq * BATCH_STEPS, (seq + 1) * BATCH_STEPS)
    values = {name: [1.0 + random.random() for _ in steps] for name in ("loss", "grad_norm", "busy_s", "step_time_s")}
    fields: dict[str, Any] = {
        "steps": table(steps, [host] * len(steps), **values),
        "progress": (progress(host, steps[-1]),),
    }
    if not seq:
        fields["ranks"] = (wire.RankInfo(host, world_size, 0, f"node-{host}"),)
    return wire.encode(batch(seq, job=job, host=f"node-{host}", sent_unix_ns=time.time_ns(), **fields))


def more_files() -> int:
    """Raise the limit of open files as far as this user may; returns it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


@dataclass(frozen=True)
class HostileTarget:
    """What the hostile process knows."""

    port: int
    tokens: dict[str, str]
    incidents: list[str]


Attack = Callable[[HostileTarget], Awaitable[object]]


async def forever(times: int, attempt: Callable[[], Awaitable[object]]) -> None:
    """So many at a time; each begins again when it has ended."""

    async def one() -> None:
        while True:
            with contextlib.suppress(OSError, EOFError, ValueError):
                await attempt()
            await asyncio.sleep(0.05)

    await asyncio.gather(*(one() for _ in range(times)))


async def flood(
    target: HostileTarget,
    who: str,
    times: int,
    method: str,
    path: str,
    body: Callable[[], bytes] = bytes,
    kind: str = JSON,
) -> None:
    """Ask without a pause on so many connections."""

    async def ask() -> None:
        async with connected(target.port, target.tokens.get(who, who)) as one:
            while True:
                await one.ask(method, path, body(), kind)

    await forever(times, ask)


async def trickle(target: HostileTarget, who: str, head: Callable[[AskingConnection], bytes]) -> None:
    """Never come to an end of what was begun."""

    async def send() -> None:
        async with connected(target.port, target.tokens[who]) as one:
            one.writer.write(head(one))
            while not one.reader.at_eof():
                one.writer.write(b"x")
                await one.writer.drain()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(one.reader.read(1), TRICKLE_S)

    await forever(HALF_SENT, send)


async def heads(target: HostileTarget) -> None:
    await asyncio.gather(*(trickle(target, who, lambda one: one.head("GET", "jobs")[:-2]) for who in target.tokens))


async def bodies(target: HostileTarget) -> None:
    lengths = [60_000] * 9 + [1_000_000]

    def head(one: AskingConnection) -> bytes:
        return one.head("POST", "telemetry", random.choice(lengths))

    await asyncio.gather(*(trickle(target, who, head) for who in target.tokens))


async def unread(target: HostileTarget) -> None:
    """Large answers that nobody takes."""

    async def ask() -> None:
        own = socket.socket()
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        own.setblocking(False)
        await asyncio.get_running_loop().sock_connect(own, ("127.0.0.1", target.port))
        async with connected(target.port, target.tokens["read"], sock=own, limit=1) as one:
            one.writer.write(one.head("GET", READS[0]))
            one.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(60.0)

    await forever(200, ask)


async def streams(target: HostileTarget) -> None:
    """Of changes, by people; and of orders, by as many agents as can enrol."""

    async def follow(who: str) -> None:
        async with connected(target.port, target.tokens[who]) as one:
            one.writer.write(one.head("GET", "events"))
            while await one.reader.read(65_536):
                pass

    async def listen(who: str, job: str, number: Iterator[int]) -> None:
        async with connected(target.port, target.tokens[who]) as one:
            host = f"h-{next(number)}"
            one.listen(await one.enrol(job, host), job, host)
            while await one.reader.read(65_536):
                pass

    agents = [forever(1_000, partial(listen, who, HOSTILE_JOB, count())) for who in AGENTS]
    await asyncio.gather(*(forever(200, partial(follow, who)) for who in PEOPLE), *agents)


async def enrolments(target: HostileTarget) -> None:
    def body() -> bytes:
        return json.dumps({"job": HOSTILE_JOB, "host": secrets.token_hex(8), "nonce": secrets.token_hex(16)}).encode()

    await asyncio.gather(*(flood(target, who, FLOOD, "POST", "agents/enrol", body) for who in AGENTS))


async def views(target: HostileTarget) -> None:
    """Of as many ranks as a host may have."""
    ranks = tuple(progress(rank, 1) for rank in range(1_024))
    async with connected(target.port, target.tokens["job"]) as one:
        identity = await one.enrol(HOSTILE_JOB, "h")

    def body() -> bytes:
        view = wire.View(HOSTILE_JOB, "l.0", "h", "b1", time.time_ns(), ranks)
        return identity.sign(Purpose.VIEW, wire.encode(view))

    await flood(target, "job", FLOOD, "POST", "agents/view", body, MSGPACK)


async def posts(target: HostileTarget) -> None:
    """Batches as they should be, batches that are none, and very large ones."""
    async with connected(target.port, target.tokens["ingest"]) as one:
        identity = await one.enrol(HOSTILE_JOB, "node-0")
    seq = count()

    def signed() -> bytes:
        return identity.sign(Purpose.BATCH, small_batch(HOSTILE_JOB, 0, 1, next(seq)))

    large = os.urandom(wire.BATCH_BYTES_MAX - 1_000)
    await asyncio.gather(
        flood(target, "ingest", FLOOD, "POST", "telemetry", signed, MSGPACK),
        flood(target, "job", FLOOD, "POST", "telemetry", lambda: secrets.token_bytes(2_000), MSGPACK),
        flood(target, "job", 4, "POST", "telemetry", lambda: large, MSGPACK),
    )


async def reads(target: HostileTarget) -> None:
    await asyncio.gather(*(flood(target, "read", FLOOD // len(READS), "GET", path) for path in READS))


async def judgements(target: HostileTarget) -> None:
    """Comments, silences, and previews of tunings."""
    silence = {"job": HOSTILE_JOB, "ends_unix_ns": time.time_ns() + 10**12, "comment": "hush"}
    preview = {"job": WIDE, "tunings": []}

    async def comment() -> None:
        path = f"incidents/{random.choice(target.incidents)}/comment"
        async with connected(target.port, target.tokens["operate"]) as one:
            await one.ask("POST", path, json.dumps({"text": "x" * 1_000}).encode(), JSON)

    await asyncio.gather(
        forever(FLOOD // 2, comment),
        flood(target, "operate", FLOOD // 4, "POST", "silences", lambda: json.dumps(silence).encode()),
        flood(target, "operate", FLOOD // 4, "POST", "tuning/preview", lambda: json.dumps(preview).encode()),
    )


async def commands(target: HostileTarget) -> None:
    body = json.dumps({"action": "pause"}).encode()
    await flood(target, "command", FLOOD, "POST", f"jobs/{WIDE}/commands", lambda: body)


async def alerts(target: HostileTarget) -> None:
    """A thousand new ones in each request."""

    def body() -> bytes:
        one = secrets.token_hex(4)
        return json.dumps(
            [{"labels": {"alertname": f"a-{one}-{number}", "job": WIDE}} for number in range(1_000)]
        ).encode()

    await flood(target, "alert", FLOOD, "POST", "/api/v2/alerts", body)


async def guesses(target: HostileTarget) -> None:
    """Tokens that were never given out."""
    await flood(target, "rankwatch_api_0123456789ab_" + "x" * 43, FLOOD, "GET", "jobs")


async def newcomers(target: HostileTarget) -> None:
    """Connections that ask nothing."""

    async def come() -> None:
        while True:
            async with connected(target.port, ""):
                pass

    await forever(16, come)


HOSTILE_JOB: Final = "hostile"
AGENTS, PEOPLE = ("ingest", "job"), ("read", "operate", "command")
READS: Final = (
    f"jobs/{WIDE}/heatmap.bin?metric=busy_s&columns=234&rows=256",
    f"jobs/{WIDE}/series?metric=busy_s&ranks=0-15&points=1000",
    "incidents?limit=200",
    "jobs?limit=200",
)
ATTACKS: Final[dict[str, Attack]] = {
    attack.__name__: attack
    for attack in (
        *(heads, bodies, unread, streams, enrolments, views, posts),
        *(reads, judgements, commands, alerts, guesses, newcomers),
    )
}


def hostile(target: HostileTarget, names: list[str], seconds: float, ready: Event) -> None:
    """All of these at once, until it is ended, and for so many seconds at most."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent ends it
    os.nice(19)
    more_files()

    async def attack() -> None:
        ready.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(forever(1, partial(ATTACKS[name], target)) for name in names))

    asyncio.run(attack())
