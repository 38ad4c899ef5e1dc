"""A job as a service has it that was not there while it ran: its series, and the rows of job and attempts.

Its series are as old as the call, since an api that runs removes older ones.
"""

from sqlalchemy import Engine

from rankwatch_detectors.base import AttemptStart, Frame
from rankwatch_service.clock import SystemClock
from rankwatch_service.series.writer import SeriesWriter
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job
from rankwatch_service.store.models import Attempt
from rankwatch_service.store.models import Job as JobRow
from tests.support.store.rows import add, attempt_row, job_row


def store(engine: Engine, job: Job, name: str = "gpt") -> None:
    """The series and the rows that a stream would have of a job."""
    writer = SeriesWriter(engine, SystemClock())
    starts = {}
    for observation in generate(job):
        if isinstance(observation, AttemptStart):
            starts[observation.attempt] = observation.topology
        elif isinstance(observation, Frame) and observation.family != "timed":
            writer.add(name, observation)
    writer.close(name)
    add(engine, JobRow, job_row(name))
    for number, (attempt, topology) in enumerate(starts.items(), 1):
        ranks = [
            {"rank": rank, "host": topology.host[rank], "device_uuid": "", "dp": rank, "tp": 0, "pp": 0}
            for rank in range(topology.world_size)
        ]
        ran = {"attempt": attempt, "number": number, "started_unix_ns": number, "world_size": topology.world_size}
        add(engine, Attempt, attempt_row(name, ranks=ranks, **ran))
