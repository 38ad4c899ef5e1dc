"""Decides who is notified of an incident or a command, and with what. Pure: the caller stores what it returns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from rankwatch_service.incidents.model import IncidentVersion, Transition
from rankwatch_service.labels import Labels, incident_labels, match_all, parse_matchers
from rankwatch_service.names import ALL_JOBS
from rankwatch_service.policy.command import CommandRequest
from rankwatch_service.policy.control_records import JobProject, ReceiverRoute, SilenceSet
from rankwatch_service.policy.message_limit import MESSAGES_PER_HOUR
from rankwatch_service.policy.notification import (
    MESSAGE_TYPES,
    NOBODYS,
    command_message,
    incident_message,
    iso_time,
    message_id,
)

HELD_UNTIL: Final = "it is told when there is room, if it still matters by then"


@dataclass(frozen=True, slots=True)
class Notification:
    """One message to one receiver about one transition of an incident, or about one command."""

    id: str
    """Derived, so that the same notification is stored once, however often it is composed."""
    receiver: str
    incident_id: str
    """Empty: a command without an incident."""
    transition: int
    """0: it is about a command."""
    body: bytes
    """JSON {type, timestamp, data}."""
    state: str
    """waiting: to be delivered. silenced, or held: a silence or the limit (`message_limit`) keeps it back; it shows why
    nobody was notified, and is never delivered."""
    created_unix_ns: int
    """It is due from this time on."""
    command_id: str = ""
    """Empty: it is about an incident."""


def labels_of(incident: IncidentVersion, whose: JobProject = NOBODYS) -> dict[str, str]:
    """The labels of an incident of a job with this project and owner."""
    known = {name: getattr(incident, name) for name in ("kind", "severity", "job", "attempt", "scope")}
    places = {"hosts": incident.hosts, "ranks": incident.ranks}
    return incident_labels({**known, **places, "project": whose.project, "owner": whose.owner})


def mutes(silence: SilenceSet, labels: Labels, now_unix_ns: int) -> bool:
    """Whether a silence mutes an incident with these labels now.

    A scope "host:NAME" or "rank:N" also mutes incidents that lie wholly on that host or rank, whatever their own scope.
    """
    scopes = ("", labels["scope"], f"host:{labels.get('host')}", f"rank:{labels.get('rank')}")
    return (
        silence.starts_unix_ns <= now_unix_ns < silence.ends_unix_ns
        and silence.job in ("", labels["job"])
        and silence.kind in ("", labels["kind"])
        and silence.scope in scopes
        and all(match_all(parse_matchers(text), labels) for text in silence.matchers)
    )


def notifications(
    transition: Transition,
    receivers: Iterable[ReceiverRoute],
    silences: Iterable[SilenceSet],
    links: Mapping[str, str],
    now_unix_ns: int,
    told_to: Collection[str] = (),
    whose: JobProject = NOBODYS,
    world_size: int = 0,
    accelerated: bool = True,
    *,
    allowed: bool = True,
    held_before: int = 0,
) -> list[Notification]:
    """Compose the notifications of one transition: one for each receiver that it concerns, also where none is sent.

    Transitions for the pages only (acknowledged, commented, evidence) give none. A receiver that was not notified
    before, since the incident was not severe enough for it or was silenced, is notified that the incident opened, but
    not that it is resolved. A silence mutes from its start up to, not including, its end. What goes to a receiver with
    `after_s` is due when the incident is as old; the notifier then decides whether it is still needed.

    Args:
        transition: with the incident as it is after it.
        receivers: all of them.
        silences: all of them.
        links: URLs of pages about the incident, by name.
        now_unix_ns: stream time.
        told_to: names of the receivers that were notified of the incident before.
        whose: project and owner of the job.
        world_size: ranks of the job; 0: unknown.
        accelerated: an hour of a rank is one of a GPU.
        allowed: the limit of messages has room for it.
        held_before: messages like it that the limit held back before.
    """
    incident = transition.incident
    if transition.what not in MESSAGE_TYPES:
        return []
    labels = labels_of(incident, whose)
    concerned = [receiver for receiver in receivers if not objection(receiver, labels, incident.kinds)]
    new = {receiver.name for receiver in concerned} - set(told_to)
    if transition.what == "resolved":
        concerned = [receiver for receiver in concerned if receiver.name not in new]
    is_muted = bool(concerned) and any(mutes(silence, labels, now_unix_ns) for silence in silences)
    bodies = {
        first: incident_message(transition, links, whose, world_size, accelerated, first=first, held_before=held_before)
        for first in {receiver.name in new for receiver in concerned}
    }
    due = {
        receiver.name: max(now_unix_ns, incident.detected_unix_ns + receiver.after_s * 10**9) for receiver in concerned
    }
    return [
        Notification(
            id=message_id(incident.id, transition.number, name),
            receiver=name,
            incident_id=incident.id,
            transition=transition.number,
            body=bodies[name in new],
            # What waits is looked at again when it is due.
            state="silenced" if is_muted and due_unix_ns == now_unix_ns else "waiting" if allowed else "held",
            created_unix_ns=due_unix_ns,
        )
        for name, due_unix_ns in sorted(due.items())
    ]


def command_notifications(
    request: CommandRequest,
    receivers: Iterable[ReceiverRoute],
    links: Mapping[str, str],
    incident: IncidentVersion | None = None,
    whose: JobProject = NOBODYS,
) -> list[Notification]:
    """Compose the notifications of a command that needs an approval, or weakens approvals; none for any other.

    Silences do not mute them: somebody waits for an answer.

    Args:
        request: the command.
        receivers: all of them.
        links: URLs of the pages on which it can be approved or seen, by name.
        incident: notify the receivers that it concerns; None: all receivers of the job, or of any if it is for all
            jobs, whatever kinds, severities and labels they subscribe to.
        whose: project and owner of the job.
    """
    if not request.approval_required and request.job != ALL_JOBS:
        return []
    body = command_message(request, links, whose)
    if request.job == ALL_JOBS:
        concerned = [receiver for receiver in receivers if receiver.enabled]
    elif incident is None:
        labels = {"job": request.job, "project": whose.project}
        concerned = [receiver for receiver in receivers if not _objection_to_job(receiver, labels)]
    else:
        labels = labels_of(incident, whose)
        concerned = [receiver for receiver in receivers if not objection(receiver, labels, incident.kinds)]
    return [
        Notification(
            id=message_id(request.id, 0, receiver.name),
            receiver=receiver.name,
            incident_id=request.incident_id or "",
            transition=0,
            body=body,
            state="waiting",
            created_unix_ns=request.requested_unix_ns,
            command_id=request.id,
        )
        for receiver in sorted(concerned, key=attrgetter("name"))
    ]


def objection(receiver: ReceiverRoute, labels: Labels, kinds: Collection[str]) -> str:
    """Why an incident does not concern a receiver, for people; empty: it does.

    An empty list of a receiver matches all. The kinds of an incident's consequences count too: whoever subscribes to
    hangs is notified of one that a slow rank has caused. The names of other jobs and projects are not in the answer,
    since not everybody may see them.

    Args:
        receiver: with its settings as they are now.
        labels: of the incident.
        kinds: its own kind and those of its consequences.
    """
    severity = labels["severity"]
    if found := _objection_to_job(receiver, labels):
        return found
    if receiver.severities and severity not in receiver.severities:
        return f"the incident is {severity}, and the receiver gets {' and '.join(receiver.severities)} incidents alone"
    if receiver.kinds and not set(receiver.kinds) & set(kinds):
        return f"the receiver gets incidents of the kinds {', '.join(receiver.kinds)} alone"
    missed = next((text for text in receiver.matchers if not match_all(parse_matchers(text), labels)), "")
    return missed and f"the receiver gets incidents with {missed} alone"


def _objection_to_job(receiver: ReceiverRoute, labels: Labels) -> str:
    if not receiver.enabled:
        return "the receiver is disabled"
    if receiver.jobs and labels["job"] not in receiver.jobs:
        return "the receiver subscribes to other jobs"
    if receiver.projects and labels.get("project", "") not in receiver.projects:
        return "the receiver subscribes to other projects"
    return ""


def why_sent(state: str, error: str, tries: int, due_unix_ns: int, now_unix_ns: int) -> str:
    """What became of a notification, in a sentence for people.

    Args:
        state: waiting, delivered, failed, silenced, held or unneeded.
        error: of the newest try; empty if it succeeded, or there was none.
        tries: so far.
        due_unix_ns: when it is or was due.
        now_unix_ns: the time.
    """
    match state:
        case "delivered":
            return "sent, since the receiver subscribes to it"
        case "silenced":
            return "not sent: a silence muted it"
        case "held":
            return f"not sent: {MESSAGES_PER_HOUR} messages like it had been sent within an hour; {HELD_UNTIL}"
        case "unneeded":
            return "not sent: somebody acknowledged the incident in time, or it was over"
        case "failed":
            return f"not sent: given up after {tries} {'try' if tries == 1 else 'tries'}: {error or 'receiver removed'}"
    if due_unix_ns > now_unix_ns:
        return f"not sent yet: it is sent at {iso_time(due_unix_ns)} if nobody acknowledges the incident before"
    return f"not sent yet: {error or 'no try has ended'}"
