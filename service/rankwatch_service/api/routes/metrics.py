"""`GET /metrics`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Response
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST, generate_latest

from rankwatch_service.access.identities import Identity
from rankwatch_service.access.scopes import Scope
from rankwatch_service.api.dependencies import Ctx
from rankwatch_service.api.http.authorization import Require

router = APIRouter(tags=["health"])


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"application/openmetrics-text": {"schema": {"type": "string"}}}}},
)
def metrics(context: Ctx, _identity: Annotated[Identity, Depends(Require(Scope.READ, every_job=True))]) -> Response:
    """Metrics of this process and of the state that all processes share, as OpenMetrics text."""
    text: bytes = generate_latest(context.counters.registry)  # type: ignore[no-untyped-call]
    return Response(text, media_type=CONTENT_TYPE_LATEST)
