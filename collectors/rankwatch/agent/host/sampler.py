"""Reads the counters of the host and its network ports in a thread: a file that does not answer stops it alone."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Final

from rankwatch import wire
from rankwatch.agent.clock import AgentClock
from rankwatch.agent.host.files import known, missing_under
from rankwatch.agent.host.path_disk import PathDisk
from rankwatch.agent.host.ports import NetworkPorts
from rankwatch.agent.host.resources import HostResources

_log = logging.getLogger(__name__)

READ_EVERY_S: Final = 2.5
"""Twice in each slot of the service's series."""


class HostSampler(threading.Thread):
    """Has the newest counters of this host and its network ports.

    Args:
        root: folder in which the host's /proc and /sys are: "/" except in a container that has them elsewhere.
        clock: for shares of time and the time of samples.
        own: folder in which this process's own /proc and /sys are.
    """

    def __init__(self, root: Path, clock: AgentClock, own: Path = Path("/")) -> None:
        super().__init__(name="host", daemon=True)
        self._root = root
        self._resources = HostResources(root, own)
        self._ports = NetworkPorts(root)
        self._disk = PathDisk(root, own)
        self._checkpoints: tuple[str, int] | None = None
        self._clock = clock
        self._closed = threading.Event()
        self._samples: tuple[wire.HostDeviceSample, ...] = ()

    def take(self) -> tuple[wire.HostDeviceSample, ...]:
        """The newest counters, once; empty if none were read since the last call."""
        samples, self._samples = self._samples, ()
        return samples

    def watch_checkpoints(self, folder: str, free_bytes: int) -> None:
        """Tell of the disk on which the job saves its checkpoints from now on.

        Args:
            folder: in which it saves; absolute, without symbolic links.
            free_bytes: of its file system, which may be too slow to be asked here.
        """
        self._checkpoints = folder, free_bytes

    def close(self) -> None:
        """Read no more."""
        self._closed.set()

    def run(self) -> None:
        """Read once, and until closed. Not for callers."""
        for name in missing_under(self._root):
            _log.warning(
                "%s has no %s: counters in it are not told (RANKWATCH_HOST_ROOT names the folder)", self._root, name
            )
        self._samples = self.sample()
        while not self._closed.wait(READ_EVERY_S):
            self._samples = self.sample()

    def sample(self) -> tuple[wire.HostDeviceSample, ...]:
        """Read everything once: of the host, then of each port that is or was in use."""
        now_s, unix_ns = self._clock.monotonic_s(), self._clock.unix_ns()
        host = self._resources.read(now_s)
        ports = self._ports.read(now_s)
        if self._ports.left_out:
            host["ports_left_out"] = float(self._ports.left_out)
        if self._checkpoints is not None:
            folder, free_bytes = self._checkpoints
            host["checkpoint_free_bytes"] = float(free_bytes)
            host |= known({"checkpoint_request_s": self._disk.request_s(folder)})
        read = [(wire.HOST, "", host), *((wire.PORT, name, counters) for name, counters in ports.items())]
        return tuple(wire.HostDeviceSample(kind, name, unix_ns, counters) for kind, name, counters in read if counters)
