"""What a change would have done, before it is made, and what a job has reported as a file for `rankwatch replay`."""

from __future__ import annotations

import tempfile
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Query
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Engine

from rankwatch_detectors.base import Kind
from rankwatch_detectors.tuning import SETTINGS
from rankwatch_service.access.grants import Scope
from rankwatch_service.access.identities import Identity
from rankwatch_service.api.dependencies import Ctx, Require
from rankwatch_service.api.http.paging import Contents
from rankwatch_service.api.http.problem import RETRY_AFTER_S, ProblemError
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.api.routes.jobs import find_job
from rankwatch_service.api.routes.policy import Policy
from rankwatch_service.api.routes.tuning import Tuning, tunings_in_force
from rankwatch_service.incidents.kinds import PREVIEWABLE
from rankwatch_service.orders.running_attempt import checkpoints
from rankwatch_service.policy.policy import Decision, Mode
from rankwatch_service.preview import engine as previews
from rankwatch_service.preview.engine import (
    AnotherRule,
    ExportError,
    NothingStoredError,
    OtherTunings,
    Proposal,
    StoredSteps,
    parts,
    write_export,
)
from rankwatch_service.preview.policy_preview import PAST_DAYS, PastIncident, past_incidents, previewed
from rankwatch_service.store.engine import read
from rankwatch_service.store.settings_rows import precision_by_kind
from rankwatch_service.tuning import TUNINGS_MAX, TuningSet
from rankwatch_service.written_rule import WrittenRule

router = APIRouter()

STEP_LAST: Final = 2**53 - 1
NOTHING: Final[dict[str, Any]] = {
    "rows": 0, "steps": 0, "first_step": None, "last_step": None, "left_out": 0, "both": 0,
    "opens": [], "does_not_open": [],
}  # fmt: skip
"""The comparison where nothing is stored."""

NOT_PREVIEWED: Final = [str(kind) for kind in Kind if kind not in PREVIEWABLE]
"""Kinds that no preview of tunings shows: series have neither times of day nor events nor exits."""

Reader = Annotated[Identity, Depends(Require(Scope.READ))]
EveryReader = Annotated[Identity, Depends(Require(Scope.READ, every_job=True))]
Operator = Annotated[Identity, Depends(Require(Scope.OPERATE, every_job=True))]
Step = Annotated[int, Query(ge=0, le=STEP_LAST)]


class _Parquet(StreamingResponse):
    media_type = "application/vnd.apache.parquet"


class TuningPreviewRequest(BaseModel):
    """Tunings to try on a job's stored telemetry, in place of those in force."""

    model_config = ConfigDict(extra="forbid")
    job: str
    tunings: Annotated[list[Tuning], Field(max_length=TUNINGS_MAX)]
    from_step: Annotated[int, Field(strict=True, ge=0, le=STEP_LAST)] = 0
    to_step: Annotated[int, Field(strict=True, ge=0, le=STEP_LAST)] = STEP_LAST


class Preview(ApiReply):
    """What would have opened, and what would not. Incidents are as `rankwatch replay --json` prints them."""

    job: str
    rows: int
    steps: int
    """Steps that were judged, of all attempts together."""
    first_step: int | None
    last_step: int | None
    left_out: int
    """Older chunks of 64 steps that were not judged, as there are too many."""
    both: int
    """Incidents that are found with the change as well as without it."""
    opens: list[Contents]
    """Incidents that are found only with the change."""
    does_not_open: list[Contents]
    """Incidents that are found only without it."""


class TuningPreview(Preview):
    """What other tunings would have found."""

    version: int
    """Version of the tunings in force."""
    not_previewed: list[str]
    """Kinds of incidents that cannot be previewed: series do not have what decides about them."""
    settings_not_previewed: list[str]
    """Settings that differ and concern only such kinds."""


class PreviewedAction(ApiReply):
    """An action that a rule would have taken or proposed."""

    incident_id: str
    job: str
    kind: str
    severity: str
    summary: str
    detected_unix_ns: int
    resolved_unix_ns: int | None
    """null: it is not over."""
    rule: str
    mode: Mode
    """act, or suggest."""
    action: str
    approval_required: bool
    """A person would have had to approve it."""
    reason: str
    """Why it would only have been proposed."""


class PolicyPreview(ApiReply):
    """What a policy would have done."""

    days: int
    """Incidents that were detected in so many days count."""
    incidents: int
    """Number of incidents that were decided."""
    left_out: int
    """Older ones that were not, as there are too many."""
    items: list[PreviewedAction]
    """Newest first. Incidents that no rule takes, or of which people would only have been notified, are not in it."""


@router.get("/jobs/{job}/telemetry", response_class=_Parquet, tags=["tuning"])
def export_telemetry(
    job: str, context: Ctx, _identity: Reader, from_step: Step = 0, to_step: Step = STEP_LAST
) -> _Parquet:
    """The stored telemetry of a job's ranks as a Parquet file that `rankwatch replay` reads."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - closed once it is sent; without a name it outlives no process
    try:
        with read(context.engine) as connection:
            find_job(connection, job)
        write_export(context.engine, StoredSteps(job, from_step, to_step), file)
    except ExportError as error:
        file.close()
        raise ProblemError(422, str(error)) from error
    except BaseException:
        file.close()
        raise
    return _Parquet(parts(file))


@router.post("/tuning/preview", tags=["tuning"])
def preview_tunings(body: TuningPreviewRequest, context: Ctx, _identity: Operator) -> TuningPreview:
    """What tunings would have reported for a job's stored telemetry: a replay of its export, in a separate process."""
    tried = TuningSet(tunings=tuple(one.checked() for one in body.tunings))
    with read(context.engine) as connection:
        in_force = tunings_in_force(connection)
    steps = StoredSteps(body.job, body.from_step, body.to_step)
    found = _previewed(context.engine, steps, OtherTunings(in_force, tried))
    return TuningPreview(
        job=body.job,
        version=in_force.version,
        not_previewed=NOT_PREVIEWED,
        settings_not_previewed=_without_preview(in_force, tried, body.job),
        **found,
    )


@router.post("/jobs/{job}/rules/preview", tags=["rules"])
def preview_rule(job: str, body: WrittenRule, context: Ctx, _identity: Reader) -> Preview:
    """Judge the job's stored past by a rule. Nothing is stored, and nobody is notified.

    The rule's patterns of jobs do not matter. Values are exact within the rounding of series; times are added up from
    the steps' own, so of a rule with `hold_s` an incident may open some seconds earlier or later.
    """
    proposal = AnotherRule(body.rule())
    return Preview(job=job, **_previewed(context.engine, proposal.steps(job), proposal))


def _previewed(engine: Engine, steps: StoredSteps, proposal: Proposal) -> dict[str, Any]:
    with read(engine) as connection:
        find_job(connection, steps.job)
    try:
        return previews.preview(engine, steps, proposal)
    except ExportError as error:
        if isinstance(error, NothingStoredError) and isinstance(proposal, AnotherRule):
            return NOTHING
        raise ProblemError(422, str(error)) from error
    except previews.PreviewRunningError as error:
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        raise ProblemError(503, "another preview is running; there is one at a time", headers=headers) from error
    except previews.PreviewTooLongError as error:
        raise ProblemError(422, str(error)) from error
    except previews.PreviewFailedError as error:
        raise ProblemError(500, str(error)) from error


def _without_preview(before: TuningSet, after: TuningSet, job: str) -> list[str]:
    """Settings that cannot be previewed and differ."""
    one, other = before.of(job), after.of(job)
    return [
        name
        for name, setting in SETTINGS.items()
        if not setting.previewable
        and one.settings.get(name, setting.of(one.profile)) != other.settings.get(name, setting.of(other.profile))
    ]


@router.post("/policy/preview", tags=["policy"])
def preview_policy(body: Policy, context: Ctx, _identity: EveryReader) -> PolicyPreview:
    """Decide about the incidents of the last 7 days by a policy. Nothing is stored, and nothing is done.

    Each is decided by what is known of it now, with the precision of its kind and the checkpoints of now; of the
    actions of a job, only those that this policy would have taken count against its budget and cool-down.
    """
    now = context.clock.unix_ns()
    with read(context.engine) as connection:
        incidents, left_out = past_incidents(connection, now)
        precision = precision_by_kind(connection, now)
        decided = previewed(body.policy(), incidents, lambda job: checkpoints(connection, job), precision)
    items = [_shown(past, decision) for past, decision in reversed(decided) if decision.mode is not Mode.NOTIFY]
    return PolicyPreview(days=PAST_DAYS, incidents=len(decided), left_out=left_out, items=items)


def _shown(past: PastIncident, decision: Decision) -> PreviewedAction:
    return PreviewedAction(
        incident_id=past.facts.id,
        job=past.facts.job,
        kind=past.facts.kind,
        severity=past.facts.severity,
        summary=past.summary,
        detected_unix_ns=past.detected_unix_ns,
        resolved_unix_ns=past.resolved_unix_ns,
        rule=decision.rule,
        mode=decision.mode,
        action=decision.action,
        approval_required=decision.approval_required,
        reason="" if decision.mode is Mode.ACT else decision.reason,
    )
