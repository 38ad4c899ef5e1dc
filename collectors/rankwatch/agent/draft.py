"""The batch that is being filled for one attempt, and the numbers that batches carry."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

from rankwatch import wire
from rankwatch.agent.columns import Rows
from rankwatch.agent.parcel import Parcel
from rankwatch.agent.ranks import LocalRank
from rankwatch.reader import Entry, StepEntry, ValuesEntry

KNOWN_COLUMNS: Final = frozenset(
    ("step", "rank", "time_unix_ns", "relative_step", "kind", "step_time_s", "busy_s", "busy_cpu_s", "wait_s")
)
"""Columns that the recorder fills: a user's metric of the same name is refused."""
PHASE_PREFIX: Final = "phase."
BULK_BYTES_MAX: Final = 2 * 1024 * 1024
"""Limit of parameter names and stacks in one message. One rank's names take at most 0.5 MB, one stack 64 KB."""


class Numbering:
    """The sender's identity on the wire: a boot id for this worker, and a number for each batch.

    A worker serves one job, so these are also the numbers of the job's batches.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        self.boot = os.urandom(8).hex()
        self._next = 0

    def take(self) -> int:
        """The next sequence number."""
        number = self._next
        self._next += 1
        return number


class Draft:
    """Collects one attempt's records until they are sent."""

    def __init__(self, job: str, attempt: str) -> None:
        self.job = job
        self.attempt = attempt
        self.progress: list[wire.Progress] = []
        self.devices: tuple[wire.DeviceSample, ...] = ()
        self.host_devices: tuple[wire.HostDeviceSample, ...] = ()
        self._events: list[wire.Event] = []
        self._ranks: dict[int, wire.RankInfo] = {}
        self._bulk_bytes = 0
        self._steps = Rows()
        self._values = Rows()
        self._only_train = True
        self.positions: dict[str, int] = {}
        """Recorder path to the sequence number of its last entry in this draft."""

    @property
    def full(self) -> bool:
        """True when the draft should be sent before anything is added."""
        return self._steps.full or self._values.full or self._bulk_bytes >= BULK_BYTES_MAX

    @property
    def empty(self) -> bool:
        """True when there is nothing to send."""
        told = self.progress or self.devices or self.host_devices or self._events or self._ranks
        return not (told or len(self._steps) or len(self._values))

    def add(self, rank: LocalRank, entry: Entry) -> int:
        """Add one record of a rank.

        Returns:
            How many of its values were left out because their names belong to known columns.
        """
        self.positions[rank.path] = entry.sequence
        if isinstance(entry, StepEntry):
            return self._add_step(rank.rank, entry)
        if isinstance(entry, ValuesEntry):
            floats, integers, refused = _split(entry)
            self._values.add(entry.step, rank.rank, floats, integers)
            return refused
        self._events.append(
            wire.Event(
                entry.kind, entry.time_unix_ns, rank.rank, entry.step if entry.step >= 0 else None, dict(entry.fields)
            )
        )
        return 0

    def carry(self, devices: Sequence[wire.DeviceSample], host_devices: Sequence[wire.HostDeviceSample]) -> None:
        """Take the newest counters, as far as there are new ones."""
        self.devices = tuple(devices) or self.devices
        self.host_devices = tuple(host_devices) or self.host_devices

    def tell(self, event: wire.Event) -> None:
        """Add an event."""
        self._events.append(event)
        self._bulk_bytes += len(event.fields.get("stack", "")) + len(event.fields.get("dump", ""))

    def introduce(self, rank: LocalRank, checkpoint_roots: tuple[str, ...]) -> None:
        """Add a rank's identity to the batch."""
        identity = rank.identity
        topology: dict[str, Any] = {name: int(identity.get(name) or 0) for name in ("dp", "tp", "pp", "cp", "ep")}
        self._ranks[rank.rank] = wire.RankInfo(
            rank=rank.rank,
            world_size=int(identity.get("world_size", 1)),
            local_rank=int(identity.get("local_rank", 0)),
            host=str(identity.get("host", "")),
            device_uuid=str(identity.get("device_uuid") or ""),
            pid=rank.header.pid,
            parameters=tuple(identity.get("parameters", ())),
            replicated=bool(identity.get("replicated", False)),
            can=tuple(identity.get("can", ())),
            optimizers=int(identity.get("optimizers") or 0),
            watched=str(identity.get("watched") or ""),
            lockstep=bool(identity.get("lockstep", True)),
            checkpoint_roots=checkpoint_roots,
            checkpoint_shards=rank.shards,
            slices=_slices(identity.get("slices")),
            device_type=str(identity.get("device_type") or ""),
            switch=str(identity.get("switch") or ""),
            **topology,
        )
        self._bulk_bytes += sum(map(len, identity.get("parameters", ())))

    def parcel(self, numbering: Numbering, unix_ns: int) -> Parcel:
        """Encode the draft as the next batch of this sender."""
        steps = self._steps.table()
        if steps is not None and self._only_train:
            del steps.columns["kind"]  # absent means train, which nearly all steps are
        batch = wire.Batch(
            schema=wire.SCHEMA_VERSION,
            job=self.job,
            attempt=self.attempt,
            host=numbering.host,
            boot=numbering.boot,
            seq=numbering.take(),
            sent_unix_ns=unix_ns,
            ranks=tuple(self._ranks[rank] for rank in sorted(self._ranks)),
            steps=steps,
            values=self._values.table(),
            progress=tuple(self.progress),
            devices=self.devices,
            host_devices=self.host_devices,
            events=tuple(self._events),
        )
        return Parcel(wire.encode(batch), self.positions)

    def _add_step(self, rank: int, entry: StepEntry) -> int:
        floats, integers, refused = _split(entry)
        floats += (
            ("step_time_s", entry.step_time_s),
            ("busy_s", entry.busy_s),
            ("busy_cpu_s", entry.busy_cpu_s),
            ("wait_s", entry.wait_s),
        )
        floats.extend((PHASE_PREFIX + name, seconds) for name, seconds in entry.phases.items())
        integers["time_unix_ns"] = entry.time_unix_ns
        integers["relative_step"] = entry.relative_step
        integers["kind"] = entry.kind
        self._only_train = self._only_train and entry.kind == 0
        self._steps.add(entry.step, rank, floats, integers)
        return refused


def by_age(attempt: str) -> tuple[str, int]:
    """The key by which attempts are sorted, older ones of a launch first."""
    launch, _, k = attempt.rpartition(".")
    return launch, int(k)


def _slices(declared: Any) -> tuple[wire.Slice, ...] | None:
    return None if declared is None else tuple(wire.Slice(str(text), int(rank)) for text, rank in declared)


def _split(entry: StepEntry | ValuesEntry) -> tuple[list[tuple[str, float]], dict[str, int], int]:
    floats: list[tuple[str, float]] = []
    integers: dict[str, int] = {}
    refused = 0
    for name, value in entry.values.items():
        if name in KNOWN_COLUMNS or name.startswith(PHASE_PREFIX):
            refused += 1
        elif isinstance(value, int):
            integers[name] = value
        else:
            floats.append((name, value))
    return floats, integers, refused
