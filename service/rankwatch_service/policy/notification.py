"""Composes the body of a webhook message. Pure: the same incident and transition, or the same command, give the same
bytes, so that stream can compose a message again after a restart and the outbox row stays what it was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, Final
from urllib.parse import quote

from rankwatch_service.incidents.answers import confidence_words
from rankwatch_service.incidents.model import Transition
from rankwatch_service.names import ALL_JOBS, short
from rankwatch_service.numbers import as_json, plain
from rankwatch_service.policy.actions import CommandRequest
from rankwatch_service.policy.control_records import JobOwnership
from rankwatch_service.policy.message_text import command_text, command_to_type, incident_text, trial_text, with_held
from rankwatch_service.policy.what_now import what_now

KIND_PLACE: Final = "{kind}"
"""Stands in the URL of runbooks for the kind of an incident."""

MESSAGE_TYPES: Final[Mapping[str, str]] = {
    "opened": "incident.opened",
    "updated": "incident.updated",
    "resolved": "incident.resolved",
}
"""Transitions that receivers are notified of; the others (acknowledged, commented, evidence) are for the pages only."""

APPROVAL_NEEDED: Final = "command.approval_needed"
"""Type of the message about a command that waits until a person approves it."""

NOT_APPROVED: Final = "command.not_approved"
"""Type of the message about a change that weakens approvals and was made on the machine of the service."""

TRIAL: Final = "receiver.test"
"""Type of the message that a person sends to try a receiver."""

NOBODYS: Final = JobOwnership("")
"""Project and owner of a job to which none are assigned."""

BODY_BYTES_MAX: Final = 20 * 1024
"""Largest body; receivers may refuse more. Long texts (stack dumps) are cut first, then whole fields are left out."""

SPARE: Final = ("evidence", "consequences", "suggestion", "devices")
"""Fields of an incident that a body which is too large leaves out, in this order."""

LISTED_MAX: Final = 64
"""Ranks, hosts, devices and consequences listed in a message; `cut` names longer lists. 64 x 40 bytes = 2.5 KB each."""

TEXT_CHARS_MAX: Final = 2_000
"""Longest text inside evidence."""


def message_id(subject_id: str, transition: int, receiver: str) -> str:
    """Id of one notification to one receiver: the same for the same transition, however often it is derived.

    Args:
        subject_id: id of the incident or command that it is about.
        transition: number of the incident's transition; 0 for a command.
        receiver: name of the receiver.
    """
    digest = sha256(f"{subject_id}\n{transition}\n{receiver}".encode()).hexdigest()
    return f"msg_{digest[:32]}"


def page_links(public_url: str, job: str, incident_id: str | None, runbook_url: str = "") -> dict[str, str]:
    """URLs of the pages about a job and, if there is one, about an incident of it, by name.

    Args:
        public_url: where people reach the service.
        job: name of the job.
        incident_id: of the incident.
        runbook_url: URL of the runbook of the incident, with `KIND_PLACE` where its kind belongs; empty: there is none.
    """
    incident = {} if incident_id is None else {"incident": f"{public_url}/incidents/{incident_id}"}
    runbook = {"runbook": runbook_url} if runbook_url else {}
    return incident | {"job": f"{public_url}/jobs/{quote(job, safe='')}"} | runbook


def service_links(public_url: str) -> dict[str, str]:
    """URL of the page about commands to all jobs, by name."""
    return {"service": f"{public_url}/commands"}


def message_body(message_type: str, at_unix_ns: int, data: Mapping[str, Any], held_before: int = 0) -> bytes:
    """Compose the JSON body {type, timestamp, data} of a message.

    Args:
        message_type: such as incident.opened.
        at_unix_ns: when it happened.
        data: of `incident_data` or `command_data`.
        held_before: messages like it that the limit held back before; of an incident alone.

    Returns:
        UTF-8 JSON. That of an incident has at most `BODY_BYTES_MAX` bytes; `data.cut` names what was left out.
    """
    data = dict(data)
    if held_before:
        data |= {"held_before": held_before, "text": with_held(data["text"], held_before)}
    message = {"type": message_type, "timestamp": iso_time(at_unix_ns), "data": data}
    for spare in SPARE:
        body = encoded(message)
        if len(body) <= BODY_BYTES_MAX or spare not in data:
            return body
        data[spare] = type(data[spare])()
        data["cut"] = [*data["cut"], spare]
    return encoded(message)


def command_data(
    request: CommandRequest, links: Mapping[str, str], ownership: JobOwnership = NOBODYS
) -> dict[str, Any]:
    """What a message says of a command that needs an approval, or is done without, in JSON types.

    Args:
        request: the command.
        links: URLs of the pages on which it can be approved or seen, by name.
        ownership: project and owner of the job.
    """
    params = {name: value[:LISTED_MAX] if isinstance(value, list) else value for name, value in request.params.items()}
    return {
        "id": request.id,
        "short_id": short(request.id),
        "text": command_text(request),
        "job": "" if request.job == ALL_JOBS else request.job,
        "project": ownership.project,
        "owner": ownership.owner,
        "attempt": request.attempt,
        "action": request.action,
        "params": _shortened_in(params),
        "reason": _shortened(request.reason),
        "requested_by": request.requested_by,
        "world_size": request.world_size,
        "incident": request.incident_id,
        "expires_time": iso_time(request.expires_unix_ns),
        "links": {name: url for name, url in links.items() if KIND_PLACE not in url},
    }


@dataclass(frozen=True, slots=True)
class TrialMessage:
    """A message that a person sends to try a receiver."""

    id: str
    body: bytes


def trial_message(receiver: str, actor: str, public_url: str, at_unix_ns: int) -> TrialMessage:
    """Compose a message of the type `receiver.test`, of severity info."""
    id_ = message_id(f"test {at_unix_ns}", 0, receiver)
    text = trial_text(receiver, actor)
    data = {"id": id_, "text": text, "job": "", "severity": "info", "links": {"service": f"{public_url}/"}}
    return TrialMessage(id_, encoded({"type": TRIAL, "timestamp": iso_time(at_unix_ns), "data": data}))


def incident_data(
    transition: Transition,
    links: Mapping[str, str],
    ownership: JobOwnership = NOBODYS,
    world_size: int = 0,
    accelerated: bool = True,
) -> dict[str, Any]:
    """What a message says of one transition of an incident, in JSON types.

    Non-finite numbers are the strings NaN, Inf, -Inf; long lists and texts are cut, and `cut` names which.

    Args:
        transition: with the incident as it is after it.
        links: URLs of pages about it, by name, for instance {"incident": "https://…", "job": "https://…"}.
        ownership: project and owner of the job.
        world_size: ranks of the job; 0: unknown.
        accelerated: an hour of a rank is one of a GPU.
    """
    incident = transition.incident
    cut: list[str] = []

    def listed(name: str, values: Sequence[Any]) -> list[Any]:
        if len(values) > LISTED_MAX:
            cut.append(name)
        return [_shortened_in(value) for value in values[:LISTED_MAX]]

    evidence = _shortened_in(incident.evidence)
    if evidence != plain(incident.evidence):
        cut.append("evidence texts")
    return {
        "id": incident.id,
        "short_id": short(incident.id),
        "text": incident_text(incident, world_size, accelerated),
        "job": incident.job,
        "project": ownership.project,
        "owner": ownership.owner,
        "attempt": incident.attempt,
        "world_size": world_size or None,
        "kind": incident.kind,
        "severity": incident.severity,
        "state": incident.state,
        "scope": str(incident.scope),
        "cause": incident.cause,
        "summary": _shortened(incident.summary),
        "ranks": listed("ranks", incident.ranks),
        "rank_count": len(incident.ranks),
        "hosts": listed("hosts", incident.hosts),
        "devices": listed("devices", incident.devices),
        "onset_step": incident.onset_step,
        "detected_step": incident.detected_step,
        "resolved_step": incident.resolved_step,
        "onset_time": iso_time(incident.onset_unix_ns),
        "detected_time": iso_time(incident.detected_unix_ns),
        "resolved_time": iso_time(incident.resolved_unix_ns),
        "score": as_json(incident.score),
        "confidence": as_json(incident.confidence),
        "confidence_words": confidence_words(incident.confidence),
        "impact_gpu_hours_per_hour": as_json(incident.impact_gpu_hours_per_hour),
        "evidence": evidence,
        "consequences": listed("consequences", [consequence.fields() for consequence in incident.consequences]),
        "suggestion": _shortened_in(incident.suggestion),
        "first_steps": what_now(incident, world_size, accelerated).listed,
        "command": command_to_type(incident),
        "held_before": 0,
        "checkpoint": incident.checkpoint,
        "links": {name: url.replace(KIND_PLACE, incident.kind) for name, url in links.items()},
        "cut": cut,
        "transition": {
            "number": transition.number,
            "what": str(transition.what),
            "actor": _shortened(transition.actor),
            "text": _shortened(transition.text),
        },
    }


def _shortened_in(value: Any) -> Any:
    """The value in JSON types alone, with long texts shortened."""
    if isinstance(value, str):
        return _shortened(value)
    if isinstance(value, Mapping):
        return {str(key): _shortened_in(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_shortened_in(item) for item in value]
    return plain(value)


def _shortened(text: str) -> str:
    return text if len(text) <= TEXT_CHARS_MAX else text[: TEXT_CHARS_MAX - 1] + "…"


def iso_time(unix_ns: int | None) -> str | None:
    """A time as ISO 8601 in UTC, to the millisecond; None stays None."""
    if unix_ns is None:
        return None
    seconds, ns = divmod(unix_ns, 1_000_000_000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{ns // 1_000_000:03d}Z"


def encoded(message: Mapping[str, Any]) -> bytes:
    """A message as UTF-8 JSON."""
    # Names and texts of a job may hold lone surrogates, which UTF-8 cannot encode: they must not stop a message.
    return json.dumps(message, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(errors="replace")
