"""What a person decides about an incident. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from rankwatch_detectors.base import Occurrence
from rankwatch_service.incidents.correlator import Correlator
from rankwatch_service.incidents.model import Part, TransitionKind, Update
from rankwatch_service.policy.control_records import Judgement


def judged(correlator: Correlator, record: Judgement, step: int, now_s: float) -> Update | None:
    """Apply a judgement; None if there is no such incident any more, or it is in that state already."""
    incident = correlator.get(record.incident)
    if incident is None:
        return None
    match record.what:
        case "acknowledged" if incident.state != "resolved" and incident.acknowledged_by != record.actor:
            incident.state, incident.acknowledged_by = "acknowledged", record.actor
            what = TransitionKind.ACKNOWLEDGED
        case "unacknowledged" if incident.state == "acknowledged":
            incident.state, incident.acknowledged_by = "open", None
            what = TransitionKind.UNACKNOWLEDGED
        case "resolved" if incident.state != "resolved":
            correlator.resolve(incident, step, now_s)
            what = TransitionKind.RESOLVED
        case "commented":
            what = TransitionKind.COMMENTED
        case _:
            return None
    return Update(incident, what, record.text, record.actor)


def acceptance(standing: Iterable[Part], attempt: str, now_s: float) -> Occurrence:
    """A person accepts what detectors still observe: its present level is the one to keep from now on.

    Args:
        standing: the open parts of the incident that the person resolved.
        attempt: the newest one.
        now_s: stream time.
    """
    parts = list(standing)
    told = {
        "kinds": sorted({str(part.kind) for part in parts}),
        "scopes": sorted({str(part.scope) for part in parts}),
    }
    return Occurrence("accepted", attempt, "", now_s, None, None, told)
