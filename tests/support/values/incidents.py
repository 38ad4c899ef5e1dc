"""Incidents, transitions, receivers and silences: as values, and as rows of their tables."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from rankwatch import wire
from rankwatch_detectors.base import Change, Finding, Kind, Severity
from rankwatch_detectors.scope import IncidentScope, ScopeLevel
from rankwatch_service.incidents.model import IncidentVersion, Transition, TransitionKind
from rankwatch_service.job.topology_state import TopologyState
from rankwatch_service.notify.message_limit import MessageLimit
from rankwatch_service.notify.pipeline import Notification, ReceiverRoute, Silence, Situation, notifications
from rankwatch_service.notify.router import outbox_row
from rankwatch_service.policy.actions import CommandRequest
from rankwatch_service.policy.announcement import Announcement, incident_announcement
from rankwatch_service.policy.control_records import JobOwnership
from rankwatch_service.policy.notification import MESSAGE_TYPES, NOBODYS, command_data, incident_data, message_body
from rankwatch_service.store.rows import incident_row as row_of

NOON_UNIX_NS = 1_760_000_000_000_000_000
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8GKYo="


def incident_version(**changes: Any) -> IncidentVersion:
    values: dict[str, Any] = {
        "id": "inc_1",
        "job": "gpt-small",
        "attempt": "launch.0",
        "kind": Kind.STRAGGLER,
        "scope": IncidentScope.of_rank(3),
        "episode": 1,
        "severity": Severity.WARNING,
        "state": "open",
        "ranks": (3,),
        "hosts": ("node-a",),
        "devices": ("GPU-3",),
        "onset_step": 480,
        "detected_step": 500,
        "resolved_step": None,
        "onset_unix_ns": NOON_UNIX_NS - 3_000_000_000,
        "detected_unix_ns": NOON_UNIX_NS,
        "updated_unix_ns": NOON_UNIX_NS,
        "resolved_unix_ns": None,
        "score": 12.5,
        "confidence": 0.99,
        "cause": "worker",
        "summary": "Rank 3 runs at 0.62 of its peers since step 480",
        "evidence": {"busy_s": 0.161, "peers_busy_s": 0.1, "rate": 0.62},
        "consequences": (),
        "changes_before": (),
        "impact_gpu_hours_per_hour": 1.5,
        "suggestion": {
            "action": "pause",
            "reason": "the rank is slow on its own",
            "cost_gpu_hours": 0.1,
            "alternatives": [],
        },
        "checkpoint": "memory:launch.0:450",
        "transitions": 1,
        "acknowledged_by": None,
    }
    return IncidentVersion(**values | changes)


def incident_row(**changes: Any) -> dict[str, Any]:
    return row_of(incident_version()) | changes


def transition(what: str = "opened", number: int = 1, text: str = "", **incident: Any) -> Transition:
    """A transition of an incident with these fields."""
    time_s = NOON_UNIX_NS / 1e9 + number * 1e-3
    return Transition(number, TransitionKind(what), "stream", text, {}, time_s, incident_version(**incident))


def announced(
    what: str = "opened", number: int = 1, ownership: JobOwnership = NOBODYS, **incident: Any
) -> Announcement:
    """The announcement of a transition of an incident with these fields."""
    announcement = incident_announcement(transition(what, number, **incident), {}, ownership)
    assert announcement is not None
    return announcement


def routed(
    announcement: Announcement,
    receivers: Iterable[ReceiverRoute],
    silences: Sequence[Silence] = (),
    notified: Collection[str] = (),
    now_unix_ns: int = NOON_UNIX_NS,
) -> list[Notification]:
    """Who is notified of an announcement, if there were no messages like it."""
    return notifications(Situation(announcement, silences, notified, MessageLimit(), now_unix_ns), receivers)


def notified(
    what: str, number: int, to: tuple[str, ...] = ("pager",), *, now_unix_ns: int, **incident: Any
) -> list[dict[str, Any]]:
    """Rows of the outbox: what these receivers are sent."""
    announcement, before = announced(what, number, **incident), () if what == "opened" else to
    sent = routed(announcement, [receiver_route(name) for name in to], notified=before, now_unix_ns=now_unix_ns)
    return [outbox_row(announcement, one) for one in sent]


def incident_message(
    change: Transition, links: Mapping[str, str], ownership: JobOwnership = NOBODYS, world_size: int = 0
) -> bytes:
    """The body of the message about a transition."""
    data = incident_data(change, links, ownership, world_size)
    return message_body(MESSAGE_TYPES[change.what], change.at_unix_ns, data)


def command_message(request: CommandRequest, links: Mapping[str, str]) -> bytes:
    """The body of the message that asks for an approval."""
    return message_body("command.approval_needed", request.requested_unix_ns, command_data(request, links))


def receiver_route(name: str = "pager", **changes: Any) -> ReceiverRoute:
    return ReceiverRoute(name, **changes)


def silence(**changes: Any) -> Silence:
    values = {"job": "", "kind": "", "scope": "", "starts_unix_ns": NOON_UNIX_NS - 1}
    return Silence(**values | {"ends_unix_ns": NOON_UNIX_NS + 60_000_000_000} | changes)


def receiver_row(name: str = "pager", **changes: Any) -> dict[str, Any]:
    row = {
        "name": name,
        "url": "http://127.0.0.1:9/hook",
        "secret": SECRET,
        "kinds": [],
        "severities": [],
        "jobs": [],
        "enabled": True,
        "disabled_reason": "",
        "created_unix_ns": NOON_UNIX_NS,
    }
    return row | changes


def finding(kind: Kind, change: Change = Change.OPEN, scope: str = "job", **fields: Any) -> Finding:
    where = IncidentScope.parse(scope)
    blank = {
        "attempt": "l.0",
        "severity": Severity.WARNING,
        "ranks": (where.number,) if where.level is ScopeLevel.RANK else (),
        "onset_step": 100,
        "detected_step": 101,
        "onset_time_s": 1_000.0,
        "detected_time_s": 1_001.0,
        "score": 10.0,
        "confidence": 1.0,
        "summary": f"{kind} of {scope}",
        "evidence": {},
    }
    return Finding(kind=kind, change=change, scope=where, **(blank | fields))


def topology_state(ranks: int = 8, per_host: int = 4, hosts_per_switch: int = 0) -> TopologyState:
    made = TopologyState()
    for rank in range(ranks):
        host = rank // per_host
        switch = f"leaf-{host // hosts_per_switch}" if hosts_per_switch else ""
        made.learn(
            [
                wire.RankInfo(
                    rank,
                    ranks,
                    rank % per_host,
                    f"node-{host}",
                    f"GPU-{rank}",
                    can=("rollback", "rollback_memory", "rollback_disk"),
                    switch=switch,
                )
            ]
        )
    return made
