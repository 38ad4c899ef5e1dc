"""The headline of an incident (kind, severity, scope) and its place. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rankwatch_detectors.base import Finding, Kind, Severity
from rankwatch_detectors.scope import WHOLE_JOB, IncidentScope, ScopeLevel
from rankwatch_service.incidents.hang.first_steps import PIDS, PIDS_MAX
from rankwatch_service.incidents.kinds import KINDS
from rankwatch_service.incidents.model import GRAVITY, Incident, Part, lowered
from rankwatch_service.incidents.placement import Placement

UNFELT_STEPS: Final = 32
UNFELT_S: Final = 60.0
"""Training that has gone on for so many steps and seconds beside a fault of a device does not feel it."""


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
        """Whether its scope has widened to a host, to a switch or to the job."""
        wide = (ScopeLevel.JOB, ScopeLevel.SWITCH, ScopeLevel.HOST)
        return self.scope != before.scope and self.scope.level in wide


def locate(incident: Incident, placement: Placement) -> None:
    """Set scope, hosts and devices, and the process ids of ranks that hang.

    The scope is a host or a switch if most of its ranks are affected, and the job has ranks elsewhere.
    """
    incident.scope = incident.first.scope if len(incident.first.hosts) < 2 else WHOLE_JOB
    incident.hosts = placement.hosts_of(incident.ranks) or list(incident.first.hosts)
    incident.devices = placement.devices_of(incident.ranks)
    if incident.scope.host is not None and not incident.hosts:
        incident.hosts = [incident.scope.host]
    if incident.kind is Kind.HANG and (pids := placement.pids_of(incident.ranks[:PIDS_MAX])):
        incident.evidence[PIDS] = pids
    together = len(incident.first.hosts) > 1
    if not incident.hosts or not (together or KINDS[incident.kind].is_host_wide):
        return
    if together and incident.evidence.get("hosts_hit", 0) > len(incident.hosts):  # only some of them are listed
        return
    scope, ranks = _common_place(incident.hosts, placement)
    hosts = frozenset(incident.hosts)
    affected = (
        [rank for rank in ranks if not hosts.isdisjoint(placement.hosts_of([rank]))] if together else incident.ranks
    )
    most = len(ranks) > 1 and 2 * len(affected) > len(ranks)
    if most and len(ranks) < placement.world_size and scope != incident.scope:
        incident.scope = scope
        incident.summary = (
            f"{len(affected)} of {len(ranks)} ranks of {scope.level} {scope.name}: {incident.first.summary}"
        )


def _common_place(hosts: Sequence[str], placement: Placement) -> tuple[IncidentScope, list[int]]:
    """The narrowest part of the job that contains these hosts, and its ranks."""
    if len(hosts) == 1:
        return IncidentScope.of_host(hosts[0]), placement.ranks_of(hosts[0])
    switch = placement.switch_of(hosts)
    return (IncidentScope.of_switch(switch), placement.ranks_below(switch)) if switch else (WHOLE_JOB, [])


def grade(incident: Incident, found: Severity) -> None:
    """Take the severity of a finding: the gravest counts, one grade lower while training does not feel the device."""
    incident.found_severity = max(incident.found_severity or incident.severity, found, key=GRAVITY.index)
    incident.unfelt &= _is_of_devices(incident)
    incident.severity = lowered(incident.found_severity) if incident.unfelt else incident.found_severity


def begin_grade(incident: Incident) -> None:
    """The first severity. That a device is degraded is seen in its counters alone, before anybody feels it; whether
    training goes on beside a fault is seen later (`goes_on_beside`).
    """
    incident.unfelt = KINDS[incident.kind].is_of_device and KINDS[incident.kind].is_condition
    grade(incident, incident.severity)


def goes_on_beside(incident: Incident, now_s: float) -> bool:
    """Count a step that training has made; whether it is now known that training does not feel the device."""
    if incident.unfelt or not _is_of_devices(incident):
        return False
    incident.steps += 1
    if incident.steps < UNFELT_STEPS or now_s < incident.opened_time_s + UNFELT_S:
        return False
    incident.unfelt = True
    grade(incident, incident.severity)
    return True


def keep(incident: Incident, part: Part, finding: Finding) -> None:
    """Add a finding's part to an incident, which is graded anew."""
    incident.add(part)
    grade(incident, finding.severity)
    incident.updated_time_s = finding.detected_time_s


def _is_of_devices(incident: Incident) -> bool:
    """Whether all its parts are about devices alone."""
    return all(KINDS[part.kind].is_of_device for part in incident.parts)
