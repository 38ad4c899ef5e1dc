"""Liveness and readiness of this process."""

from __future__ import annotations

from fastapi import APIRouter, Response
from sqlalchemy import text

from rankwatch_service.api.dependencies import Ctx
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.store.engine import read
from rankwatch_service.store.errors import SchemaError, StoreError
from rankwatch_service.store.migrate import check

router = APIRouter(tags=["health"])


class Liveness(ApiReply):
    """The process is alive."""

    live: bool = True


class Readiness(ApiReply):
    """What the process needs, each "ok" or with the problem."""

    ready: bool
    checks: dict[str, str]


@router.get("/livez")
async def livez() -> Liveness:
    """Whether the event loop runs. Independent of the database, so that an outage of it restarts no process."""
    return Liveness()


@router.get("/readyz", responses={503: {"model": Readiness}})
def readyz(context: Ctx, response: Response) -> Readiness:
    """Whether the database answers and has this version's tables, and orders are being driven."""
    checks = {"database": "ok", "schema": "ok", "driver": "ok" if context.driver.alive else "not running"}
    try:
        with read(context.engine) as connection:
            connection.execute(text("SELECT 1"))
        check(context.engine)
    except SchemaError as error:
        checks["schema"] = str(error)
    except StoreError as error:
        checks["database"] = str(error)
    ready = all(state == "ok" for state in checks.values())
    if not ready:
        response.status_code = 503
    return Readiness(ready=ready, checks=checks)
