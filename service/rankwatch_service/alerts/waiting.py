"""Alerts that fire and that no incident has: which they are, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sqlalchemy import Connection, func, select

from rankwatch_detectors.alerts import ALERTS_MAX, NAMES_MAX
from rankwatch_service.alerts.alert import HOST_LABELS, Alert
from rankwatch_service.alerts.rows import NO_JOB
from rankwatch_service.store.models import AlertRow

WAITING: Final = AlertRow.is_reported.is_(False)
"""Selects them."""


def waiting_count(connection: Connection) -> int:
    """How many alerts wait."""
    return connection.scalar(select(func.count()).where(WAITING)) or 0


def why_it_waits(alert: Alert, job: str, job_labels: Sequence[str]) -> str:
    """Why no incident has an alert, in sentences.

    Args:
        alert: it waits.
        job: that it concerns; `NO_JOB`: it was found to concern none.
        job_labels: labels that may name a job, best first.

    >>> why_it_waits(Alert("f", {"job_name": "gpt-2"}, {}, 0, 0), NO_JOB, ["job_name"])
    'No running job that its sender may access is named gpt-2.'
    """
    if job != NO_JOB:
        limits = f"{ALERTS_MAX} alerts or {NAMES_MAX} names of alerts"
        return f"Job {job} has {limits}, which is the limit: it is reported when there is room."
    names, hosts = alert.job_names(job_labels), alert.hosts
    of_names = f"No running job that its sender may access is named {' or '.join(names)}."
    of_hosts = (
        f"No agent of a running job that its sender may access has reported from {' or '.join(hosts)} for an hour."
    )
    told = [text for text, given in ((of_names, names), (of_hosts, hosts)) if given]
    return " ".join(told) or f"No label names a job ({', '.join(job_labels)}) or a host ({', '.join(HOST_LABELS)})."
