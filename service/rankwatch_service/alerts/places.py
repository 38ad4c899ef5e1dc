"""The jobs that alerts concern: those that their labels name, else those on the hosts that their labels name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from sqlalchemy import Connection, and_, select

from rankwatch_detectors.alerts import host_key, is_same_host
from rankwatch_service.alerts.alert import Alert
from rankwatch_service.names import is_name
from rankwatch_service.store.models import AgentView, Job

SEEN_NS: Final = 3_600 * 10**9
"""A host is one of a job if an agent on it has reported within this time: when it fails, its alert comes later."""

JOBS_PER_ALERT_MAX: Final = 16
"""Jobs that one alert is reported in; further ones on the host are left out."""


def read_jobs(
    connection: Connection, alerts: Sequence[Alert], job_labels: Sequence[str], now_unix_ns: int
) -> dict[str, list[str]]:
    """The jobs that each alert concerns, by fingerprint; jobs that have ended are none.

    Args:
        connection: of a `read`.
        alerts: the alerts.
        job_labels: labels that may name a job, best first.
        now_unix_ns: decides who is on a host.
    """
    named = {alert.fingerprint: [name for name in alert.job_names(job_labels) if is_name(name)] for alert in alerts}
    wanted = sorted({name for names in named.values() for name in names})
    running = set(connection.scalars(select(Job.name).where(Job.name.in_(wanted), Job.state != "ended")))
    found = {key: [name for name in names if name in running][:1] for key, names in named.items()}
    by_host = [alert for alert in alerts if not found[alert.fingerprint] and alert.hosts]
    if by_host:
        hosts = _hosts(connection, now_unix_ns)
        for alert in by_host:
            found[alert.fingerprint] = _on_hosts(alert, hosts)
    return found


def visible(jobs: Mapping[str, Sequence[str]], may_see: Callable[[str], bool]) -> dict[str, list[str]]:
    """The same with those jobs alone that somebody may see."""
    return {key: [name for name in names if may_see(name)] for key, names in jobs.items()}


def _hosts(connection: Connection, now_unix_ns: int) -> dict[str, list[tuple[str, str]]]:
    """Hosts with the jobs whose running attempt is on them, by the key of the host."""
    running = and_(Job.name == AgentView.job, Job.attempt == AgentView.attempt, Job.state != "ended")
    seen = select(AgentView.host, AgentView.job).join(Job, running).where(AgentView.at_unix_ns > now_unix_ns - SEEN_NS)
    found: dict[str, list[tuple[str, str]]] = {}
    for host_and_agent, job in connection.execute(seen.order_by(AgentView.job)):
        host = host_and_agent.partition("/")[0]
        found.setdefault(host_key(host), []).append((host, job))
    return found


def _on_hosts(alert: Alert, hosts: Mapping[str, Sequence[tuple[str, str]]]) -> list[str]:
    here = (job for name in alert.hosts for host, job in hosts.get(host_key(name), ()) if is_same_host(name, host))
    return sorted(set(here))[:JOBS_PER_ALERT_MAX]
