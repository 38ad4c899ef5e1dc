"""Incidents on the record of a host and its devices, which outlive jobs. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rankwatch_detectors.base import Kind, Severity
from rankwatch_service.incidents.kinds import KINDS
from rankwatch_service.incidents.model import Incident, derived, unix_ns
from rankwatch_service.incidents.placement import Placement


@dataclass(frozen=True, slots=True)
class HostIncident:
    """One incident on the record of one host and device."""

    host: str
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
        return derived(self.incident_id, self.host, self.device_uuid)


def host_incidents(incident: Incident, placement: Placement, now_s: float) -> list[HostIncident]:
    """What goes on the record of the hosts of its ranks; nothing for kinds that say nothing about hardware."""
    if not KINDS[incident.kind].is_on_record:
        return []
    if not incident.ranks and incident.severity is Severity.INFO:
        return []  # a host that training did not feel, as most ports that flap once
    at = (incident.id, incident.job, incident.kind, incident.severity, unix_ns(now_s))
    if not incident.ranks:
        return [HostIncident(host, "", *at) for host in incident.hosts]
    return [
        HostIncident(
            host,
            next(iter(placement.devices_of([rank])), ""),
            *at,
        )
        for rank in incident.ranks
        for host in placement.hosts_of([rank])
    ]
