"""A job as a service has it that was not there while it ran: its series, and the rows of job and attempts.

Its series are as old as the call, since an api that runs removes older ones.
"""

import struct

import numpy as np
from sqlalchemy import Engine

from rankwatch_detectors.base import AttemptStart, Frame
from rankwatch_service.clock import SystemClock
from rankwatch_service.series.writer import SeriesWriter
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job
from rankwatch_service.store.models import Attempt
from rankwatch_service.store.models import Job as JobRow
from tests.support.store.database import add, attempt_row, job_row


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


def read(data: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Steps, ranks, values and codes, by the layout that the OpenAPI description states."""
    magic, columns, rows, _, scale, levels = struct.unpack_from("<4sIIIff", data)
    assert magic == b"RWH1"
    at = 24
    step = np.frombuffer(data, "<f8", columns, at)
    rank = np.frombuffer(data, "<u4", rows, at := at + 8 * columns)
    centre = np.frombuffer(data, "<f4", columns, at := at + 4 * rows)
    lower = np.frombuffer(data, "u1", rows * columns, at := at + 4 * columns)
    upper = np.frombuffer(data, "u1", rows * columns, at := at + rows * columns)
    assert at + rows * columns == len(data)
    code = (lower + 256 * upper.astype(int)).reshape(rows, columns)
    n = np.where(code % 2 == 0, (code - 4) / 2, (3 - code) / 2)
    return step, rank, np.where(code < 4, np.nan, centre + scale * np.sinh(n / levels)), code
