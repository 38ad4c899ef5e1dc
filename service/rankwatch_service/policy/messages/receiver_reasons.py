"""Why a receiver was notified of an incident, or why not: one sentence for people. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rankwatch_service.policy.control_records import ReceiverRoute


@dataclass(frozen=True, slots=True)
class IncidentTraits:
    """What receivers choose incidents by."""

    job: str
    project: str
    severity: str
    kinds: Collection[str]
    """Its own kind and those of its consequences."""


def why_sent(state: str, error: str, tries: int) -> str:
    """What became of a notification.

    Args:
        state: waiting, delivered, failed or silenced.
        error: of the newest try; empty if it succeeded, or there was none.
        tries: so far.
    """
    match state:
        case "delivered":
            return "sent, since the receiver subscribes to it"
        case "silenced":
            return "not sent: a silence muted it"
        case "failed":
            return f"not sent: given up after {tries} {'try' if tries == 1 else 'tries'}: {error or 'receiver removed'}"
    return f"not sent yet: {error or 'no try has ended'}"


def why_not_sent(receiver: ReceiverRoute, incident: IncidentTraits) -> str:
    """Why there is no notification to a receiver, by its settings as they are now.

    The names of other jobs and projects are not in the answer, since not everybody may see them.
    """
    if not receiver.enabled:
        return "not sent: the receiver is disabled"
    if receiver.jobs and incident.job not in receiver.jobs:
        return "not sent: the receiver subscribes to other jobs"
    if receiver.projects and incident.project not in receiver.projects:
        return "not sent: the receiver subscribes to other projects"
    if receiver.severities and incident.severity not in receiver.severities:
        wanted = " and ".join(receiver.severities)
        return f"not sent: the incident is {incident.severity}, and the receiver gets {wanted} incidents alone"
    if receiver.kinds and not set(receiver.kinds) & set(incident.kinds):
        return f"not sent: the receiver gets incidents of the kinds {', '.join(receiver.kinds)} alone"
    return "not sent: nothing has changed since the receiver would get it; it gets the next change"
