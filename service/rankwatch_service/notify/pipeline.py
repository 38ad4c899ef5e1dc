"""Decides who is notified of what: the stages that an announcement goes through, in their order. Pure.

    announcement ─▶ filtered ─▶ introduced ─▶ delayed ─▶ silenced ─▶ limited ─▶ outbox     (`router.py`, once)
    outbox ─▶ still_needed ─▶ sent ─▶ retried                                 (`notifier.py`, until it is final)

A stage takes the notifications of one announcement, one for each receiver, and returns those that are left. One that is
kept back stays in the outbox, so that people see why nobody was notified.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rankwatch_service.labels import Labels, match_all, parse_matchers
from rankwatch_service.notify.message_limit import MESSAGES_PER_HOUR, MessageLimit
from rankwatch_service.policy.announcement import Announcement
from rankwatch_service.policy.notification import MESSAGE_TYPES, iso_time

OPENED: Final = MESSAGE_TYPES["opened"]
RESOLVED: Final = MESSAGE_TYPES["resolved"]

HELD_UNTIL: Final = "it is sent when there is room, if it still matters by then"


@dataclass(frozen=True, slots=True)
class ReceiverRoute:
    """Which incidents a receiver subscribes to; an empty list matches all, and all lists must match."""

    name: str
    kinds: tuple[str, ...] = ()
    severities: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    enabled: bool = True
    projects: tuple[str, ...] = ()
    matchers: tuple[str, ...] = ()
    """On labels, as `labels.matcher` reads them; all of them must match too."""
    after_s: int = 0
    """Delay of notifications in seconds; none is sent if the incident is acknowledged by then."""


@dataclass(frozen=True, slots=True)
class Silence:
    """Mutes incidents that match from its start up to, not including, its end."""

    job: str
    """Empty: every job; the same for kind and scope."""
    kind: str
    scope: str
    starts_unix_ns: int
    ends_unix_ns: int
    matchers: tuple[str, ...] = ()
    """On labels, as `labels.matcher` reads them; all of them must match too."""


@dataclass(frozen=True, slots=True)
class Notification:
    """One message to one receiver."""

    receiver: ReceiverRoute
    type: str
    due_unix_ns: int
    state: str = "waiting"
    """waiting: to be delivered when it is due. silenced, or held: a silence or the limit of messages keeps it back."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What the stages look at."""

    announcement: Announcement
    silences: Sequence[Silence]
    """In force."""
    notified: Collection[str]
    """Names of the receivers that were notified of the incident before."""
    limit: MessageLimit
    """Message limit of the job."""
    now_unix_ns: int
    """Time of the change; of one that was held back: when there is room for it."""


Stage = Callable[[Situation, Sequence[Notification]], list[Notification]]


def filtered(situation: Situation, notifications: Sequence[Notification]) -> list[Notification]:
    """Only receivers that subscribe to it are notified."""
    labels, kinds = situation.announcement.labels, situation.announcement.kinds
    return [one for one in notifications if not rejection_reason(one.receiver, labels, kinds)]


def introduced(situation: Situation, notifications: Sequence[Notification]) -> list[Notification]:
    """The first message about an incident says that it opened, whatever has changed; without it there is none of its
    end.
    """
    is_over = situation.announcement.type == RESOLVED
    known = [one for one in notifications if one.receiver.name in situation.notified]
    new = [one for one in notifications if one.receiver.name not in situation.notified and not is_over]
    return known + [replace(one, type=OPENED) for one in new]


def delayed(situation: Situation, notifications: Sequence[Notification]) -> list[Notification]:
    """What goes to a receiver with `after_s` is due when the incident is as old."""
    found_unix_ns = situation.announcement.detected_unix_ns
    return [
        replace(one, due_unix_ns=max(one.due_unix_ns, found_unix_ns + one.receiver.after_s * 10**9))
        for one in notifications
    ]


def silenced(situation: Situation, notifications: Sequence[Notification]) -> list[Notification]:
    """What a silence mutes is not delivered. What is due later is looked at then (`still_needed`)."""
    now_unix_ns = situation.now_unix_ns
    if not is_muted(situation.silences, situation.announcement.labels, now_unix_ns):
        return list(notifications)
    return [replace(one, state="silenced") if one.due_unix_ns == now_unix_ns else one for one in notifications]


def limited(situation: Situation, notifications: Sequence[Notification]) -> list[Notification]:
    """What the limit of messages has no room for is held back."""
    if situation.limit.allows(situation.announcement, situation.now_unix_ns):
        return list(notifications)
    return [replace(one, state="held") if one.state == "waiting" else one for one in notifications]


INCIDENT_PIPELINE: Final[tuple[Stage, ...]] = (filtered, introduced, delayed, silenced, limited)
"""Stages for a change of an incident."""

COMMAND_PIPELINE: Final[tuple[Stage, ...]] = (filtered,)
"""Stages for a command: somebody waits for an answer, so nothing delays it."""


def notifications(situation: Situation, receivers: Iterable[ReceiverRoute]) -> list[Notification]:
    """The notifications of one announcement, by name of receiver, also those that are kept back."""
    announcement = situation.announcement
    found = [Notification(receiver, announcement.type, situation.now_unix_ns) for receiver in receivers]
    for stage in COMMAND_PIPELINE if announcement.command_id else INCIDENT_PIPELINE:
        found = stage(situation, found)
    return sorted(found, key=lambda one: one.receiver.name)


def still_needed(incident_state: str, labels: Labels, silences: Iterable[Silence], now_unix_ns: int) -> str:
    """What becomes of a delayed notification that is due: it is waiting, unneeded or silenced."""
    if incident_state in ("acknowledged", "resolved"):
        return "unneeded"
    return "silenced" if is_muted(silences, labels, now_unix_ns) else "waiting"


def is_muted(silences: Iterable[Silence], labels: Labels, now_unix_ns: int) -> bool:
    """Whether any silence mutes an incident with these labels now."""
    return any(mutes(silence, labels, now_unix_ns) for silence in silences)


def mutes(silence: Silence, labels: Labels, now_unix_ns: int) -> bool:
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


def rejection_reason(receiver: ReceiverRoute, labels: Labels, kinds: Collection[str]) -> str:
    """Why an announcement does not concern a receiver, for people; empty: it does.

    An empty list of a receiver matches all. The kinds of an incident's consequences count too: whoever subscribes to
    hangs is notified of one that a slow rank has caused. What is about a job and no incident concerns all receivers of
    the job, whatever kinds, severities and labels they subscribe to. The names of other jobs and projects are not in
    the answer, since not everybody may see them.

    Args:
        receiver: with its settings as they are now.
        labels: of the incident, or of the job; none: it is about all jobs.
        kinds: the incident's own kind and those of its consequences.
    """
    if not receiver.enabled:
        return "the receiver is disabled"
    if not labels:
        return ""
    if receiver.jobs and labels["job"] not in receiver.jobs:
        return "the receiver subscribes to other jobs"
    if receiver.projects and labels.get("project", "") not in receiver.projects:
        return "the receiver subscribes to other projects"
    severity = labels.get("severity")
    if severity is None:
        return ""
    if receiver.severities and severity not in receiver.severities:
        return f"the incident is {severity}, and the receiver gets {' and '.join(receiver.severities)} incidents only"
    if receiver.kinds and not set(receiver.kinds) & set(kinds):
        return f"the receiver gets only incidents of the kinds {', '.join(receiver.kinds)}"
    missed = next((text for text in receiver.matchers if not match_all(parse_matchers(text), labels)), "")
    return missed and f"the receiver gets only incidents with {missed}"


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
