"""What a sender reports of alerts, taken: their jobs are looked up, and stream is told what has changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sqlalchemy import Engine

from rankwatch_service.alerts.alert import Alert
from rankwatch_service.alerts.places import read_jobs, visible
from rankwatch_service.alerts.rows import NO_JOB, AlertResult, AlertRows, jobs_of_rows
from rankwatch_service.log.control_log import ControlLog
from rankwatch_service.store.engine import read, write


def take_alerts(
    engine: Engine,
    controls: ControlLog,
    alerts: Sequence[Alert],
    job_labels: Sequence[str],
    may_see: Callable[[str], bool],
    now_unix_ns: int,
) -> list[AlertResult]:
    """Take alerts; returns what became of each.

    Args:
        engine: of the database.
        controls: the control log.
        alerts: with different fingerprints.
        job_labels: labels that may name a job, best first.
        may_see: whether the sender may access a job.
        now_unix_ns: the present time.
    """
    with read(engine) as connection:
        jobs = read_jobs(connection, alerts, job_labels, now_unix_ns)
        firing_in = jobs_of_rows(connection, jobs.keys())
    # Outside of the read, since whoever is restricted to a project asks the database.
    of_jobs = {job for job in firing_in if job == NO_JOB or may_see(job)}
    jobs = visible(jobs, may_see)
    with write(engine) as connection:
        return AlertRows(connection, controls, now_unix_ns).take(alerts, jobs, of_jobs)
