"""What an agent sends: records of ranks in columns, their progress and exits, in batches that are numbered.

One message on its way to the service, and the records that are lost with it.

Converts rows of records to the wire's columnar `Table`, without numpy.

A column takes the narrowest type that keeps its values: integers as the difference to their minimum, floats as f4
unless that would lose digits (`_float_column`). Each name is a column; a row without a value has a cleared mask bit.

A rank's progress block and its exit as messages of the wire.

The batch that is being filled for one attempt, and the numbers that batches carry.
"""

from __future__ import annotations

import math
import os
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isinf
from typing import Any, Final, TypeVar

import msgspec

from rankwatch import layout, wire
from rankwatch.agent.processes import TICKS_PER_S, ProcessExit, read_stat
from rankwatch.agent.ranks import LocalRank
from rankwatch.loop.loop_exit import ENDS_PROCESS
from rankwatch.reader import Entry, ProgressBlock, StepEntry, ValuesEntry
from rankwatch.wire import Column, Table

Losses = Counter[tuple[str, str, str]]
"""Records that never reach the service, by (job, attempt, reason)."""

OVERHEAD_BYTES: Final = 200
"""What an encoded batch costs in memory besides its body."""


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """An encoded batch, and the last ring entry of each recorder that it acknowledges."""

    body: bytes
    positions: Mapping[str, int] = field(default_factory=dict)
    """Recorder path to the sequence number of the last entry in here."""

    @property
    def size(self) -> int:
        """Bytes in memory."""
        return len(self.body) + OVERHEAD_BYTES


def without_records(body: bytes) -> tuple[bytes | None, Losses]:
    """Remove step and values records from an encoded batch: they are most of it, and worth least when old.

    Returns:
        The rest, None if nothing is left that matters; and the removed records, as lost to the spool's limit.
    """
    try:
        batch = wire.decode_batch(body)
    except msgspec.DecodeError:
        return None, Losses({("", "", "spool_torn"): 1})
    losses = Losses()
    rows = sum(table.rows for table in (batch.steps, batch.values) if table is not None)
    if rows:
        losses[batch.job, batch.attempt, "spool"] = rows
    rest = msgspec.structs.replace(batch, steps=None, values=None)
    if not (rest.events or rest.ranks or rest.progress):
        return None, losses
    return wire.encode(rest), losses


def all_records(body: bytes, reason: str) -> Losses:
    """Count everything in an encoded batch as lost for this reason."""
    try:
        batch = wire.decode_batch(body)
    except msgspec.DecodeError:
        return Losses({("", "", reason): 1})
    rows = sum(table.rows for table in (batch.steps, batch.values) if table is not None)
    count = rows + len(batch.progress) + len(batch.events) + len(batch.devices) + len(batch.host_devices)
    return Losses({(batch.job, batch.attempt, reason): max(1, count)})


CELLS_MAX: Final = 300_000
"""Rows x columns of one table: 2.4 MB at 8 bytes a cell. Two tables and `BULK_BYTES_MAX` stay below the 8 MB that
the service accepts as a message."""

F4_EXACT_MAX: Final = 2.0**24
"""Above this f4 cannot hold every integer: token counts and user counters would be rounded."""
F4_NORMAL_MIN: Final = 2.0**-126
"""Below this f4 loses digits."""

Cell = TypeVar("Cell", int, float)

_UNSIGNED: Final = (("u1", "B", 0xFF), ("u2", "H", 0xFFFF), ("u4", "I", 0xFFFF_FFFF))


class Rows:
    """Collects the rows of one table in the order in which they come."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._ranks: list[int] = []
        self._floats: dict[str, tuple[list[int], list[float]]] = {}
        self._integers: dict[str, tuple[list[int], list[int]]] = {}

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def full(self) -> bool:
        """True when this table should be sent before more rows are added."""
        return len(self._steps) * (2 + len(self._floats) + len(self._integers)) >= CELLS_MAX

    def add(self, step: int, rank: int, floats: Iterable[tuple[str, float]], integers: Mapping[str, int]) -> None:
        """Add one record. NaN is a value; leave out what was not measured."""
        row = len(self._steps)
        self._steps.append(step)
        self._ranks.append(rank)
        for name, value in floats:
            column = self._floats.get(name)
            if column is None:
                column = self._floats[name] = ([], [])
            column[0].append(row)
            column[1].append(value)
        for name, number in integers.items():
            exact = self._integers.get(name)
            if exact is None:
                exact = self._integers[name] = ([], [])
            exact[0].append(row)
            exact[1].append(number)

    def table(self) -> Table | None:
        """Everything added so far as one table; None without rows."""
        count = len(self._steps)
        if not count:
            return None
        columns = {"step": _integer_column(self._steps, None), "rank": _integer_column(self._ranks, None)}
        for name in self._integers.keys() & self._floats.keys():
            # One rank logs this metric as an integer and another as a float: a column has one type, so all are floats.
            rows, numbers = self._integers.pop(name)
            more, floats = self._floats[name]
            both = sorted([*zip(rows, map(float, numbers), strict=True), *zip(more, floats, strict=True)])
            self._floats[name] = [row for row, _ in both], [value for _, value in both]
        for name, (rows, numbers) in self._integers.items():
            # Absent cells hold the base, so that they do not widen the column.
            base = min(numbers)
            mask, cells = _spread(rows, numbers, count, base)
            columns[name] = _integer_column(cells, mask)
        for name, (rows, values) in self._floats.items():
            mask, measured = _spread(rows, values, count, 0.0)
            columns[name] = _float_column(measured, mask)
        return Table(count, columns)


def _spread(rows: list[int], values: list[Cell], count: int, absent: Cell) -> tuple[bytes | None, list[Cell]]:
    """Scatter values to their rows; the mask is None when every row has one."""
    if len(rows) == count:
        return None, values
    cells = [absent] * count
    mask = bytearray((count + 7) // 8)
    for row, value in zip(rows, values, strict=True):
        cells[row] = value
        mask[row >> 3] |= 1 << (row & 7)
    return bytes(mask), cells


def _integer_column(values: list[int], mask: bytes | None) -> Column:
    base = min(values)
    spread = max(values) - base
    for dtype, code, limit in _UNSIGNED:
        if spread <= limit:
            return Column(dtype, struct.pack(f"<{len(values)}{code}", *(value - base for value in values)), base, mask)
    return Column("i8", struct.pack(f"<{len(values)}q", *values), 0, mask)


def _float_column(values: list[float], mask: bytes | None) -> Column:
    code = "d" if any(_needs_f8(value) for value in values) else "f"
    return Column("f8" if code == "d" else "f4", struct.pack(f"<{len(values)}{code}", *values), 0, mask)


def _needs_f8(value: float) -> bool:
    size = abs(value)
    return (size > F4_EXACT_MAX and not isinf(size)) or 0.0 < size < F4_NORMAL_MIN


def progress_of(rank: LocalRank, block: ProgressBlock, now_s: float) -> wire.Progress:
    """A rank's progress message; `now_s` is monotonic time of this host."""
    gone = rank.gone_since_s is not None
    stat = None if gone or rank.is_followed else read_stat(rank.header.pid)
    if stat is not None and stat.start_ticks != rank.header.start_ticks:
        stat = None  # another process has its PID by now
    traced = stat is not None and stat.state == "t" and rank.process is not None and rank.process.is_traced
    return wire.Progress(
        rank=rank.rank,
        step=block.step,
        phase=block.phase,
        phase_age_s=max(0.0, now_s - block.phase_since_ns / 1e9),
        step_age_s=max(0.0, now_s - block.step_entered_ns / 1e9),
        collective_seq=block.collective_seq,
        # A rank that an exception has ended does no more work, though its process may take a while to exit.
        state="exited" if (gone and not rank.closed) or (rank.ending and block.state != "left") else block.state,
        order=block.answer.order,
        answer=block.answer.answer,
        answer_step=block.answer.step,
        answer_k=block.answer.k,
        answer_fingerprint=block.answer.fingerprint,
        os_state="X" if gone else "?" if stat is None or traced else stat.state,
        cpu_s=stat.cpu_ticks / TICKS_PER_S if stat is not None else 0.0,
        answer_detail=block.answer.detail,
        outside_s=max(0.0, now_s - block.outside_ns / 1e9) if block.outside_ns else -1.0,
        doing=rank.look.doing,
    )


def start_event(rank: LocalRank) -> wire.Event:
    """The event that a rank's process has begun to record."""
    fields = {"pid": rank.header.pid, "source": rank.identity.get("source", "")}
    return wire.Event("rank_start", rank.header.start_unix_ns, rank.rank, fields=fields)


def exit_event(rank: LocalRank, block: ProgressBlock, ended: ProcessExit, seen_unix_ns: int) -> wire.Event:
    """The event that says how a rank's process ended, and when it began to end.

    If the kernel does not have the exit status, Python's note of an exception does. If there is no note either, Python
    had no time to write one: the end was `abrupt`, by a signal or `os._exit`. A process that a signal ended may have
    begun to end before, which shows in the note that its loop was broken off.
    """
    code, number, how = ended.code, ended.signal, ended.how
    if how == "unknown" and rank.status is not None:
        (code, number), how = rank.status, "excepthook"
    failed = number is not None or code not in (0, None)
    # A loop that `break` left counts as finished only if the process did not fail afterwards.
    left = block.state == "left" and (rank.left_by in ("end", "stop") or not failed)
    broken_off = block.state == "left" and rank.left_by == "break"
    broken = rank.broke_off(block) if number is not None and rank.status is None and not left else None
    said = rank.status is not None or (broken_off and broken is None)
    error = rank.error if said and not left else ""
    where = rank.where if said else ""
    if broken is not None:
        kind, ends = broken.fields.get("type"), broken.fields.get("code") != 0
        error = f"{kind}: {broken.fields.get('message', '')}" if kind in ENDS_PROCESS and ends else ""
        where = str(broken.fields.get("where", ""))
    if broken_off and code and not error:
        error = f"SystemExit: {code}"  # Python shut down normally, and no exception explains the status
    fields: dict[str, Any] = {
        "code": code,
        "signal": number,
        "how": how,
        "error": error,
        "where": where,
        "pid": rank.header.pid,
        "left": left,
        "exit_order": rank.exit_order,
        "phase": block.phase,
        "abrupt": how == "unknown" and not (said or left),
    }
    if "grace_s" in rank.identity:
        fields["grace_s"] = rank.identity["grace_s"]
    if broken is not None:
        fields["broken_off_unix_ns"] = broken.time_unix_ns
    unix_ns = (rank.said_unix_ns if said else rank.last_sign_unix_ns) or seen_unix_ns
    return wire.Event("process_exit", unix_ns, rank.rank, block.step, fields)


BULK_BYTES_MAX: Final = 2 * 1024 * 1024
"""Limit of parameter names and stacks in one message. One rank's names take at most 0.5 MB, one stack 64 KB."""


class SenderIdentity:
    """The sender's identity on the wire: a boot id for this worker, and a number for each batch.

    A worker serves one job, so these are also the numbers of the job's batches.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        self.boot = os.urandom(8).hex()
        self._next = 0

    def next_sequence(self) -> int:
        """The next sequence number."""
        number = self._next
        self._next += 1
        return number


class BatchBuilder:
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
        """Recorder path to the sequence number of its last entry in this batch."""

    @property
    def full(self) -> bool:
        """True when the batch should be sent before anything is added."""
        return self._steps.full or self._values.full or self._bulk_bytes >= BULK_BYTES_MAX

    @property
    def empty(self) -> bool:
        """True when there is nothing to send."""
        reported = self.progress or self.devices or self.host_devices or self._events or self._ranks
        return not (reported or len(self._steps) or len(self._values))

    def add(self, rank: LocalRank, entry: Entry) -> int:
        """Add one record of a rank.

        Returns:
            How many of its values were left out because their names belong to known columns.
        """
        self.positions[rank.path] = entry.sequence
        if isinstance(entry, StepEntry):
            return self._add_step(rank, entry)
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
        """Add the newest counters, as far as there are new ones."""
        self.devices = tuple(devices) or self.devices
        self.host_devices = tuple(host_devices) or self.host_devices

    def add_event(self, event: wire.Event) -> None:
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

    def encoded_batch(self, sender_identity: SenderIdentity, unix_ns: int) -> EncodedBatch:
        """Encode it as the next batch of this sender."""
        steps = self._steps.table()
        if steps is not None and self._only_train:
            del steps.columns["kind"]  # absent means train, which nearly all steps are
        batch = wire.Batch(
            schema=wire.SCHEMA_VERSION,
            job=self.job,
            attempt=self.attempt,
            host=sender_identity.host,
            boot=sender_identity.boot,
            seq=sender_identity.next_sequence(),
            sent_unix_ns=unix_ns,
            ranks=tuple(self._ranks[rank] for rank in sorted(self._ranks)),
            steps=steps,
            values=self._values.table(),
            progress=tuple(self.progress),
            devices=self.devices,
            host_devices=self.host_devices,
            events=tuple(self._events),
        )
        return EncodedBatch(wire.encode(batch), self.positions)

    def _add_step(self, rank: LocalRank, entry: StepEntry) -> int:
        floats, integers, refused = _split(entry)
        if not rank.is_followed:
            floats += (
                ("step_time_s", entry.step_time_s),
                ("busy_s", entry.busy_s),
                ("busy_cpu_s", entry.busy_cpu_s),
                ("wait_s", entry.wait_s),
            )
        elif entry.step_time_s > 0:  # a log knows no more, and perhaps not even that
            floats.append(("step_time_s", entry.step_time_s))
        if not math.isnan(entry.queued_s):
            floats.append(("queued_s", entry.queued_s))
        floats.extend((layout.PHASE_PREFIX + name, seconds) for name, seconds in entry.phases.items())
        integers["time_unix_ns"] = entry.time_unix_ns
        integers["relative_step"] = entry.relative_step
        integers["kind"] = entry.kind
        self._only_train = self._only_train and entry.kind == 0
        self._steps.add(entry.step, rank.rank, floats, integers)
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
        if layout.is_own_column(name):
            refused += 1
        elif isinstance(value, int):
            integers[name] = value
        else:
            floats.append((name, value))
    return floats, integers, refused
