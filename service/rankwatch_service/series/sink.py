"""The interface through which the stream writes series."""

from __future__ import annotations

from typing import Protocol

from rankwatch_detectors.base import Frame


class SeriesSink(Protocol):
    """Takes the closed frames of all jobs, for charts."""

    def add(self, job: str, frame: Frame) -> None:
        """Take a frame. The same frame may come again after a restart, and gives the same rows."""
        ...

    def flush(self, job: str) -> None:
        """Write what is buffered for a job."""
        ...

    def delete(self, job: str) -> None:
        """Drop what is buffered for a job, and remove what is stored."""
        ...

    def close(self, job: str) -> None:
        """Write what is buffered for a job that is idle, and drop it."""
        ...

    def flush_due(self) -> None:
        """Write what has been buffered for long enough."""
        ...
