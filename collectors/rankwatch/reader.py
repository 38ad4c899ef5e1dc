"""The agent's side of the recorder file: it reads everything, and writes one cell.

Reading never disturbs the writer. Overwritten, torn and unknown entries are counted and skipped.
"""

from __future__ import annotations

import fcntl
import json
import math
import mmap
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from zlib import crc32

from rankwatch import layout
from rankwatch.layout import NO_REQUESTS, Answer, Cell, Directive, PersistentRequests

_FLOCK: Final = struct.Struct("hhqqi4x")
_HEAD: Final = struct.Struct("<I4sQ")
_FLOAT: Final = struct.Struct("<f")
POLL_ENTRIES_MAX: Final = layout.RING_ENTRIES
"""Most entries that one `poll` returns: the whole ring."""


@dataclass(frozen=True, slots=True)
class Header:
    """The writer of the file. `identity` grows while the job declares what it can do; read it again after a change."""

    pid: int
    uid: int
    start_unix_ns: int
    start_monotonic_ns: int
    start_ticks: int
    """Field 22 of /proc/PID/stat at the rank's start; 0 if unknown. With the pid it identifies the process uniquely."""
    identity: Mapping[str, Any]
    """job, launch, rank, world_size, local_rank, host, device_uuid, dp, tp, pp, cp, ep, switch, source, can,
    parameters, replicated, optimizers, watched, device_type, stack_signal, stack_thread (the thread that trains)."""
    identity_number: int
    """How often the identity was written."""


@dataclass(frozen=True, slots=True)
class StepEntry:
    """One ended step. `values` has floats, and integers for exact metrics."""

    sequence: int
    step: int
    k: int
    kind: int
    """0 train, 1 eval, 2 checkpoint."""
    relative_step: int
    time_unix_ns: int
    step_time_s: float
    busy_s: float
    busy_cpu_s: float
    wait_s: float
    values: Mapping[str, float | int]
    phases: Mapping[str, float]
    """Seconds by phase."""
    queued_s: float = math.nan
    """The part of `busy_s` in which the training thread waited for a core; NaN: not measured."""


@dataclass(frozen=True, slots=True)
class ValuesEntry:
    """Late or further values of a step; one step may have several, with different metrics."""

    sequence: int
    step: int
    k: int
    time_unix_ns: int
    values: Mapping[str, float | int]


@dataclass(frozen=True, slots=True)
class Note:
    """A small event of the rank; `kind` is one of `rankwatch.wire.EVENT_KINDS`."""

    sequence: int
    step: int
    k: int
    time_unix_ns: int
    kind: str
    fields: Mapping[str, Any]


Entry = StepEntry | ValuesEntry | Note


@dataclass(frozen=True, slots=True)
class Poll:
    """Entries since the last poll, in the order in which they were written."""

    entries: list[Entry]
    lost: dict[str, int]
    """Lost entries by reason: ring (overwritten before they were read), torn, unknown."""


@dataclass(frozen=True, slots=True)
class ProgressBlock:
    """Where the rank is now. Each field is consistent by itself; a step may end between reading two of them."""

    step: int
    """-1 before the first."""
    k: int
    phase: str
    phase_entered_ns: int
    """Monotonic clock of this host."""
    step_entered_ns: int
    collective_seq: int
    state: str
    """running, held, left."""
    outside_ns: int = 0
    """Monotonic time since which the rank is outside of a step; 0 within a step."""
    answer: Answer = field(default_factory=Answer)

    @property
    def phase_since_ns(self) -> int:
        """Since when the rank is in its phase; without a phase: since the last one ended, or its step began."""
        return self.phase_entered_ns if self.phase else max(self.phase_entered_ns, self.step_entered_ns)


class RingReader:
    """Reads one recorder file from a position on.

    Args:
        path: the file.
        position: sequence number of the next entry to read; 1 is the first.
        writable: also map the directive cell for writing (`directives`).

    Raises:
        ValueError: not a recorder file of a known version, or still being created.
        OSError: the file cannot be opened or mapped.

    Never open one in the process that records into the same file: closing it would drop that rank's lock.
    """

    def __init__(self, path: str, position: int = 1, *, writable: bool = False) -> None:
        self.path = path
        self.position = position
        self._descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        try:
            size = os.fstat(self._descriptor).st_size
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            self._mapping = mmap.mmap(self._descriptor, min(size, layout.FILE_BYTES), access=access)
            self._view = memoryview(self._mapping)
            self._facts = _checked_header(path, self._view)
        except BaseException:
            os.close(self._descriptor)
            raise
        words = self._view[layout.PROGRESS_OFFSET : layout.PROGRESS_OFFSET + 8 * layout.PROGRESS_WORDS]
        self._words = words.cast("Q")
        self._answer = layout.answer_cell(self._view)
        self._identity = layout.identity_cell(self._view)
        self.directives = DirectiveSlot(layout.directive_cell(self._view))
        self._metrics: list[tuple[str, int]] = []
        self._phases: list[tuple[str, int]] = []
        self._note_parts: list[bytes] = []

    def close(self) -> None:
        """Release the mapping and close the file."""
        self._words.release()
        for cell in (self._answer, self._identity, self.directives.cell):
            cell.release()
        self._view.release()
        self._mapping.close()
        os.close(self._descriptor)

    @property
    def header(self) -> Header:
        """The header, with the newest identity."""
        pid, uid, start_unix_ns, start_monotonic_ns, start_ticks = self._facts
        found = self._identity.read()
        number, payload = found if found is not None else (0, zlib.compress(b"{}"))
        return Header(
            pid, uid, start_unix_ns, start_monotonic_ns, start_ticks, json.loads(zlib.decompress(payload)), number
        )

    @property
    def identity_number(self) -> int:
        """Number of the newest identity; changes with each write of it."""
        return int(self._identity.words[0])

    @property
    def head(self) -> int:
        """Sequence number of the newest entry."""
        return int(self._words[layout.HEAD])

    def owner_alive(self) -> bool:
        """Whether another process holds the file's lock, which means that the rank lives. Takes no lock."""
        probe = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind = _FLOCK.unpack(fcntl.fcntl(self._descriptor, fcntl.F_GETLK, probe))[0]
        return bool(kind != fcntl.F_UNLCK)

    def progress(self) -> ProgressBlock:
        """Read the progress block."""
        words = self._words
        position = words[layout.POSITION]
        phase = words[layout.PHASE]
        state = words[layout.STATE]
        found = self._answer.read()
        return ProgressBlock(
            step=(position & layout.STEP_MASK) - 1,
            k=position >> 48,
            phase="" if phase == layout.NO_PHASE else self._phase_name(phase),
            phase_entered_ns=words[layout.PHASE_ENTERED],
            step_entered_ns=words[layout.STEP_ENTERED],
            collective_seq=words[layout.COLLECTIVES],
            state=layout.STATES[state] if state < len(layout.STATES) else layout.STATES[0],
            outside_ns=words[layout.OUTSIDE],
            answer=layout.decode_answer(found[1]) if found is not None else Answer(),
        )

    def poll(self, limit: int = POLL_ENTRIES_MAX) -> Poll:
        """Read the entries since the last poll, at most `limit`; advances `position`."""
        poll = Poll([], {})
        while len(poll.entries) < limit:
            entry = self._take(poll)
            if entry is None:
                break
            self.position += 1
            self._decode(entry, poll)
        return poll

    def _take(self, poll: Poll) -> bytes | None:
        """The whole entry at `position`, after skipping lost ones; None if nothing is written there yet."""
        while True:
            # Read the head before the entry: an entry beyond that head is still being written, not torn.
            head = self.head
            at = layout.RING_OFFSET + (self.position - 1) % layout.RING_ENTRIES * layout.ENTRY_BYTES
            entry = bytes(self._view[at : at + layout.ENTRY_BYTES])
            checksum, *_, sequence = _HEAD.unpack_from(entry)
            if sequence == self.position and checksum == crc32(entry[layout.CRC_BYTES :]):
                return entry
            if head < self.position:
                return None
            oldest = head - layout.RING_ENTRIES + 1
            if oldest > self.position:
                _count(poll.lost, "ring", oldest - self.position)
                self.position = oldest
            elif sequence > self.position:
                _count(poll.lost, "ring", 1)  # overwritten while it was read
                self.position += 1
            else:
                _count(poll.lost, "torn", 1)
                self.position += 1
            self._note_parts.clear()

    def _decode(self, entry: bytes, poll: Poll) -> None:
        fields = layout.ENTRY.unpack_from(entry)
        _, kind, step_kind, page, count, sequence, step, unix_ns, k, relative_step, mask, length, *times = fields
        if kind == layout.STEP:
            phases = layout.PHASE_TIMES[count].unpack_from(entry, layout.PHASE_TIMES_OFFSET)
            names = [self._phase_name(index) for index in entry[layout.PHASE_INDEX_OFFSET :][:count]]
            values = self._values(entry, 0, mask)
            seconds = {name: ns * 1e-9 for name, ns in zip(names, phases, strict=True)}
            step_s, busy_s, busy_cpu_s, wait_s = (ns * 1e-9 for ns in times)
            (queued_ns,) = _FLOAT.unpack_from(entry, layout.QUEUED_OFFSET)
            poll.entries.append(
                StepEntry(
                    sequence,
                    step,
                    k,
                    step_kind,
                    relative_step,
                    unix_ns,
                    step_s,
                    busy_s,
                    busy_cpu_s,
                    wait_s,
                    values,
                    seconds,
                    queued_ns * 1e-9,
                )
            )
        elif kind == layout.VALUES:
            poll.entries.append(ValuesEntry(sequence, step, k, unix_ns, self._values(entry, page, mask)))
        elif kind == layout.NOTE:
            if page != len(self._note_parts):
                self._note_parts.clear()
                if page != 0:
                    return  # its first parts are lost, and were counted
            self._note_parts.append(entry[layout.NOTE_OFFSET : layout.NOTE_OFFSET + length])
            if page + 1 == count:
                text = layout.plain_json(b"".join(self._note_parts))
                self._note_parts.clear()
                poll.entries.append(Note(sequence, step, k, unix_ns, text["kind"], text["fields"]))
        else:
            _count(poll.lost, "unknown", 1)

    def _values(self, entry: bytes, page: int, mask: int) -> dict[str, float | int]:
        values: dict[str, float | int] = {}
        for place in range(layout.PAGE_VALUES):
            if mask >> place & 1:
                name, flags = self._metric(page * layout.PAGE_VALUES + place)
                form = "<q" if flags & layout.NAME_EXACT else "<d"
                values[name] = struct.unpack_from(form, entry, layout.VALUES_OFFSET + 8 * place)[0]
        return values

    def _metric(self, index: int) -> tuple[str, int]:
        if index >= len(self._metrics):
            self._metrics = layout.read_names(self._view, layout.METRICS_OFFSET)
        return self._metrics[index] if index < len(self._metrics) else (f"metric_{index}", 0)

    def _phase_name(self, index: int) -> str:
        if index >= len(self._phases):
            self._phases = layout.read_names(self._view, layout.PHASES_OFFSET)
        return self._phases[index][0] if index < len(self._phases) else f"phase_{index}"


class DirectiveSlot:
    """The agent's access to the directive cell. Only the holder of the agent's lock may write."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell

    def write(self, directive: Directive) -> None:
        """Write a directive; the rank reads it at its next step boundary, or within 2 ms while it is held.

        Raises:
            ValueError: the directive is too long for the cell (about 3.5 KB of text fit).
        """
        self.cell.write(layout.encode_directive(directive))

    def read(self) -> Directive | None:
        """The directive that this agent or an earlier one wrote last; None if there is none, or it was cleared."""
        found = self.cell.read()
        directive = layout.decode_directive(found[1]) if found is not None else None
        return directive if directive is not None and directive.phase != "closed" else None

    def clear(self, order: str, attempt: str, persistent: PersistentRequests = NO_REQUESTS) -> None:
        """Clear the order, and keep what is `persistent`."""
        self.write(Directive(order, attempt, "closed", **persistent._asdict()))

    @property
    def persistent(self) -> PersistentRequests:
        """What this agent or an earlier one asked of the rank beside orders."""
        found = self.cell.read()
        return layout.decode_directive(found[1]).persistent if found is not None else NO_REQUESTS


def _checked_header(path: str, view: memoryview) -> tuple[int, int, int, int, int]:
    if len(view) < layout.FILE_BYTES:
        raise ValueError(f"{path}: {len(view)} bytes are not a recorder file")
    magic, version, ring, entry, entries, pid, uid, start_unix_ns, start_monotonic_ns, ticks = (
        layout.HEADER.unpack_from(view, 0)
    )
    if (magic, version) != (layout.MAGIC, layout.VERSION):
        raise ValueError(f"{path}: not a recorder file of version {layout.VERSION}, or still being created")
    if (ring, entry, entries) != (layout.RING_OFFSET, layout.ENTRY_BYTES, layout.RING_ENTRIES):
        raise ValueError(f"{path}: unknown sizes {(ring, entry, entries)}")
    return pid, uid, start_unix_ns, start_monotonic_ns, ticks


def _count(lost: dict[str, int], reason: str, count: int) -> None:
    lost[reason] = lost.get(reason, 0) + count
