"""All that an agent reads of its host's hardware: GPUs, network ports, and the host as a whole."""

from __future__ import annotations

from dataclasses import dataclass

from rankwatch import wire
from rankwatch.agent.devices.sampler import DeviceSampler
from rankwatch.agent.host.cloud import CloudNotices
from rankwatch.agent.host.sampler import HostSampler


@dataclass(frozen=True, slots=True)
class Hardware:
    """The samplers, as one."""

    devices: DeviceSampler
    host: HostSampler
    cloud: CloudNotices

    def start(self) -> None:
        """Begin to read."""
        self.devices.start()
        self.host.start()
        self.cloud.start()

    def take(
        self, checkpoints: tuple[str, int] | None
    ) -> tuple[tuple[wire.DeviceSample, ...], tuple[wire.HostDeviceSample, ...]]:
        """The newest counters of GPUs, and of ports and the host, once; empty if none were read since the last call.

        Args:
            checkpoints: the folder in which the job saves, and the free bytes of its file system, once they are known.
        """
        if checkpoints is not None:
            self.host.watch_checkpoints(*checkpoints)
        return self.devices.take(), self.host.take()

    def take_events(self) -> list[wire.Event]:
        """What happened to devices, and what the provider announced, since the last call."""
        return self.devices.take_events() + self.cloud.take_events()

    def close(self) -> None:
        """End the samplers. What hangs in the driver ends as soon as the driver answers."""
        self.host.close()
        self.cloud.close()
        self.devices.close()
