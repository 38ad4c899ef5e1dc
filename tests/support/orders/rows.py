"""Rows of commands, orders and agents' views, for tests that begin in the middle of a command."""

from collections.abc import Sequence

import msgspec
from sqlalchemy import insert

from rankwatch.wire import Progress
from rankwatch_service.store.engine import upsert, write
from rankwatch_service.store.models import AgentView, Command, Order
from tests.support.values.batches import progress

S = 10**9


def add_command(engine, now_unix_ns: int, command: str = "cmd_1", **changes) -> None:
    """A checkpoint of job `gpt` that is being carried out by its order `ord_1`."""
    row = {
        "id": command, "job": "gpt", "attempt": "l.0", "action": "checkpoint", "params": {},
        "reason": "before the night",
        "requested_by": "ann", "incident_id": None, "idempotency_key": None, "world_size": 4,
        "approval_required": False, "approved_by": None, "state": "accepted", "result": "", "applied_step": None,
        "requested_unix_ns": now_unix_ns, "expires_unix_ns": now_unix_ns + 300 * S, "applied_unix_ns": None,
        "finished_unix_ns": None,
    }  # fmt: skip
    order = {
        "id": "ord_1", "command_id": command, "job": "gpt", "attempt": "l.0", "action": "checkpoint", "phase": "do",
        "step": 1_240, "try_number": 1, "checkpoint": "", "location": "", "checkpoint_step": -1, "k": 0, "culprits": [],
        "phase_unix_ns": now_unix_ns, "lease_unix_ns": now_unix_ns, "detail": "", "version": 1,
    }  # fmt: skip
    with write(engine) as connection:
        connection.execute(insert(Command).values(**row | changes))
        connection.execute(insert(Order).values(**order | {"command_id": command}))


def add_view(engine, now_unix_ns: int, ranks: Sequence[Progress], host: str = "node-1", attempt: str = "l.0") -> None:
    """The newest view of one host of job `gpt`."""
    key = {"job": "gpt", "attempt": attempt, "host": host}
    row = key | {"agent": "", "boot": "b", "ranks": msgspec.msgpack.encode(ranks), "at_unix_ns": now_unix_ns}
    with write(engine) as connection:
        connection.execute(upsert(connection, AgentView, ("ranks", "at_unix_ns")), row)


def answered(rank: int, answer: str, detail: str = "", order: str = "ord_1") -> Progress:
    """A rank that has answered an order at step 1,240."""
    return progress(rank, 1_240, order=order, answer=answer, answer_step=1_240, answer_detail=detail)
