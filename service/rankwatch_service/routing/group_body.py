"""The body of a message about a group of incidents. The same message gives the same bytes."""

from __future__ import annotations

from hashlib import sha256
from typing import Any, Final

from rankwatch_service.policy.notification import BODY_BYTES_MAX, encoded, iso_time
from rankwatch_service.routing.group import GroupMember, GroupMessage

INCIDENTS_LISTED_MAX: Final = 20
"""Incidents described in one message, open ones first; `incident_count` says how many there are."""

SUMMARY_CHARS_MAX: Final = 400
_GRAVEST_FIRST: Final = ("critical", "warning", "info")


def group_job(message: GroupMessage) -> str:
    """The job that all incidents of a message are about; empty if there are several."""
    jobs = {member.brief["job"] for member in (*message.open, *message.resolved)}
    return jobs.pop() if len(jobs) == 1 else ""


def group_body(message: GroupMessage) -> bytes:
    """Compose the JSON body {type, timestamp, data}, of at most `BODY_BYTES_MAX` bytes."""
    members = (*message.open, *message.resolved)
    gravest = min(message.open or members, key=_gravity)
    labels = [set(member.labels.items()) for member in members]
    incidents = [_described(member) for member in members[:INCIDENTS_LISTED_MAX]]
    data = {
        "text": _text(gravest, len(members), len(message.open)),
        "severity": gravest.brief["severity"],
        "links": gravest.brief["links"],
        "id": f"grp_{sha256(message.group_key.encode(errors='replace')).hexdigest()[:24]}",
        "job": group_job(message),
        "status": "firing" if message.open else "resolved",
        "receiver": message.receiver,
        "reason": str(message.reason),
        "group_key": message.group_key,
        "flush": message.flush,
        "group_labels": dict(message.group_labels),
        "common_labels": dict(sorted(set.intersection(*labels))),
        "incident_count": len(members),
        "open_count": len(message.open),
        "incidents": incidents,
    }
    body = {"type": f"group.{data['status']}", "timestamp": iso_time(message.at_unix_ns), "data": data}
    while len(found := encoded(body)) > BODY_BYTES_MAX and incidents:
        incidents.pop()
    return found


def _gravity(member: GroupMember) -> int:
    return _GRAVEST_FIRST.index(member.brief["severity"])


def _text(gravest: GroupMember, count: int, open_count: int) -> str:
    """The three lines of the gravest incident, and how many there are beside it."""
    text = str(gravest.brief["text"])
    return text if count == 1 else f"{count} incidents, {open_count} of them unresolved. {text}"


def _described(member: GroupMember) -> dict[str, Any]:
    summary = member.brief["summary"]
    shortened = summary if len(summary) <= SUMMARY_CHARS_MAX else summary[: SUMMARY_CHARS_MAX - 1] + "…"
    state = "resolved" if not member.is_open else "acknowledged" if member.is_acknowledged else "open"
    said = {name: value for name, value in member.brief.items() if name != "text"}
    return {**said, "summary": shortened, "state": state}
