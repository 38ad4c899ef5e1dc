"""A group of incidents under one route, and what its receivers were last notified of."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from enum import StrEnum
from hashlib import sha256
from typing import Any

import msgspec


class MessageReason(StrEnum):
    """Why a message about a group is sent."""

    FIRST = "first notification"
    NEW = "new incidents in group"
    RESOLVED = "new resolved incidents"
    ALL_RESOLVED = "all incidents resolved"
    REPEAT = "repeat interval elapsed"
    ESCALATED = "not acknowledged in time"


class GroupMember(msgspec.Struct):
    """One incident in a group."""

    incident_id: str
    labels: dict[str, str]
    brief: dict[str, Any]
    """What messages say of it."""
    is_open: bool = True
    is_acknowledged: bool = False
    notified_unix_ns: int | None = None
    """When the route's receiver was first notified of it."""

    @property
    def fingerprint(self) -> str:
        """Changes when its labels do: an incident that becomes graver is news."""
        text = json.dumps([self.incident_id, sorted(self.labels.items())])
        return sha256(text.encode()).hexdigest()[:16]


class LastMessage(msgspec.Struct, frozen=True):
    """What one receiver was last notified of, about one group."""

    at_unix_ns: int
    open: frozenset[str]
    """Fingerprints of open incidents."""
    resolved: frozenset[str]
    incidents: frozenset[str]
    """Ids of open incidents."""


class Group(msgspec.Struct):
    """Incidents that share their messages."""

    key: str
    route_key: str
    labels: dict[str, str]
    began_unix_ns: int
    next_flush_unix_ns: int
    """A flush sends a message if there is a reason to."""
    members: dict[str, GroupMember] = {}
    """By id of the incident."""
    has_flushed: bool = False
    flushes: int = 0
    """Messages sent so far, which number them."""
    last: dict[str, LastMessage] = {}
    """By receiver."""

    def message_id(self, receiver: str) -> str:
        """Id of message number `flushes` to a receiver: the hash of group, flush and receiver.

        The beginning of the group is part of it, since a group that has ended may begin anew.
        """
        text = f"{self.key}\n{self.began_unix_ns}\n{self.flushes}\n{receiver}"
        return f"msg_{sha256(text.encode()).hexdigest()[:32]}"

    def reason(
        self, receiver: str, members: Iterable[GroupMember], now_unix_ns: int, repeat_interval_s: float
    ) -> MessageReason | None:
        """Why a receiver has to be notified of these members now; None if nothing is new to it."""
        listed = list(members)
        still_open = {member.fingerprint for member in listed if member.is_open}
        resolved = {member.fingerprint for member in listed if not member.is_open}
        last = self.last.get(receiver)
        if last is None:
            return MessageReason.FIRST if still_open else None
        if not still_open <= last.open:
            return MessageReason.NEW
        if not still_open:
            return MessageReason.ALL_RESOLVED if last.open else None
        if not resolved <= last.resolved:
            return MessageReason.RESOLVED
        waits_for_people = any(member.is_open and not member.is_acknowledged for member in listed)
        is_old = last.at_unix_ns < now_unix_ns - int(repeat_interval_s * 1e9)
        return MessageReason.REPEAT if is_old and waits_for_people else None


class GroupMessage(msgspec.Struct, frozen=True):
    """One message about a group to one receiver."""

    id: str
    receiver: str
    group_key: str
    flush: int
    """Number of the message within the group, from 1."""
    reason: MessageReason
    group_labels: Mapping[str, str]
    open: tuple[GroupMember, ...]
    resolved: tuple[GroupMember, ...]
    at_unix_ns: int
