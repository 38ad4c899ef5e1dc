"""The recorder file: its layout, and the words and cells that it consists of.

Little-endian, 2 MiB, one file for each (job, launch, rank, process). The rank writes everything but the directive
cell, the agent writes only that one. Neither waits for the other: single facts are words (one aligned 8-byte store),
composed facts are cells (two copies, each with a checksum), records are ring entries with sequence number and checksum.
So the file can be read at any moment, even after its writer was killed in the middle of a store.
"""

from __future__ import annotations

import json
import os
import re
import struct
from hashlib import sha256
from typing import Any, Final, NamedTuple
from zlib import crc32

MAGIC: Final = b"RNKWATCH"
VERSION: Final = 2

# ---- regions ---------------------------------------------------------------------------------------------------------

FILE_BYTES: Final = 2 * 1024 * 1024
"""Per rank: eight ranks take 16 MiB of the 64 MiB that a container's /dev/shm has by default."""
PROGRESS_OFFSET: Final = 4_096
ANSWER_OFFSET: Final = PROGRESS_OFFSET + 256
DIRECTIVE_OFFSET: Final = 8_192
METRICS_OFFSET: Final = 16_384
PHASES_OFFSET: Final = METRICS_OFFSET + 4_608
IDENTITY_OFFSET: Final = PHASES_OFFSET + 4_608
RING_OFFSET: Final = 65_536
ENTRY_BYTES: Final = 256
RING_ENTRIES: Final = (FILE_BYTES - RING_OFFSET) // ENTRY_BYTES
"""7,936 entries: 13 min at 10 steps/s where a step takes one entry. Late values take another one for each step, and so
does each further page of 16 metrics: 3,968 steps with late values, 1,984 with 64 metrics."""

HEADER: Final = struct.Struct("<8sIIIIIIQQQ")
"""magic, version, ring offset, entry bytes, entries, pid, uid, start_unix_ns, start_monotonic_ns, start_ticks (field 22
of /proc/PID/stat, which tells this process from a later one with the same pid). The magic is written last."""

# ---- progress words: each is one aligned 8-byte store, so a reader never sees half of one ---------------------------

POSITION: Final = 0  # k << 48 | step + 1
STEP_ENTERED: Final = 1  # monotonic ns
PHASE: Final = 2  # index in the phase table; NO_PHASE between phases
PHASE_ENTERED: Final = 3  # monotonic ns
COLLECTIVES: Final = 4  # collectives entered
STATE: Final = 5  # index in STATES
HEAD: Final = 6  # sequence number of the newest complete ring entry
OUTSIDE: Final = 7  # monotonic ns since when its step's work is done and the next has not begun; 0 within a step
PROGRESS_WORDS: Final = 8

NO_PHASE: Final = 0xFFFF
K_MAX: Final = 0xFFFF
STEP_MASK: Final = (1 << 48) - 1
STATES: Final = ("running", "held", "left")
RUNNING, HELD, LEFT = range(3)

# ---- names -----------------------------------------------------------------------------------------------------------

NAMES_MAX: Final = 64
"""Different metrics, and different phases, of one process; further ones are dropped and counted."""
SLICES_MAX: Final = 8
"""Slices of one rank, each with up to two metrics. Dense layers, those that tensor parallelism replicates, experts, and
what no wrapper divides are 4."""
NAME_BYTES_MAX: Final = 64
NAME_ROW_BYTES: Final = 72
NAME_EXACT: Final = 1
"""Flag of a name row: values of this metric are 64-bit integers."""
_NAME_ROW: Final = struct.Struct("<BB")
PHASE_PREFIX: Final = "phase."
_TIMES: Final = ("step_time_s", "busy_s", "busy_cpu_s", "queued_s", "wait_s")
_OWN_COLUMNS: Final = frozenset(("step", "rank", "time_unix_ns", "relative_step", "kind", *_TIMES))


def is_own_column(name: str) -> bool:
    """Whether the recorder fills this column of step records: a user's metric of the same name is refused."""
    return name in _OWN_COLUMNS or name.startswith(PHASE_PREFIX)


# ---- ring entries ----------------------------------------------------------------------------------------------------

STEP, VALUES, NOTE = 1, 2, 3
ENTRY: Final = struct.Struct("<IBBBBQqqIIHHffff")
"""crc32 of the rest, type, kind (0 train, 1 eval, 2 checkpoint), page (16 metrics each) or part of a note, count
(phases; parts of the note), sequence, step, time_unix_ns, k, relative step, presence mask, note bytes in this part,
and nanoseconds of the step, busy, busy on the CPU, waiting: 24 bits are 1 us of 10 s."""
CRC_BYTES: Final = 4
NOTE_OFFSET: Final = 60
NOTE_PART_BYTES: Final = 196
NOTE_PARTS_MAX: Final = 8
PHASE_INDEX_OFFSET: Final = 60
PHASE_TIMES_OFFSET: Final = 72
PHASES_PER_STEP_MAX: Final = 12
"""Different phases in one step; further ones are dropped and counted."""
PHASE_TIMES: Final = tuple(struct.Struct(f"<{count}f") for count in range(PHASES_PER_STEP_MAX + 1))
"""Nanoseconds of so many phases."""
SEQUENCE_WORD, STEP_WORD, TIME_WORD = 1, 2, 3
"""Fields of an entry as 8-byte words. A step's is written field by field: with cold caches `struct` takes longer."""
CRC_HALF, FORM_HALF, K_HALF, RELATIVE_STEP_HALF, MASK_HALF = 0, 1, 8, 9, 10
"""Fields as 4-byte words; the form is type, kind, page and count together."""
QUEUED_OFFSET: Final = 120
"""Nanoseconds of the busy time in which the training thread waited for a core; NaN: not measured. A 4-byte float."""
STEP_NS, BUSY_NS, BUSY_CPU_NS, WAIT_NS, FIRST_PHASE_NS, QUEUED_NS = 11, 12, 13, 14, PHASE_TIMES_OFFSET // 4, 30
"""Fields as 4-byte floats."""
VALUES_OFFSET: Final = 128
"""Last in the entry, so that values can be written in place during the step, with further pages behind."""
PAGE_VALUES: Final = 16
"""Metric i is on page i // 16 at index i % 16: page 0 in the step entry, the others in values entries."""
PAGES: Final = NAMES_MAX // PAGE_VALUES

KINDS: Final = ("train", "eval", "checkpoint")

DETAIL_CHARACTERS_MAX: Final = 400
"""Longest detail of an answer: at most 4 bytes a character, in a cell of 1,896 bytes."""

RING_SUFFIX: Final = ".ring"
STACK_SUFFIX: Final = ".stack"
"""File beside each ring, to which faulthandler writes the rank's stacks."""
OUTPUT_SUFFIX: Final = ".output"
"""File beside each ring with the end of what the rank has printed."""
TRACE_SUFFIX: Final = ".trace"
"""File beside each ring, in which the rank answers an order to trace: JSON."""
UNFINISHED_SUFFIX: Final = ".new"
"""Behind the name of an answer that is still being written."""
TRACE_BYTES_MAX: Final = 64 * 1024
"""Largest answer; the rows in it are limited, and make a fifth of that."""
RESUME_FILE_SUFFIX: Final = ".resume.json"


class Directive(NamedTuple):
    """What an order asks of the rank now, as the agent writes it into the directive cell."""

    order: str
    """"" if no order is open, and only `proven` counts."""
    attempt: str
    phase: str
    """hold, do, go, release; closed clears the cell."""
    action: str = ""
    """pause, checkpoint, rollback, stop."""
    step: int = -1
    """The rank holds at the boundary before this step."""
    lease_s: float = 5.0
    checkpoint: str = ""
    location: str = ""
    checkpoint_step: int = -1
    k: int = 0
    proven: str = ""
    """Independent of the order: the newest capture in this rank's memory that proved good. The rank keeps it."""
    trace: str = ""
    """Independent of the order: the request for a trace that the rank answers; "" for none."""
    trace_steps: int = 0
    """How many steps it is to have."""

    @property
    def persistent(self) -> PersistentRequests:
        """What does not depend on the order."""
        return PersistentRequests(self.proven, self.trace, self.trace_steps)


class PersistentRequests(NamedTuple):
    """The persistent part of a directive, besides its order. Fields as in `Directive`."""

    proven: str = ""
    trace: str = ""
    trace_steps: int = 0


NO_REQUESTS: Final = PersistentRequests()


class Answer(NamedTuple):
    """A rank's answer to the newest order that it carried out or refused."""

    order: str = ""
    answer: str = ""
    """held, done, failed, passed, released, went."""
    step: int = -1
    """The step before whose boundary the rank is; after a rollback the step it goes on from."""
    k: int = 0
    fingerprint: int = 0
    detail: str = ""
    """For done: the checkpoint (rollback) or the place it was saved in (checkpoint); for failed: the error."""


class Cell:
    """One composed fact in two copies, so that an interrupted write leaves the older copy whole.

    A write fills the copy that is not current and then increments one word, by which a reader sees the change. Exactly
    one process writes a cell.
    """

    _HEAD: Final = struct.Struct("<QII")

    def __init__(self, view: memoryview, offset: int, size: int) -> None:
        self._view = view
        self._offset = offset
        self.words = view[offset : offset + 8].cast("Q")
        self._copy_bytes = (size - 8) // 2 // 8 * 8
        self.capacity_bytes = self._copy_bytes - self._HEAD.size

    def write(self, payload: bytes) -> None:
        """Replace the content.

        Raises:
            ValueError: the payload is longer than `capacity_bytes`; the old content stays.
        """
        if len(payload) > self.capacity_bytes:
            raise ValueError(f"{len(payload)} bytes do not fit into a cell of {self.capacity_bytes}")
        number = self.words[0] + 1
        at = self._copy_offset(number)
        self._HEAD.pack_into(self._view, at, number, len(payload), crc32(payload, number & 0xFFFFFFFF))
        self._view[at + self._HEAD.size : at + self._HEAD.size + len(payload)] = payload
        self.words[0] = number

    def read(self) -> tuple[int, bytes] | None:
        """Return (number, payload) of the newest whole copy; None before the first write, or if both are torn."""
        for _ in range(2):
            latest = self.words[0]
            for number in (latest, latest - 1):
                payload = self._copy(number) if number > 0 else None
                if payload is not None:
                    return number, payload
        return None

    def release(self) -> None:
        """Release the mapping; the cell cannot be used afterwards."""
        self.words.release()

    def _copy_offset(self, number: int) -> int:
        return self._offset + 8 + (number & 1) * self._copy_bytes

    def _copy(self, number: int) -> bytes | None:
        at = self._copy_offset(number)
        stored, length, checksum = self._HEAD.unpack_from(self._view, at)
        if stored != number or length > self.capacity_bytes:
            return None
        payload = bytes(self._view[at + self._HEAD.size : at + self._HEAD.size + length])
        return payload if crc32(payload, number & 0xFFFFFFFF) == checksum else None


def answer_cell(view: memoryview) -> Cell:
    """The rank's answer to the newest order; JSON of `Answer`."""
    return Cell(view, ANSWER_OFFSET, DIRECTIVE_OFFSET - ANSWER_OFFSET)


def directive_cell(view: memoryview) -> Cell:
    """The agent's newest directive; JSON of `Directive`."""
    return Cell(view, DIRECTIVE_OFFSET, METRICS_OFFSET - DIRECTIVE_OFFSET)


def identity_cell(view: memoryview) -> Cell:
    """The rank's identity and what its job can do; deflated JSON, since parameter names are many and similar."""
    return Cell(view, IDENTITY_OFFSET, RING_OFFSET - IDENTITY_OFFSET)


def encode_directive(directive: Directive) -> bytes:
    """The content of a directive cell."""
    return json.dumps(directive._asdict(), separators=(",", ":")).encode()


def decode_directive(payload: bytes) -> Directive:
    """Read a directive; fields that only a newer agent knows are ignored.

    Raises:
        ValueError: not a directive.
    """
    return Directive(**_known(payload, Directive._fields))


def encode_answer(answer: Answer) -> bytes:
    """The content of an answer cell; the detail is cut to what fits, and made printable."""
    detail = "".join(letter if letter.isprintable() else " " for letter in answer.detail[:DETAIL_CHARACTERS_MAX])
    fields = answer._replace(detail=detail)._asdict()
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")


def decode_answer(payload: bytes) -> Answer:
    """Read an answer.

    Raises:
        ValueError: not an answer.
    """
    return Answer(**_known(payload, Answer._fields))


def plain_json(text: bytes) -> Any:
    """Read JSON that a rank wrote. Halves of surrogate pairs, as file names that are not UTF-8 have, become `?`.

    Raises:
        ValueError: not JSON.
    """
    return json.loads(json.dumps(json.loads(text), ensure_ascii=False).encode("utf-8", "replace"))


def _known(payload: bytes, names: tuple[str, ...]) -> dict[str, Any]:
    fields = json.loads(payload)
    if not isinstance(fields, dict):
        raise ValueError(f"an object was expected, not {type(fields).__name__}")  # noqa: TRY004 - bad content
    return {name: fields[name] for name in names if name in fields}


def write_name(view: memoryview, table: int, index: int, name: bytes, flags: int) -> None:
    """Append one row to a name table. The length comes last: a reader that finds 0 knows the table ends there."""
    at = table + index * NAME_ROW_BYTES
    view[at + 8 : at + 8 + len(name)] = name
    _NAME_ROW.pack_into(view, at, flags, len(name))


def read_names(view: memoryview, table: int) -> list[tuple[str, int]]:
    """All rows of a name table so far, as (name, flags), in index order."""
    names = []
    for index in range(NAMES_MAX):
        at = table + index * NAME_ROW_BYTES
        flags, length = _NAME_ROW.unpack_from(view, at)
        if length == 0:
            break
        names.append((bytes(view[at + 8 : at + 8 + length]).decode("utf-8", "replace"), flags))
    return names


# ---- paths -----------------------------------------------------------------------------------------------------------


def file_stem(text: str) -> str:
    """A readable file name that is unique to this text: cleaned, cut, and with a checksum.

    >>> file_stem("gpt/small run")
    'gpt_small_run-2be3e8f6'
    """
    return f"{re.sub(r'[^A-Za-z0-9_-]', '_', text)[:40]}-{crc32(text.encode()):08x}"


def agent_lock_path(directory: str, job: str) -> str:
    """The file whose POSIX lock the job's agent on this host holds as long as it lives."""
    return os.path.join(directory, f"{file_stem(job)}.agent.lock")


def devices_lock_path(directory: str, job: str) -> str:
    """The file that the reader of this host's devices holds locked, even while it hangs in the driver."""
    return os.path.join(directory, f"{file_stem(job)}.devices.lock")


def agent_identity_path(directory: str, job: str) -> str:
    """The file with the id and the secret under which the job's agent on this host has enrolled."""
    return os.path.join(directory, f"{file_stem(job)}.agent.identity")


def host_key_path(directory: str, host: str, url: str) -> str:
    """The file by which this user's agents show a service that they are on one host."""
    return os.path.join(directory, f"{file_stem(host)}.{sha256(url.encode()).hexdigest()[:16]}.host.key")


def resume_path(directory: str, job: str) -> str:
    """The file with the agents' advice for a relaunch of the job."""
    return os.path.join(directory, file_stem(job) + RESUME_FILE_SUFFIX)


def stack_path(ring_path: str) -> str:
    """The file to which the rank with this ring writes its stacks."""
    return ring_path.removesuffix(RING_SUFFIX) + STACK_SUFFIX


def output_path(ring_path: str) -> str:
    """The file in which the rank with this ring keeps the end of its output."""
    return ring_path.removesuffix(RING_SUFFIX) + OUTPUT_SUFFIX


def trace_path(ring_path: str) -> str:
    """The file in which the rank with this ring answers an order to trace."""
    return ring_path.removesuffix(RING_SUFFIX) + TRACE_SUFFIX
