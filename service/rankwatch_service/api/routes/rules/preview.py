"""What a rule would have found in a job's own past, before it is switched on."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends

from rankwatch_service.access.identities import Identity
from rankwatch_service.access.scopes import Scope
from rankwatch_service.api.dependencies.context import Ctx
from rankwatch_service.api.http.authorization import Require
from rankwatch_service.api.http.numbers import Contents
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.api.routes.jobs import find_job
from rankwatch_service.rules import preview
from rankwatch_service.rules.preview import PreviewedIncident
from rankwatch_service.rules.written_rule import WrittenRule
from rankwatch_service.store.engine import read

router = APIRouter(prefix="/jobs/{job}/rules", tags=["rules"])

Reader = Annotated[Identity, Depends(Require(Scope.READ))]


class RulePreviewIncident(ApiReply):
    """An incident that the rule would have opened."""

    attempt: str
    onset_step: int | None
    opened_step: int | None
    ended_step: int | None
    """null: it would be open still, or it ended with its attempt."""
    is_open: bool
    ranks: list[int]
    summary: str
    evidence: Contents


class RulePreview(ApiReply):
    """What the rule would have found. Only raw series are judged, as far back as `first_step`."""

    incidents: list[RulePreviewIncident]
    steps: int
    """Steps that were judged."""
    first_step: int | None
    last_step: int | None
    left_out: int
    """Older chunks of 64 steps that were not judged, as there are too many."""


@router.post("/preview")
def preview_rule(job: str, body: WrittenRule, context: Ctx, _identity: Reader) -> RulePreview:
    """Judge the job's stored past by a rule. Nothing is stored, and nobody is notified.

    The rule's patterns of jobs do not matter. Values are exact within the rounding of series; times are added up from
    the steps' own, so of a rule with `hold_s` an incident may open some seconds earlier or later.
    """
    with read(context.engine) as connection:
        find_job(connection, job)
        found = preview.preview(connection, job, body.rule())
    return RulePreview(
        incidents=[_shown(one) for one in found.incidents],
        steps=found.steps,
        first_step=found.first_step,
        last_step=found.last_step,
        left_out=found.left_out,
    )


def _shown(one: PreviewedIncident) -> RulePreviewIncident:
    return RulePreviewIncident(
        attempt=one.opened.attempt,
        onset_step=one.opened.onset_step,
        opened_step=one.opened.detected_step,
        ended_step=None if one.closed is None else one.closed.detected_step,
        is_open=one.closed is None,
        ranks=list(one.opened.ranks),
        summary=one.opened.summary,
        evidence=dict(one.opened.evidence),
    )
