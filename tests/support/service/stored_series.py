"""A job as a service has it that was not there while it ran: its series, and the rows of job and attempts.

Its series are as old as the call, since an api that runs removes older ones.
"""

from sqlalchemy import Engine, insert

from rankwatch_detectors.base import AttemptStart, Frame
from rankwatch_service.clock import SystemClock
from rankwatch_service.series.writer import SeriesWriter
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Attempt
from rankwatch_service.store.models import Job as JobRow


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
    seen = {"first_seen_unix_ns": 1, "last_seen_unix_ns": 2}
    row = {"state": "running", "attempt": "l.0", "world_size": 4, "ranks_reporting": 4, "step": 5}
    with write(engine) as connection:
        connection.execute(insert(JobRow).values(name=name, **row, **seen))
        for number, (attempt, topology) in enumerate(starts.items(), 1):
            ranks = [
                {"rank": rank, "host": topology.host[rank], "device_uuid": "", "dp": rank, "tp": 0, "pp": 0}
                for rank in range(topology.world_size)
            ]
            values = {"job": name, "attempt": attempt, "number": number, "started_unix_ns": number}
            values |= {"world_size": topology.world_size, "topology": {"ranks": ranks, "can": []}}
            connection.execute(insert(Attempt).values(**values))
