"""What the stream needs of the series engine."""

from __future__ import annotations

from typing import Protocol

from rankwatch_detectors.base import Frame


class SeriesSink(Protocol):
    """Takes the closed frames of all jobs, for charts."""

    def add(self, job: str, frame: Frame) -> None:
        """Take a frame; the same one may come again after a restart."""
        ...

    def flush(self, job: str) -> None:
        """Write what is buffered for a job."""
        ...

    def flush_due(self) -> None:
        """Write what has been buffered for long enough."""
        ...
