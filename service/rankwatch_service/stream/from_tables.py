"""Restores a job from the tables if it has no readable snapshot and the log has lost its past."""

from __future__ import annotations

from sqlalchemy import Connection, Engine, func, select

from rankwatch_service.job.device_boards import DeviceBoards, DeviceNumber
from rankwatch_service.job.job import JobStream
from rankwatch_service.orders.running_attempt import checkpoints
from rankwatch_service.policy.checkpoint_ledger import Ledger
from rankwatch_service.policy.control_records import JobProject
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import Attempt as AttemptRow
from rankwatch_service.store.models import Incident as IncidentRow
from rankwatch_service.store.models import Job as JobRow
from rankwatch_service.store.models import JobDevice, JobHostDevice, Outbox
from rankwatch_service.store.models import JobProject as ProjectRow
from rankwatch_service.store.rows import incident_of


def restore_from_tables(engine: Engine, job: JobStream) -> None:
    """Restore open incidents, numbering of attempts, and the checkpoint ledger. Detectors begin anew."""
    with read(engine) as connection:
        mine = IncidentRow.job == job.job
        unresolved = select(IncidentRow.__table__).where(mine, IncidentRow.state != "resolved")
        rows = connection.execute(unresolved.order_by(IncidentRow.detected_unix_ns, IncidentRow.id))
        notified: dict[str, list[str]] = {}
        # A receiver without a notification of the opening is not notified of the end either.
        reached = select(Outbox.incident_id, Outbox.receiver).join(IncidentRow, IncidentRow.id == Outbox.incident_id)
        of_incidents = (mine, Outbox.state.not_in(("silenced", "unneeded")), Outbox.command_id == "")
        for incident_id, receiver in connection.execute(reached.where(*of_incidents).distinct()):
            notified.setdefault(incident_id, []).append(receiver)
        incidents = [incident_of(row, sorted(notified.get(row["id"], []))) for row in rows.mappings()]
        episode = connection.scalar(select(func.max(IncidentRow.episode)).where(mine))
        whose = connection.execute(
            select(ProjectRow.project, ProjectRow.owner).where(ProjectRow.job == job.job)
        ).first()
        job.whose = JobProject(job.job, *(whose or ()))
        first_seen = connection.scalar(select(JobRow.first_seen_unix_ns).where(JobRow.name == job.job))
        attempts = select(AttemptRow.attempt, AttemptRow.number).where(AttemptRow.job == job.job)
        newest = connection.execute(attempts.order_by(AttemptRow.number.desc()).limit(1)).one_or_none()
        attempt, attempts_seen = ("", 0) if newest is None else newest
        job.devices = DeviceBoards(_known_devices(connection, job.job))
        job.begin_without_snapshot(first_seen, attempt, attempts_seen)
        job.history.ledger = Ledger(checkpoints(connection, job.job))
    # Ids contain the episode, and episodes of consequences are in no table: begin far above the highest known one.
    job.correlator.restore_open(incidents, attempt, (episode or 0) + 1_000)


def _known_devices(connection: Connection, job: str) -> list[DeviceNumber]:
    """Of each kind in the order of their numbers."""
    names = ("number", "host", "index", "uuid")
    gpus = select(*(getattr(JobDevice, name) for name in names)).where(JobDevice.job == job)
    others = select(*(getattr(JobHostDevice, name) for name in (*names, "kind"))).where(JobHostDevice.job == job)
    rows = [
        *connection.execute(gpus.order_by(JobDevice.number)).all(),
        *connection.execute(others.order_by(JobHostDevice.number)).all(),
    ]
    return [DeviceNumber(*row) for row in rows]
