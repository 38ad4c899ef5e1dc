"""Decides who is told about an incident. Pure; stream calls it inside its transaction and writes what it returns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rankwatch_service.policy.notification import MESSAGE_TYPES, incident_message, message_id


@dataclass(frozen=True, slots=True)
class Routed:
    """One receiver that an incident concerns, and the silence that mutes it, if one does."""

    receiver: str
    silence_id: str | None


def receivers_for(
    incident: Mapping[str, Any],
    receivers: Iterable[Mapping[str, Any]],
    silences: Iterable[Mapping[str, Any]],
    now_unix_ns: int,
) -> list[Routed]:
    """Name the receivers that this incident concerns, in order of their names.

    A receiver's empty list of kinds, severities or jobs matches all. An incident has the kinds of its consequences too:
    whoever wants to hear of hangs hears of one that a slow rank has brought. A silence mutes from its start up to, not
    including, its end; the receiver is still named so that the outbox can say why it was not told.

    Args:
        incident: columns of the `incident` row.
        receivers: columns of the `receiver` rows; those not enabled are left out.
        silences: columns of the `silence` rows.
        now_unix_ns: stream time.
    """
    muting = [silence["id"] for silence in silences if mutes(silence, incident, now_unix_ns)]
    silence_id = min(muting, default=None)
    concerned = sorted(receiver["name"] for receiver in receivers if _concerns(receiver, incident))
    return [Routed(name, silence_id) for name in concerned]


def mutes(silence: Mapping[str, Any], incident: Mapping[str, Any], now_unix_ns: int) -> bool:
    """Tell whether a silence mutes an incident now.

    A scope "host:NAME" or "rank:N" also mutes incidents that lie wholly on that host or rank, whatever their own scope.
    """
    if not silence["starts_unix_ns"] <= now_unix_ns < silence["ends_unix_ns"]:
        return False
    if silence["job"] not in ("", incident["job"]) or silence["kind"] not in ("", incident["kind"]):
        return False
    scope = silence["scope"]
    return (
        scope in ("", incident["scope"])
        or [scope] == [f"host:{host}" for host in incident["hosts"]]
        or [scope] == [f"rank:{rank}" for rank in incident["ranks"]]
    )


def outbox_rows(
    incident: Mapping[str, Any],
    transition: Mapping[str, Any],
    receivers: Iterable[Mapping[str, Any]],
    silences: Iterable[Mapping[str, Any]],
    links: Mapping[str, str],
    now_unix_ns: int,
    told_to: Collection[str] | None = None,
) -> list[dict[str, Any]]:
    """Compose the outbox rows for one transition: one for each receiver it concerns, due now, or silenced.

    Transitions that receivers are not told about (acknowledged, commented, evidence) give none. To a receiver that was
    not told of the incident before, since it was not severe enough or was silenced, it opens now; and it does not end
    for one that never heard of it. The ids are derived, so that inserting the same rows again can be ignored.

    Args:
        incident: columns of the `incident` row.
        transition: columns of the `incident_transition` row.
        receivers: columns of the `receiver` rows.
        silences: columns of the `silence` rows.
        links: where to read on, by name.
        now_unix_ns: stream time.
        told_to: names of the receivers that were told of the incident before; None where that is not known.
    """
    if transition["what"] not in MESSAGE_TYPES:
        return []
    routed = receivers_for(incident, receivers, silences, now_unix_ns)
    new = set() if told_to is None else {route.receiver for route in routed} - set(told_to)
    if transition["what"] == "resolved":
        routed = [route for route in routed if route.receiver not in new]
    if not routed:
        return []
    bodies = {
        first: incident_message(incident, transition, links, first=first)
        for first in {r.receiver in new for r in routed}
    }
    return [
        {
            "id": message_id(incident["id"], transition["number"], route.receiver),
            "receiver": route.receiver,
            "incident_id": incident["id"],
            "transition": transition["number"],
            "body": bodies[route.receiver in new],
            "state": "waiting" if route.silence_id is None else "silenced",
            "tries": 0,
            "next_try_unix_ns": now_unix_ns,
            "created_unix_ns": now_unix_ns,
            "delivered_unix_ns": None,
        }
        for route in routed
    ]


def _concerns(receiver: Mapping[str, Any], incident: Mapping[str, Any]) -> bool:
    kinds = {incident["kind"], *(part["kind"] for part in incident["consequences"])}
    return bool(
        receiver["enabled"]
        and (not receiver["kinds"] or kinds & set(receiver["kinds"]))
        and (not receiver["severities"] or incident["severity"] in receiver["severities"])
        and (not receiver["jobs"] or incident["job"] in receiver["jobs"])
    )
