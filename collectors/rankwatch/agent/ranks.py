"""The ranks of one job on this host: finds their recorders, reads them, and removes them once all is sent.

A recorder is removed when its process is gone, its last entry is acknowledged (the service or the spool has it) and its
exit is reported. A small file beside each recorder keeps the acknowledged position, from which the next worker
continues.
"""

from __future__ import annotations

import logging
import os
import signal
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple
from zlib import crc32

from rankwatch import layout, wire
from rankwatch.agent.processes import RankProcess
from rankwatch.layout import NO_REQUESTS, Directive, PersistentRequests
from rankwatch.reader import Header, Note, Poll, ProgressBlock, RingReader

FULLY_SENT: Final = 2**63
"""Position beyond every entry: the last record and the exit are acknowledged, and the recorder can be removed."""
RANKS_MAX: Final = 512
"""Recorders read at once, living and dead: 1 GiB of mapped memory. Further ones wait until there is room."""
UNREADABLE_MAX: Final = 4_096
"""Foreign or unfinished files remembered by name, so that they are not opened at every scan."""

_POSITION: Final = struct.Struct("<QI")
_POSITION_SUFFIX: Final = ".position"

_log = logging.getLogger(__name__)


class Look(NamedTuple):
    """What a rank that stands still does, by the stack that the agent has taken of it."""

    stands: tuple[int, ...] = ()
    """Where it stands: the numbers of its progress block that change when it moves."""
    again_s: float = 0.0
    """Monotonic time of the next look."""
    doing: str = ""
    """See `wire.Progress.doing`."""


@dataclass(slots=True)
class LocalRank:
    """One recorder and the process behind it."""

    path: str
    reader: RingReader
    header: Header
    process: RankProcess | None
    """None if the process was gone when the recorder was found, or cannot be opened; then the recorder's lock shows
    whether it lives."""
    acknowledged: int
    """Sequence number of the last entry that the service or the spool has."""
    read: int
    """Sequence number of the last whole record that was read."""
    error: str = ""
    """The exception that its excepthook noted, as "Type: message"."""
    where: str = ""
    """Place in the code of that exception, or where the loop was left by `break`."""
    status: tuple[int | None, int | None] | None = None
    """Exit code and signal that follow from that exception; None without one."""
    ending: bool = False
    """True while an exception that left the loop is ending the process."""
    left_by: str = ""
    """How the rank left its loop, by its own note: end, break or stop."""
    broken_off: Note | None = None
    """Its newest note that its loop was broken off."""
    said_unix_ns: int = 0
    """When the rank noted its exception or that it left."""
    last_sign_unix_ns: int = 0
    """For a process that was dead when its recorder was found: the last time in its progress block."""
    gone_since_s: float | None = None
    """Monotonic time when the agent saw that the process ended or closed its recorder."""
    unlocked_since_s: float | None = None
    """Monotonic time when the process was first seen alive without its lock."""
    closed: bool = False
    """True if the process has closed its recorder and lives on."""
    exit_order: int | None = None
    """Place among the ranks of this launch and host in which its process ended; 0 is the first mover."""
    exit_reported: bool = False
    shards: int = 0
    """How many ranks save a part of a checkpoint, by its own newest note that says so; 0: every rank."""
    introduced: tuple[str, int, tuple[str, ...], int] = ("", 0, (), 0)
    """The attempt, identity number, checkpoint roots and shards with which it was last introduced to the service."""
    directive: Directive | None = None
    """The directive in its slot."""
    renewal: int = 0
    """Renewal number of the order that the directive belongs to."""
    persistent: PersistentRequests = NO_REQUESTS
    """What the same slot asks of the rank beside orders."""
    trace: wire.TraceRequest | None = None
    """The trace that the service asks of the rank."""
    look: Look = field(default_factory=Look)
    """The newest look at it, while it stands still."""

    @property
    def rank(self) -> int:
        """Global rank."""
        return int(self.identity.get("rank", -1))

    @property
    def identity(self) -> Mapping[str, Any]:
        """The identity block as last read."""
        return self.header.identity

    @property
    def is_followed(self) -> bool:
        """Whether a log is all that is known of it: the process here is the follower's, not the rank's."""
        return bool(self.header.identity.get("followed"))

    @property
    def launch(self) -> str:
        """The launch, equal for all processes that were started together."""
        return str(self.header.identity.get("launch", ""))

    def attempt(self, k: int) -> str:
        """The attempt's text, LAUNCH.k."""
        return f"{self.launch}.{k}"

    def poll(self) -> Poll:
        """Read the records since the last poll; unreadable ones are counted as lost."""
        try:
            poll = self.reader.poll()
        except (ValueError, KeyError, TypeError) as error:
            _log.warning("unreadable record in %s: %r", self.path, error)
            return Poll([], {"unknown": 1})
        if poll.entries:
            self.read = poll.entries[-1].sequence
        return poll

    def learn_end(self, note: Note) -> None:
        """Store the rank's own note about its end."""
        fields = note.fields
        if note.kind == "loop_broken_off":
            self.broken_off = note
        if note.kind not in ("exception", "rank_left"):
            return
        if fields.get("type"):
            self.error = f"{fields['type']}: {fields.get('message', '')}"
        self.where = str(fields.get("where", ""))
        self.said_unix_ns = note.time_unix_ns
        if note.kind == "rank_left":
            self.left_by = str(fields.get("reason", ""))
            return
        self.ending = not fields.get("left")
        # For an uncaught KeyboardInterrupt Python ends the process by SIGINT, so there is no exit code.
        interrupted = fields.get("type") == "KeyboardInterrupt" and "code" not in fields
        self.status = (None, signal.SIGINT) if interrupted else (fields.get("code", 1), None)

    def broke_off(self, block: ProgressBlock) -> Note | None:
        """The note that its loop was broken off, unless a later step has begun since."""
        entered_unix_ns = self.header.start_unix_ns + block.step_entered_ns - self.header.start_monotonic_ns
        since = self.broken_off is not None and self.broken_off.time_unix_ns >= entered_unix_ns
        return self.broken_off if since else None

    def refresh_identity(self) -> bool:
        """Read the identity again if the rank has declared more; True if so."""
        if self.reader.identity_number == self.header.identity_number:
            return False
        try:
            self.header = self.reader.header
        except ValueError:
            return False  # both copies are being rewritten; the next call reads a whole one
        return True


class LocalRanks:
    """All recorders of one job in a directory."""

    def __init__(self, directory: Path, job: str) -> None:
        self._directory = directory
        self._job = job
        self._ranks: dict[str, LocalRank] = {}
        self._not_ours: set[str] = set()
        self._unlisted = False

    def __iter__(self) -> Iterator[LocalRank]:
        return iter(self._ranks.values())

    def __len__(self) -> int:
        return len(self._ranks)

    def scan(self) -> list[LocalRank]:
        """Look for new recorders; returns the new ones."""
        try:
            names = [entry.name for entry in os.scandir(self._directory) if entry.name.endswith(layout.RING_SUFFIX)]
        except OSError as error:
            if not self._unlisted:
                _log.warning("cannot list %s: %s", self._directory, error)
            self._unlisted = True
            return []
        self._unlisted = False
        if len(self._not_ours) > UNREADABLE_MAX:
            self._not_ours.clear()
        self._not_ours.intersection_update(names)
        found = []
        for name in sorted(names):
            path = str(self._directory / name)
            if path in self._ranks or name in self._not_ours or len(self._ranks) >= RANKS_MAX:
                continue
            rank = self._open(path, name)
            if rank is not None:
                self._ranks[path] = rank
                found.append(rank)
        return found

    def acknowledge_sent(self, positions: dict[str, int]) -> None:
        """Store up to which entry the service or the spool has each recorder, on disk too."""
        for path, position in positions.items():
            rank = self._ranks.get(path)
            if rank is not None and position > rank.acknowledged:
                rank.acknowledged = position
                _write_position(path, position)

    def remove(self, rank: LocalRank) -> None:
        """Forget a rank and delete its files."""
        del self._ranks[rank.path]
        rank.reader.close()
        if rank.process is not None:
            rank.process.close()
        _delete(rank.path)

    def close(self) -> None:
        """Close all recorders; their files stay."""
        for rank in self._ranks.values():
            rank.reader.close()
            if rank.process is not None:
                rank.process.close()
        self._ranks.clear()

    def _open(self, path: str, name: str) -> LocalRank | None:
        acknowledged = _read_position(path)
        if acknowledged == FULLY_SENT:
            _delete(path)
            return None
        try:
            reader = RingReader(path, acknowledged + 1, writable=True)
        except (ValueError, OSError):
            return None  # still being created, or of another version: the next scan tries again
        try:
            header = reader.header
        except ValueError:
            reader.close()
            return None
        if str(header.identity.get("job", "")) != self._job:
            reader.close()
            self._not_ours.add(name)
            return None
        slot = reader.directives
        rank = LocalRank(
            path,
            reader,
            header,
            _hold(header),
            acknowledged,
            acknowledged,
            directive=slot.read(),
            persistent=slot.persistent,
        )
        if rank.process is None and not reader.owner_alive():
            rank.last_sign_unix_ns = _last_sign_of_life(reader, header)
        return rank


def jobs_in(directory: Path, known: set[str]) -> dict[str, str]:
    """Names of recorder files that are not in `known`, with the job of each; for a daemon that serves all jobs."""
    return {name: job for name, job, _ in _recorders(directory, known)}


def has_living_rank(directory: Path, job: str) -> bool:
    """Whether a living process records for this job."""
    return any(alive and whose == job for _, whose, alive in _recorders(directory, set()))


def _recorders(directory: Path, known: set[str]) -> Iterator[tuple[str, str, bool]]:
    """File name, job, and whether the owner lives, for every recorder that is not in `known`."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return
    for name in names:
        if not name.endswith(layout.RING_SUFFIX) or name in known:
            continue
        try:
            reader = RingReader(str(directory / name))
        except (ValueError, OSError):
            continue
        try:
            job, alive = str(reader.header.identity.get("job", "")), reader.owner_alive()
        except ValueError:
            continue
        finally:
            reader.close()
        yield name, job, alive


def _delete(path: str) -> None:
    # The position last: a crash in between must not leave a recorder without it, which would be sent a second time.
    trace = layout.trace_path(path)
    beside = layout.stack_path(path), layout.output_path(path), trace + layout.UNFINISHED_SUFFIX, trace
    for each in (*beside, path, path + _POSITION_SUFFIX):
        try:
            os.unlink(each)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                _log.warning("cannot remove %s: %s", each, error)


def _hold(header: Header) -> RankProcess | None:
    try:
        return RankProcess(header.pid, header.start_ticks)
    except OSError:
        return None


def _last_sign_of_life(reader: RingReader, header: Header) -> int:
    block = reader.progress()
    seen_ns = max(block.step_entered_ns, block.phase_entered_ns, block.outside_ns)
    return header.start_unix_ns + seen_ns - header.start_monotonic_ns


def _read_position(path: str) -> int:
    try:
        content = Path(path + _POSITION_SUFFIX).read_bytes()
    except OSError:
        return 0
    if len(content) != _POSITION.size:
        return 0
    position, checksum = _POSITION.unpack(content)
    return int(position) if checksum == crc32(content[:8]) else 0


def _write_position(path: str, position: int) -> None:
    number = position.to_bytes(8, "little")
    try:
        descriptor = os.open(path + _POSITION_SUFFIX, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(descriptor, _POSITION.pack(position, crc32(number)), 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        # Without it the worst is that records are sent twice after a crash.
        _log.debug("position of %s not kept: %s", path, error)
