"""What a policy would have done about the incidents of the last days."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends

from rankwatch_service.access.identities import Identity
from rankwatch_service.access.scopes import Scope
from rankwatch_service.api.dependencies.context import Ctx
from rankwatch_service.api.http.authorization import Require
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.api.routes.policy.policy import Policy
from rankwatch_service.orders.running_attempt import checkpoints
from rankwatch_service.policy.policy import Decision, Mode
from rankwatch_service.preview.policy_preview import PAST_DAYS, PastIncident, past_incidents, previewed
from rankwatch_service.store.engine import read
from rankwatch_service.store.feedback_counts import precision_by_kind

router = APIRouter(prefix="/policy", tags=["policy"])

Reader = Annotated[Identity, Depends(Require(Scope.READ, every_job=True))]


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
    """So many were decided."""
    left_out: int
    """Older ones that were not, as there are too many."""
    items: list[PreviewedAction]
    """Newest first. Incidents that no rule takes, or of which people would only have been notified, are not in it."""


@router.post("/preview")
def preview_policy(body: Policy, context: Ctx, _identity: Reader) -> PolicyPreview:
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
