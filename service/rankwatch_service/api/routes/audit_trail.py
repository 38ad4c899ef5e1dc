"""The audit trail and the dead letters."""

from __future__ import annotations

import base64
import json
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from fastapi.responses import StreamingResponse
from sqlalchemy import RowMapping, select

from rankwatch_service.access.grants import Scope
from rankwatch_service.access.identities import Identity
from rankwatch_service.api.dependencies import Ctx, Require
from rankwatch_service.api.http.paging import Contents, Page, Wanted, any_of, fetch_page
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.store import audit_trail
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import Audit as AuditRow
from rankwatch_service.store.models import DeadLetter as DeadLetterRow

router = APIRouter(tags=["audit"])
Admin = Annotated[Identity, Depends(Require(Scope.ADMIN, every_job=True))]
Reader = Annotated[Identity, Depends(Require(Scope.READ, every_job=True))]


class _JsonLines(StreamingResponse):
    media_type = "application/jsonl"


class AuditLine(ApiReply):
    """Who did what to what, and the outcome."""

    id: int
    at_unix_ns: int
    actor: str
    source: str
    action: str
    target: str
    outcome: str
    fields: Contents


class DeadLetter(ApiReply):
    """A record that could not be used."""

    id: int
    source: str
    reason: str
    detail: str
    value_base64: str
    """The stored part of the record."""
    at_unix_ns: int


@router.get("/audit")
def list_audit(
    context: Ctx,
    window: Wanted,
    _identity: Admin,
    target: Annotated[list[str] | None, Query()] = None,
    action: Annotated[list[str] | None, Query()] = None,
) -> Page[AuditLine]:
    """The audit trail, newest first."""
    query = select(AuditRow.__table__)
    query = any_of(query, AuditRow.target, target)
    query = any_of(query, AuditRow.action, action)
    purpose = f"audit {target} {action}"
    with read(context.engine) as connection:
        return fetch_page(connection, query, (AuditRow.id,), window, context.cursors, purpose, AuditLine.model_validate)


@router.get("/audit/export", response_class=_JsonLines)
def export_audit(context: Ctx, _identity: Admin, since_unix_ns: Annotated[int, Query(ge=0)] = 0) -> _JsonLines:
    """The audit trail as JSON lines, oldest first, from the first row of `since_unix_ns` on."""
    rows = audit_trail.export(context.engine, since_unix_ns)
    return _JsonLines(json.dumps(row) + "\n" for row in rows)


@router.get("/dead-letters")
def list_dead_letters(
    context: Ctx, window: Wanted, _identity: Reader, reason: Annotated[list[str] | None, Query()] = None
) -> Page[DeadLetter]:
    """Records that could not be used, newest first."""
    query = select(DeadLetterRow.__table__)
    query = any_of(query, DeadLetterRow.reason, reason)

    def shown(row: RowMapping) -> DeadLetter:
        return DeadLetter(**row, value_base64=base64.b64encode(row["value"]).decode())

    purpose = f"dead letters {reason}"
    with read(context.engine) as connection:
        return fetch_page(connection, query, (DeadLetterRow.id,), window, context.cursors, purpose, shown)
