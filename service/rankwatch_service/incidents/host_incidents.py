"""Incidents on the record of a host and its devices, which outlive jobs. Pure.

Only incidents that concern hardware go there, so by kind (`KINDS`) and, for some kinds, by what was found. A hang
or a lost rank that a device or host has caused has the kind of its cause by then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from rankwatch_detectors.base import Kind, Severity
from rankwatch_service.incidents.kinds import KINDS
from rankwatch_service.incidents.model import Incident, Placement, derived, unix_ns
from rankwatch_service.names import plain_host

BY_EVIDENCE: Final[Mapping[Kind, Callable[[Incident], bool]]] = MappingProxyType(
    {
        # Errors that are no more than information are most likely the program's; a driver that is silent has none.
        Kind.DEVICE_FAULT: lambda one: one.first.severity is not Severity.INFO or not one.evidence.get("xids"),
        # Want of memory, and a container's limit of processor time, are due to what runs there.
        Kind.HOST_DEGRADED: lambda one: one.evidence.get("rule") not in ("oom", "memory", "throttled"),
        # One replica's bits. Of two replicas nobody knows which is wrong, and a gradient norm is a hint.
        Kind.CORRUPTION: lambda one: one.cause == "worker" and "fingerprints" in one.evidence,
        Kind.STRAGGLER: lambda one: one.cause in ("device", "host"),
    }
)
"""Of kinds of which not every incident concerns hardware: whether this one does."""


@dataclass(frozen=True, slots=True)
class HostIncident:
    """One incident on the record of one host and device."""

    host: str
    host_id: str
    """The id of the host: that of the agent of its ranks. Empty if this agent has not enrolled."""
    device_uuid: str
    """Empty if the rank reported none."""
    incident_id: str
    job: str
    kind: Kind
    severity: Severity
    at_unix_ns: int

    @property
    def id(self) -> str:
        """The same for the same incident, host and device."""
        return derived(self.incident_id, self.host, self.host_id, self.device_uuid)


def host_incidents(incident: Incident, placement: Placement, now_s: float) -> list[HostIncident]:
    """What goes on the record of the hosts of its ranks; nothing if it says nothing about hardware, or is information,
    as what training did not feel is. Hosts on which the job has no rank have nothing of it on their record.
    """
    if incident.severity is Severity.INFO or not _is_of_hardware(incident):
        return []
    at = (incident.id, incident.job, incident.kind, incident.severity, unix_ns(now_s))
    if incident.ranks:
        places = [(rank, next(iter(placement.devices_of([rank])), "")) for rank in incident.ranks]
    else:
        places = [(rank, "") for host in incident.hosts for rank in placement.ranks_of(host)[:1]]
    return [
        HostIncident(plain_host(host), placement.host_id_of(rank), device, *at)
        for rank, device in places
        for host in placement.hosts_of([rank])
    ]


def _is_of_hardware(incident: Incident) -> bool:
    says = BY_EVIDENCE.get(incident.kind)
    return KINDS[incident.kind].is_on_record and (says is None or says(incident))
