"""What a job has reported as a file for `rankwatch replay`, and what other tunings would have told of it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Depends, Query
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Engine, select

from rankwatch_detectors.tuning import SETTINGS
from rankwatch_service.access.identities import Identity
from rankwatch_service.access.scopes import Scope
from rankwatch_service.api.dependencies.context import Ctx
from rankwatch_service.api.http.authorization import Require
from rankwatch_service.api.http.numbers import Contents
from rankwatch_service.api.http.problem import RETRY_AFTER_S, ProblemError, not_found
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.api.routes.tuning.tunings import Tuning, tunings_in_force
from rankwatch_service.preview.export import ExportError, StoredSteps, parts, write_export
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import Job
from rankwatch_service.tuning.tunings import TUNINGS_MAX, TuningSet

router = APIRouter(tags=["tuning"])

PREVIEW_S_MAX: Final = 300
"""Time of a preview; one that would take longer is ended and refused."""

STEP_LAST: Final = 2**53 - 1

Reader = Annotated[Identity, Depends(Require(Scope.READ))]
Operator = Annotated[Identity, Depends(Require(Scope.OPERATE, every_job=True))]
Step = Annotated[int, Query(ge=0, le=STEP_LAST)]

_one_at_a_time = threading.Lock()


class _Parquet(StreamingResponse):
    media_type = "application/vnd.apache.parquet"


class TuningPreviewRequest(BaseModel):
    """Tunings to try on a job's stored telemetry, in place of those in force."""

    model_config = ConfigDict(extra="forbid")
    job: str
    tunings: Annotated[list[Tuning], Field(max_length=TUNINGS_MAX)]
    from_step: Annotated[int, Field(strict=True, ge=0, le=STEP_LAST)] = 0
    to_step: Annotated[int, Field(strict=True, ge=0, le=STEP_LAST)] = STEP_LAST


class TuningPreview(ApiReply):
    """What would have opened, and what would not. Incidents are as `rankwatch replay --json` prints them."""

    job: str
    version: int
    """Of the tunings in force."""
    rows: int
    first_step: int | None
    last_step: int
    both: int
    """Incidents that the tunings in force find as well as those that were tried."""
    opens: list[Contents]
    """Those that only the tunings that were tried find."""
    does_not_open: list[Contents]
    """Those that only the tunings in force find."""
    not_previewed: list[str]
    """Kinds of incidents that cannot be previewed: series do not have what decides about them."""
    settings_not_previewed: list[str]
    """Settings that differ and concern only such kinds."""


@router.get("/jobs/{job}/telemetry", response_class=_Parquet)
def export_telemetry(
    job: str, context: Ctx, _identity: Reader, from_step: Step = 0, to_step: Step = STEP_LAST
) -> _Parquet:
    """The stored telemetry of a job's ranks as a Parquet file that `rankwatch replay` reads."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - closed once it is sent; without a name it outlives no process
    try:
        _export(context.engine, StoredSteps(job, from_step, to_step), file)
    except BaseException:
        file.close()
        raise
    return _Parquet(parts(file))


@router.post("/tuning/preview")
def preview(body: TuningPreviewRequest, context: Ctx, _identity: Operator) -> TuningPreview:
    """What tunings would have told of a job's stored telemetry: a replay of its export, in a process of its own."""
    tried = TuningSet(tunings=tuple(one.checked() for one in body.tunings))
    with read(context.engine) as connection:
        in_force = tunings_in_force(connection)
    if not _one_at_a_time.acquire(blocking=False):
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        raise ProblemError(503, "another preview is running; there is one at a time", headers=headers)
    try:
        with tempfile.NamedTemporaryFile(suffix=".parquet") as file:
            _export(context.engine, StoredSteps(body.job, body.from_step, body.to_step), file)
            file.flush()
            found = _compared(Path(file.name), body.job, (in_force, tried))
    finally:
        _one_at_a_time.release()
    differing = _without_preview(in_force, tried, body.job)
    return TuningPreview(job=body.job, version=in_force.version, settings_not_previewed=differing, **found)


def _export(engine: Engine, wanted: StoredSteps, file: IO[bytes]) -> None:
    with read(engine) as connection:
        if connection.scalar(select(Job.name).where(Job.name == wanted.job)) is None:
            raise not_found("job", wanted.job)
    try:
        write_export(engine, wanted, file)
    except ExportError as error:
        raise ProblemError(422, str(error)) from error


def _compared(path: Path, job: str, tunings: Sequence[TuningSet]) -> dict[str, Any]:
    """The answer of a process of its own, so that detectors take no time from requests."""
    command = [sys.executable, "-m", "rankwatch_service.preview", str(path), job]
    try:
        done = subprocess.run(
            command, input=msgspec.json.encode(tunings), capture_output=True, timeout=PREVIEW_S_MAX, check=True
        )
    except subprocess.TimeoutExpired as error:
        raise ProblemError(422, f"it takes longer than {PREVIEW_S_MAX} s; choose fewer steps") from error
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        raise ProblemError(500, f"the preview has failed: {lines[-1] if lines else error}"[:500]) from error
    found: dict[str, Any] = msgspec.json.decode(done.stdout)
    return found


def _without_preview(before: TuningSet, after: TuningSet, job: str) -> list[str]:
    """Settings that cannot be previewed and differ."""
    one, other = before.of(job), after.of(job)
    return [
        name
        for name, setting in SETTINGS.items()
        if not setting.previewable
        and one.settings.get(name, setting.of(one.profile)) != other.settings.get(name, setting.of(other.profile))
    ]
