"""The headline of an incident (kind, severity, scope) and its place. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rankwatch_detectors.base import Kind, Severity
from rankwatch_detectors.scope import WHOLE_JOB, IncidentScope, ScopeLevel
from rankwatch_service.incidents.kinds import KINDS
from rankwatch_service.incidents.model import GRAVITY, Incident
from rankwatch_service.incidents.placement import Placement


@dataclass(frozen=True, slots=True)
class Headline:
    """An incident in one line."""

    kind: Kind
    severity: Severity
    scope: IncidentScope

    @classmethod
    def of(cls, incident: Incident) -> Headline:
        """An incident's headline as it is now."""
        return cls(incident.kind, incident.severity, incident.scope)

    def graver_than(self, other: Headline) -> bool:
        """Whether it is more urgent."""
        return GRAVITY.index(self.severity) > GRAVITY.index(other.severity)

    def widened(self, before: Headline) -> bool:
        """Whether its scope has widened to a host or to the job."""
        return self.scope != before.scope and self.scope.level in (ScopeLevel.JOB, ScopeLevel.HOST)


def locate(incident: Incident, placement: Placement) -> None:
    """Set scope, hosts and devices. The scope is a host if most of its ranks are affected, but not all of the job."""
    incident.scope = incident.first.scope if len(incident.first.hosts) < 2 else WHOLE_JOB
    incident.hosts = placement.hosts_of(incident.ranks) or list(incident.first.hosts)
    incident.devices = placement.devices_of(incident.ranks)
    if incident.scope.host is not None and not incident.hosts:
        incident.hosts = [incident.scope.host]
    (host, *others) = incident.hosts or [""]
    on_host = placement.ranks_of(host)
    elsewhere = len(on_host) < placement.world_size
    most = len(on_host) > 1 and 2 * len(incident.ranks) > len(on_host)
    if KINDS[incident.kind].is_host_wide and not others and elsewhere and most:
        incident.scope = IncidentScope.of_host(host)
        incident.summary = f"{len(incident.ranks)} of {len(on_host)} ranks of host {host}: {incident.first.summary}"
