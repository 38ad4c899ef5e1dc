"""The rank's side of the recorder file: creates it, keeps its lock, writes entries, words and names.

Nothing here waits or grows: one mapping, two scratch buffers, two name tables of 64. If no directory can hold the file,
the recorder is off: the same code writes into a small buffer of private memory. The recorder of a forked child is
switched off the same way, since its parent goes on writing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import mmap
import os
import warnings
import weakref
import zlib
from collections.abc import Callable, Mapping
from struct import Struct
from typing import Any, Final
from zlib import crc32

from rankwatch import layout
from rankwatch.folders import UnsafeFolderError, others_reach
from rankwatch.identity import process_start_ticks

_MAGIC: Final = Struct("<8s")
NOTE_TEXT_CHARACTERS_MAX: Final = 400
"""Longest text in a note that is too long for its 8 entries."""

_live: weakref.WeakSet[Recorder] = weakref.WeakSet()


class Recorder:
    """One rank's recorder file; if it is off, the methods work the same and record nothing.

    For the training thread only. `path` is None while the recorder is off. `dropped` counts by reason what could not be
    recorded. `warned` says that a warning has named the reason why the first directories were not used. After
    construction no method raises for lack of space.
    """

    def __init__(self, view: memoryview, path: str | None, descriptor: int = -1) -> None:
        self.path = path
        self.dropped: dict[str, int] = {}
        self.warned = False
        self.on_switch_off: list[Callable[[], None]] = []
        self._unix_offset_ns = 0
        self._descriptor = descriptor
        self._identity: dict[str, Any] = {}
        self._metrics: dict[str, int] = {}
        self._exact = 0
        self._phases: dict[str, int] = {}
        self._step = _Scratch()
        self._late = _Scratch()
        self.floats, self.integers = self._step.floats, self._step.integers
        self.phase_index = self._step.entry[layout.PHASE_INDEX_OFFSET : layout.PHASE_TIMES_OFFSET]
        self._map(view)
        _watch_forks()
        _live.add(self)

    # ---- life --------------------------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls, identity: Mapping[str, Any], directories: list[str], *, monotonic_ns: int, unix_ns: int
    ) -> Recorder:
        """Reserve, map and lock a new file in the first directory that accepts it; if none does, warn and be off.

        Args:
            identity: becomes the identity block; `job`, `launch` and `rank` also name the file.
            directories: best first.
            monotonic_ns: now, on the clock that all later times are read from.
            unix_ns: now, for display.
        """
        stem = layout.file_stem(f"{identity['job']}.{identity['launch']}")
        name = f"{stem}-r{identity['rank']}-p{os.getpid()}-{monotonic_ns:x}{layout.RING_SUFFIX}"
        refusals = []
        unsafe = False
        for directory in directories:
            try:
                recorder = cls._create_in(directory, name)
            except OSError as error:
                unsafe |= isinstance(error, UnsafeFolderError)
                refusals.append(f"{directory}: {error.strerror or error}")
                continue
            break
        else:
            recorder = cls.off()
        recorder.warned = recorder.path is None or unsafe
        if recorder.warned:
            where = f"in {os.path.dirname(recorder.path)}" if recorder.path else "nothing"
            # Where warnings are errors, this one must not end the training run.
            with contextlib.suppress(RuntimeWarning):
                warnings.warn(f"rankwatch records {where}: {'; '.join(refusals)}", RuntimeWarning, stacklevel=3)
        recorder._unix_offset_ns = unix_ns - monotonic_ns
        recorder.words[layout.PHASE] = layout.NO_PHASE
        recorder.words[layout.STEP_ENTERED] = recorder.words[layout.PHASE_ENTERED] = monotonic_ns
        recorder.declare(identity)
        recorder._write_header(monotonic_ns, unix_ns)
        return recorder

    @classmethod
    def off(cls) -> Recorder:
        """A recorder without a file."""
        return cls(_anonymous_mapping(), None)

    @classmethod
    def _create_in(cls, directory: str, name: str) -> Recorder:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        if why := others_reach(directory, os.getuid()):
            raise UnsafeFolderError(why)
        path = os.path.join(directory, name)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Allocate before mapping: a store into a hole of a full tmpfs raises SIGBUS, which would end the training.
            os.posix_fallocate(descriptor, 0, layout.FILE_BYTES)
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mapping = mmap.mmap(descriptor, layout.FILE_BYTES)
        except OSError:
            os.close(descriptor)
            os.unlink(path)
            raise
        # The descriptor stays open: closing any descriptor of the file would drop the lock.
        return cls(memoryview(mapping), path, descriptor)

    def switch_off(self) -> None:
        """Write into private memory from now on; the file does not change any more."""
        self.path = None
        self._map(_anonymous_mapping())
        for take_new_views in self.on_switch_off:
            take_new_views()

    def close(self) -> None:
        """Switch off and drop the lock; the agent then sees that this rank is gone."""
        if self.path is not None:
            self.switch_off()
            os.close(self._descriptor)

    def _map(self, view: memoryview) -> None:
        self._view = view
        self.words = view[layout.PROGRESS_OFFSET : layout.PROGRESS_OFFSET + 8 * layout.PROGRESS_WORDS].cast("Q")
        self.answer = layout.answer_cell(view)
        self.directive = layout.directive_cell(view)
        self._identity_cell = layout.identity_cell(view)
        self._end = len(view)
        self._at = layout.RING_OFFSET
        self._sequence = 0

    def _write_header(self, monotonic_ns: int, unix_ns: int) -> None:
        layout.HEADER.pack_into(
            self._view,
            0,
            b"",
            layout.VERSION,
            layout.RING_OFFSET,
            layout.ENTRY_BYTES,
            layout.RING_ENTRIES,
            os.getpid(),
            os.getuid(),
            unix_ns,
            monotonic_ns,
            process_start_ticks(os.getpid()),
        )
        _MAGIC.pack_into(self._view, 0, layout.MAGIC)

    # ---- names -------------------------------------------------------------------------------------------------------

    def metric(self, name: str, *, exact: bool = False) -> int:
        """Index of a metric, which is added to the table if new; -1, and counted, if the name cannot be kept.

        Args:
            name: at most 64 bytes of UTF-8, all of it printable.
            exact: its values are 64-bit integers, stored without rounding. The first call with a name decides.
        """
        index = self._metrics.get(name)
        if index is None:
            index = self._enter(self._metrics, layout.METRICS_OFFSET, name, layout.NAME_EXACT if exact else 0)
            if index < 0:
                self.drop("metric_names")
            elif exact:
                self._exact |= 1 << index
        return index

    def is_exact(self, index: int) -> bool:
        """Whether the values of this metric are integers."""
        return index >= 0 and bool(self._exact >> index & 1)

    def phase(self, name: str) -> int:
        """Index of a phase; -1, and counted, if there is no room for the name."""
        index = self._phases.get(name)
        if index is None:
            index = self._enter(self._phases, layout.PHASES_OFFSET, name, 0)
            if index < 0:
                self.drop("phase_names")
        return index

    def _enter(self, known: dict[str, int], table: int, name: str, flags: int) -> int:
        text = name.encode("utf-8", "replace")
        if len(known) >= layout.NAMES_MAX or not 0 < len(text) <= layout.NAME_BYTES_MAX:
            return -1
        if not text.decode().isprintable():  # a service would refuse all that is sent with it
            return -1
        index = known[name] = len(known)
        layout.write_name(self._view, table, index, text, flags)
        return index

    def drop(self, reason: str, count: int = 1) -> None:
        """Count what could not be recorded."""
        self.dropped[reason] = self.dropped.get(reason, 0) + count

    def declare(self, fields: Mapping[str, Any]) -> bool:
        """Merge fields into the identity block; return whether one is new or has changed.

        Parameter names are cut, and counted, if the block gets too long.
        """
        before, self._identity = self._identity, {**self._identity, **fields}
        if self._identity == before:
            return False
        payload = _deflated(self._identity)
        names = list(self._identity.get("parameters", ()))
        while len(payload) > self._identity_cell.capacity_bytes and names:
            kept = names[: len(names) // 2]
            self.drop("parameters", len(names) - len(kept))
            names = kept
            payload = _deflated({**self._identity, "parameters": names})
        try:
            self._identity_cell.write(payload)
        except ValueError:
            self.drop("identity")
        return True

    # ---- entries -----------------------------------------------------------------------------------------------------

    def write_step(
        self,
        *,
        step: int,
        k: int,
        kind: int,
        relative_step: int,
        end_ns: int,
        step_ns: int,
        busy_ns: int,
        busy_cpu_ns: int,
        wait_ns: int,
        phases_ns: list[int],
        mask: int,
        queued_ns: float = math.nan,
    ) -> None:
        """Write the step entry from `floats`, `integers` and `phase_index`, and values entries for further pages.

        Args:
            step: the step that ended.
            k: rollbacks inside the process so far.
            kind: index in `layout.KINDS`.
            relative_step: steps begun since this process started.
            end_ns: monotonic time of the end.
            step_ns: its duration.
            busy_ns: the part in which the rank did its own work.
            busy_cpu_ns: CPU time of that work.
            wait_ns: the part in which it waited for other ranks.
            phases_ns: duration of each phase in `phase_index`, at most 12.
            mask: bit i is set if metric i has a value.
            queued_ns: the part of the busy time in which the training thread waited for a core; NaN: not measured.
        """
        scratch = self._step
        self._sequence = sequence = self._sequence + 1
        unix_ns = end_ns + self._unix_offset_ns
        words, halves = scratch.words, scratch.halves
        words[layout.SEQUENCE_WORD] = sequence
        words[layout.STEP_WORD] = step
        words[layout.TIME_WORD] = unix_ns
        halves[layout.FORM_HALF] = layout.STEP | kind << 8 | len(phases_ns) << 24
        halves[layout.K_HALF] = k
        halves[layout.RELATIVE_STEP_HALF] = relative_step
        halves[layout.MASK_HALF] = mask & 0xFFFF
        times = scratch.times
        times[layout.STEP_NS] = step_ns
        times[layout.BUSY_NS] = busy_ns
        times[layout.BUSY_CPU_NS] = busy_cpu_ns
        times[layout.WAIT_NS] = wait_ns
        times[layout.QUEUED_NS] = queued_ns
        at = layout.FIRST_PHASE_NS
        for ns in phases_ns:
            times[at] = ns
            at += 1
        self._publish(scratch)
        if mask > 0xFFFF:
            self._write_pages(scratch, step, k, unix_ns, mask & ~0xFFFF)

    def write_values(
        self, step: int, k: int, now_ns: int, values: Mapping[int, float], exact: Mapping[int, int] | None = None
    ) -> None:
        """Write values that arrived after their step ended, as values entries of that step.

        Args:
            step: the step that the values belong to.
            k: the k of that step.
            now_ns: monotonic time.
            values: by metric index; negative indices were counted when the name was refused.
            exact: the same for metrics that carry integers.
        """
        late = self._late
        floats, integers = late.floats, late.integers
        mask = 0
        for index, value in values.items():
            if index >= 0:
                floats[index] = value
                mask |= 1 << index
        for index, number in (exact or {}).items():
            if index >= 0:
                integers[index] = number
                mask |= 1 << index
        self._write_pages(late, step, k, now_ns + self._unix_offset_ns, mask)

    def _write_pages(self, scratch: _Scratch, step: int, k: int, unix_ns: int, mask: int) -> None:
        # Page 0 is written before the others, so they can be copied over it.
        for page in range(layout.PAGES):
            present = mask >> page * layout.PAGE_VALUES & 0xFFFF
            if present:
                if page:
                    scratch.pages[0][:] = scratch.pages[page]
                self._sequence += 1
                layout.ENTRY.pack_into(
                    scratch.entry, 0, 0, layout.VALUES, 0, page, 0,
                    self._sequence, step, unix_ns, k, 0, present, 0, 0.0, 0.0, 0.0, 0.0,
                )  # fmt: skip
                self._publish(scratch)

    def note(self, kind: str, fields: Mapping[str, Any], step: int, k: int, now_ns: int) -> None:
        """Write a small event in up to 8 entries. If it does not fit, its texts are cut to 400 characters."""
        text = _note_text(kind, fields)
        if len(text) > layout.NOTE_PART_BYTES * layout.NOTE_PARTS_MAX:
            text = _note_text(kind, {name: _cut(value) for name, value in fields.items()})
        if len(text) > layout.NOTE_PART_BYTES * layout.NOTE_PARTS_MAX:
            self.drop("notes")
            return
        entry = self._late.entry
        unix_ns = now_ns + self._unix_offset_ns
        parts = [text[at : at + layout.NOTE_PART_BYTES] for at in range(0, len(text), layout.NOTE_PART_BYTES)]
        for number, part in enumerate(parts):
            self._sequence += 1
            layout.ENTRY.pack_into(
                entry, 0, 0, layout.NOTE, 0, number, len(parts),
                self._sequence, step, unix_ns, k, 0, 0, len(part), 0.0, 0.0, 0.0, 0.0,
            )  # fmt: skip
            entry[layout.NOTE_OFFSET : layout.NOTE_OFFSET + len(part)] = part
            self._publish(self._late)

    def _publish(self, scratch: _Scratch) -> None:
        scratch.halves[layout.CRC_HALF] = crc32(scratch.body)
        at = self._at
        end = at + layout.ENTRY_BYTES
        self._view[at:end] = scratch.entry
        self.words[layout.HEAD] = self._sequence
        self._at = end if end < self._end else layout.RING_OFFSET


class _Scratch:
    """A buffer for one entry, and the values of all pages by metric index; page 0 lies in the entry itself."""

    __slots__ = ("body", "entry", "floats", "halves", "integers", "pages", "times", "words")

    def __init__(self) -> None:
        buffer = memoryview(bytearray(layout.VALUES_OFFSET + 8 * layout.NAMES_MAX))
        values = buffer[layout.VALUES_OFFSET :]
        self.entry = buffer[: layout.ENTRY_BYTES]
        self.body = self.entry[layout.CRC_BYTES :]
        self.words = self.entry.cast("q")
        self.halves = self.entry.cast("I")
        self.times = self.entry.cast("f")
        self.floats = values.cast("d")
        self.integers = values.cast("q")
        page_bytes = 8 * layout.PAGE_VALUES
        self.pages = [values[page * page_bytes : (page + 1) * page_bytes] for page in range(layout.PAGES)]


def _anonymous_mapping() -> memoryview:
    return memoryview(bytearray(layout.RING_OFFSET + layout.ENTRY_BYTES))


def _deflated(identity: Mapping[str, Any]) -> bytes:
    return zlib.compress(json.dumps(identity, separators=(",", ":")).encode(), 6)


def _note_text(kind: str, fields: Mapping[str, Any]) -> bytes:
    return json.dumps({"kind": kind, "fields": fields}, separators=(",", ":"), default=str).encode()


def _cut(value: Any) -> Any:
    return value[:NOTE_TEXT_CHARACTERS_MAX] if isinstance(value, str) else value


_watching_forks = False


def _watch_forks() -> None:
    global _watching_forks  # noqa: PLW0603 - os.register_at_fork cannot be undone, so it is done once for a process
    if not _watching_forks:
        _watching_forks = True
        os.register_at_fork(after_in_child=_switch_off_in_child)


def _switch_off_in_child() -> None:
    for recorder in list(_live):
        recorder.switch_off()
