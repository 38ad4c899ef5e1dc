"""Findings and a topology, written out by hand."""

from typing import Any

from rankwatch import wire
from rankwatch_detectors.base import Change, Finding, Kind, Severity
from rankwatch_detectors.scope import IncidentScope, ScopeLevel
from rankwatch_service.job.topology_state import TopologyState


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
