"""`GET /api/v1/stream`: the state of stream."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends

from rankwatch_service.access.identities import Identity
from rankwatch_service.access.scopes import Scope
from rankwatch_service.api.background.health_facts import StreamState, partitions, processes
from rankwatch_service.api.dependencies.context import Ctx
from rankwatch_service.api.http.authorization import Require
from rankwatch_service.store.engine import read

router = APIRouter(prefix="/stream", tags=["stream"])


@router.get("")
def stream_state(
    context: Ctx, _identity: Annotated[Identity, Depends(Require(Scope.READ, every_job=True))]
) -> StreamState:
    """Partitions and processes of stream."""
    with read(context.engine) as connection:
        in_store = not context.settings.kafka
        return StreamState(partitions=partitions(connection, in_store), processes=processes(connection))
