"""`Idempotency-Key`: a write that is sent twice is carried out once, and the second request gets the first reply."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Annotated, Final

from fastapi import Depends, Header, Request
from fastapi.responses import Response
from pydantic import BaseModel
from sqlalchemy import Connection, delete, insert, select

from rankwatch_service.access.identities import Identity
from rankwatch_service.api.background.housekeeping import REPLY_NS
from rankwatch_service.api.dependencies.context import Ctx
from rankwatch_service.api.http.problem import ProblemError
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import IdempotentReply

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
        self,
        identity: Identity,
        body: BaseModel | None,
        status: int,
        work: Callable[[Connection], BaseModel],
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
