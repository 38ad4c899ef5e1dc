"""The law on messages: how many receivers get about one kind of incident of a job within an hour. Pure.

At most `MESSAGES_PER_HOUR`, besides those with a new cause: other ranks or hosts than those reported within that hour,
or a higher severity. What is held back is counted, and sent as soon as there is room if it still matters by then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from rankwatch_detectors.base import GRAVITY, Severity
from rankwatch_service.incidents.lost_time import HOUR_NS
from rankwatch_service.policy.announcement import Announcement
from rankwatch_service.policy.notification import MESSAGE_TYPES

MESSAGES_PER_HOUR: Final = 3

NEW_CAUSES_PER_HOUR: Final = 12
"""Messages with a new cause within an hour: whoever accuses one rank after the other has no new cause each time."""


@dataclass(frozen=True, slots=True)
class _Reported:
    """One message, whatever the number of its receivers."""

    at_unix_ns: int
    incident: str
    gravity: int
    places: list[int | str]
    is_new: bool
    """Whether it has a new cause, or ends an incident that had one."""


class MessageLimit:
    """What receivers were recently notified of for one job, by kind."""

    def __init__(self) -> None:
        self._reported: dict[str, list[_Reported]] = {}
        self._held: dict[str, Counter[str]] = {}
        """Messages that were held back since one of that kind was sent, by kind and incident."""
        self.waiting: list[str] = []
        """Ids of incidents of which a message is held back."""

    def held(self, announcement: Announcement) -> int:
        """Messages about other incidents of this kind that were held back since the last one."""
        counts = self._held.get(announcement.labels["kind"], Counter())
        return counts.total() - counts[announcement.incident_id]

    def allows(self, announcement: Announcement, now_unix_ns: int) -> bool:
        """Whether receivers may be notified of the change of an incident now.

        Args:
            announcement: of the change.
            now_unix_ns: the time of the change, or when it is looked at again.
        """
        notified = self._lately(announcement.labels["kind"], now_unix_ns)
        new = sum(one.is_new for one in notified)
        if _is_new(notified, announcement):
            return new < NEW_CAUSES_PER_HOUR
        return len(notified) - new < MESSAGES_PER_HOUR

    def record_sent(self, announcement: Announcement, now_unix_ns: int) -> None:
        """Record that receivers are notified."""
        kind = announcement.labels["kind"]
        notified = self._lately(kind, now_unix_ns)
        about = (announcement.incident_id, _gravity(announcement), list(announcement.places))
        self._reported[kind] = [*notified, _Reported(now_unix_ns, *about, _is_new(notified, announcement))]
        self._held.pop(kind, None)
        self.drop(announcement.incident_id)

    def hold(self, announcement: Announcement) -> None:
        """Record that a message about it is held back."""
        incident_id = announcement.incident_id
        self._held.setdefault(announcement.labels["kind"], Counter())[incident_id] += 1
        self.drop(incident_id)
        self.waiting.append(incident_id)

    def drop(self, incident_id: str) -> None:
        """Forget messages that are held back about an incident: nobody needs them any more."""
        self.waiting = [one for one in self.waiting if one != incident_id]

    def _lately(self, kind: str, now_unix_ns: int) -> list[_Reported]:
        return [one for one in self._reported.get(kind, ()) if now_unix_ns - one.at_unix_ns < HOUR_NS]

    def state(self) -> dict[str, Any]:
        """The state to store, in JSON types."""
        notified = {kind: [asdict(one) for one in all_] for kind, all_ in self._reported.items()}
        held = {kind: dict(counts) for kind, counts in self._held.items()}
        return {"told": notified, "held": held, "waiting": list(self.waiting)}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> MessageLimit:
        """The limit of which `state` returned this."""
        limit = cls()
        limit._reported = {kind: [_Reported(**one) for one in all_] for kind, all_ in state["told"].items()}
        limit._held = {kind: Counter(counts) for kind, counts in state["held"].items()}
        limit.waiting = list(state["waiting"])
        return limit


def _is_new(notified: list[_Reported], announcement: Announcement) -> bool:
    """Whether a message reports a new cause, or the end of an incident that did; the first of an hour has none."""
    if announcement.type == MESSAGE_TYPES["resolved"]:
        return any(one.is_new and one.incident == announcement.incident_id for one in notified)
    known = {place for one in notified for place in one.places}
    graver = _gravity(announcement) > max((one.gravity for one in notified), default=len(GRAVITY))
    return graver or bool(notified and not known.issuperset(announcement.places))


def _gravity(announcement: Announcement) -> int:
    return GRAVITY.index(Severity(announcement.labels["severity"]))
