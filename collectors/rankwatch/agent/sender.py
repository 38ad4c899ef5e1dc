"""Sends batches to the service: in order, with retries, and through the spool while the service does not answer.

`put` never blocks on the network or a disk: this thread does all of that. A batch is acknowledged (the ring may
overwrite its records) once the service has accepted it or the spool holds it. Memory is bounded: if the service does
not answer and the spool cannot be written, the oldest step records are dropped and counted.

The agent's bounded buffer on disk while the service does not answer.

Messages are kept in segment files, oldest first, each framed with its length and checksum. A kill during a write leaves
a torn last frame, which is skipped: its records were not acknowledged and are read from the ring again. Messages of the
oldest segment may be sent twice after a kill; their numbers make that harmless. There is no fsync: the spool survives
the death of every process, and a host that crashes loses its ranks' unread recorders too.

At the size limit, step and values records of the oldest segments are dropped first; events, progress and the ranks'
identities last. Every drop is counted in `losses`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Final
from zlib import crc32

import msgspec

from rankwatch.agent.batch_builder import EncodedBatch, Losses, all_records, without_records
from rankwatch.agent.clock import AgentClock
from rankwatch.outcome import Later, Outcome, Refused

SPOOL_BYTES_MAX: Final = 64 * 1024 * 1024
"""8 ranks x 10 steps/s x 80 bytes = 6.4 KB/s: nearly three hours; 64 ranks: 21 min of all records, days of events."""
SEGMENT_BYTES: Final = 256 * 1024
"""Bounds what is sent twice after a kill, and what is held in memory while it is sent."""

_ORIGIN: Final = "origin"
_FRAME: Final = struct.Struct("<II")
_FULL: Final = ".seg"
_STRIPPED: Final = ".rest"
"""Suffix of a segment whose records were dropped."""


@dataclass(frozen=True, slots=True)
class SpoolOrigin:
    """Where a spool comes from, for an agent that later sends what is left in it."""

    directory: str
    """Folder of the recorders."""
    job: str
    service: str = ""
    """The service, or the brokers, that its messages are for; empty: the agent knew none."""


class Spool:
    """A first-in, first-out queue of encoded batches in a folder. Used by one thread."""

    def __init__(self, folder: Path, bytes_max: int = SPOOL_BYTES_MAX, *, origin: SpoolOrigin | None = None) -> None:
        """Open the spool in this folder and find what an earlier agent left there.

        Args:
            folder: the spool's own.
            bytes_max: its limit.
            origin: for `left_spools`; None: nobody else will send what is left here.

        Raises:
            OSError: the folder cannot be created or read.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if origin is not None:
            with contextlib.suppress(OSError):  # a full disk: what waits here is sent all the same
                (folder / _ORIGIN).write_bytes(msgspec.json.encode(origin))
        self._folder = folder
        self._bytes_max = bytes_max
        self._segments: deque[tuple[Path, int]] = deque()
        """Oldest first, with sizes; the segment whose messages are in `_head` is not included."""
        self._head: deque[bytes] = deque()
        self._head_path: Path | None = None
        self._writing: Path | None = None
        self._next = 0
        self.losses = Losses()
        for path in sorted(folder.iterdir()):
            if path.suffix in (_FULL, _STRIPPED) and path.stem.isdecimal():
                self._segments.append((path, path.stat().st_size))
                self._next = int(path.stem) + 1
        self.bytes = sum(size for _, size in self._segments)

    def __bool__(self) -> bool:
        return bool(self._segments or self._head)

    def append(self, body: bytes) -> None:
        """Append one message; at the size limit the oldest records are dropped.

        Raises:
            OSError: it could not be written (disk full, folder gone). The spool is as before.
        """
        frame = _FRAME.pack(len(body), crc32(body)) + body
        path = self._segment_for(len(frame))
        before = self._segments[-1][1] if self._segments and self._segments[-1][0] == path else 0
        with path.open("ab", buffering=0) as file:
            try:
                written = file.write(frame)
            except OSError:
                written = 0
            if written != len(frame):
                os.ftruncate(file.fileno(), before)
                if not before:
                    path.unlink()
                    self._writing = None
                raise OSError(errno.ENOSPC, "the spool's disk is full", str(path))
        if before:
            self._segments[-1] = (path, before + len(frame))
        else:
            self._segments.append((path, len(frame)))
        self.bytes += len(frame)
        self._make_room()

    def peek(self) -> list[bytes]:
        """The oldest messages, at most one segment; empty if the spool is."""
        while not self._head:
            self._drop_head_file()
            if not self._segments:
                return []
            path, size = self._segments.popleft()
            self.bytes -= size
            if path == self._writing:
                self._writing = None
            self._head_path = path
            self._head.extend(self._read(path))
        return list(self._head)

    def pop(self) -> None:
        """Remove the oldest message, which was accepted or refused."""
        self._head.popleft()
        if not self._head:
            self._drop_head_file()

    def close(self) -> None:
        """Remove the folder and its parent if they are empty."""
        if self:
            return
        with contextlib.suppress(OSError):  # the parent has other spools
            (self._folder / _ORIGIN).unlink(missing_ok=True)
            self._folder.rmdir()
            self._folder.parent.rmdir()

    def _segment_for(self, size: int) -> Path:
        if self._writing is not None and self._segments and self._segments[-1][1] + size <= SEGMENT_BYTES:
            return self._writing
        self._writing = self._folder / f"{self._next:08d}{_FULL}"
        self._next += 1
        return self._writing

    def _read(self, path: Path) -> list[bytes]:
        try:
            content = path.read_bytes()
        except OSError:
            self.losses["", "", "spool_unreadable"] += 1
            return []
        bodies, at = [], 0
        while at + _FRAME.size <= len(content):
            length, checksum = _FRAME.unpack_from(content, at)
            body = content[at + _FRAME.size : at + _FRAME.size + length]
            if len(body) != length:
                break  # cut off by a kill before it was acknowledged, so its records are read from the ring again
            if crc32(body) != checksum:
                self.losses["", "", "spool_torn"] += 1
                break
            bodies.append(body)
            at += _FRAME.size + length
        return bodies

    def _make_room(self) -> None:
        """Bring the spool under its limit: strip the oldest full segments, then drop the oldest ones whole."""
        index = 0
        while self.bytes > self._bytes_max and index < len(self._segments) - 1:
            path, size = self._segments[index]
            if path.suffix == _FULL:
                self._strip(index, path, size)
            index += 1
        while self.bytes > self._bytes_max and len(self._segments) > 1:
            path, size = self._segments.popleft()
            for body in self._read(path):
                self.losses += all_records(body, "spool")
            path.unlink(missing_ok=True)
            self.bytes -= size

    def _strip(self, index: int, path: Path, size: int) -> None:
        kept = bytearray()
        for body in self._read(path):
            rest, losses = without_records(body)
            self.losses += losses
            if rest is not None:
                kept += _FRAME.pack(len(rest), crc32(rest)) + rest
        # In place, because a full disk has no room for both. A kill in between loses a few old events besides the
        # records that are dropped here.
        rest_path = path.with_suffix(_STRIPPED)
        with path.open("r+b") as file:
            file.write(kept)
            file.truncate()
        path.rename(rest_path)
        self._segments[index] = (rest_path, len(kept))
        self.bytes += len(kept) - size

    def _drop_head_file(self) -> None:
        if self._head_path is not None:
            self._head_path.unlink(missing_ok=True)
            self._head_path = None


def left_spools(folder: Path) -> list[SpoolOrigin]:
    """The origin of each spool in this folder in which messages wait, oldest first."""
    found = []
    for path in folder.glob(f"*/{_ORIGIN}"):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            if path.stat(follow_symlinks=False).st_uid != os.getuid():
                continue  # anyone can create folders in /var/tmp
            origin = msgspec.json.decode(path.read_bytes(), type=SpoolOrigin)
            waiting = [one for one in path.parent.iterdir() if one.suffix in (_FULL, _STRIPPED)]
            if waiting:
                found.append((min(one.stat().st_mtime for one in waiting), origin))
    return [origin for _, origin in sorted(found, key=itemgetter(0))]


MEMORY_BYTES_MAX: Final = 8 * 1024 * 1024
"""Most that waits in memory. 64 ranks x 10 steps/s x 80 bytes = 51 KB/s: during a request that takes its whole time-out
of 10 s, 0.5 MB gather, so this limit is reached only if the spool cannot be written either."""
MEMORY_EASY_BYTES: Final = 1024 * 1024
"""While the spool is being sent, newer batches wait in memory up to this size; then they are appended to the spool."""
BUSY_BATCHES: Final = 3
BACKOFF_FIRST_S: Final = 0.25
BACKOFF_MAX_S: Final = 2.0
"""Short, because a refused connection costs little and a service that is back should learn of hangs at once."""
TELL_AFTER_S: Final = 10.0
"""A service that restarts is back sooner; an outage longer than this is shown in the training output."""
RETRY_AFTER_MAX_S: Final = 30.0
"""The longest wait that a service can ask for."""
REASONS_LOGGED_MAX: Final = 16
"""Different reasons of one outage that are logged: a reason may contain a time or a number."""

_log = logging.getLogger(__name__)


Publish = Callable[[Sequence[bytes]], Sequence[Outcome]]
"""Sends encoded batches in order and returns an outcome for each; fewer outcomes than batches mean that the rest was
not tried. It must not raise."""


def one_by_one(publish_one: Callable[[bytes], Outcome]) -> Publish:
    """Publish with a function that sends one batch; stops at the first batch that must be retried."""

    def publish(bodies: Sequence[bytes]) -> Sequence[Outcome]:
        outcomes: list[Outcome] = []
        for body in bodies:
            outcomes.append(publish_one(body))
            if isinstance(outcomes[-1], Later):
                break
        return outcomes

    return publish


class Sender(threading.Thread):
    """The thread that sends. Everything public may be called from any other thread."""

    def __init__(self, publish: Publish, open_spool: Callable[[], Spool], clock: AgentClock) -> None:
        super().__init__(name="sender", daemon=True)
        self._publish = publish
        self._open_spool = open_spool
        self._spool: Spool | None = None
        self._clock = clock
        self._condition = threading.Condition()
        self._fresh: deque[EncodedBatch] = deque()
        self._fresh_bytes = 0
        self._acknowledged: dict[str, int] = {}
        self._losses = Losses()
        self._deadline_s: float | None = None
        self._failures = 0
        self._failing_since_s = 0.0
        self._reasons_logged: set[str] = set()
        self._answered = False
        self._way_trouble = ""
        self._refused = ""
        self._spool_trouble = ""

    @property
    def behind(self) -> bool:
        """True while the service does not accept telemetry: then fewer, larger messages are better."""
        return self._failures > 0

    @property
    def crowded(self) -> bool:
        """True while it cannot keep up, on a host whose cores are full: then too, fewer messages are better."""
        return self.behind or len(self._fresh) > BUSY_BATCHES

    @property
    def trouble(self) -> str:
        """What a person must know about the connection to the service; "" if all is well."""
        return "; ".join(text for text in (self._way_trouble, self._refused, self._spool_trouble) if text)

    @property
    def answered(self) -> bool:
        """Whether it is known if the service accepts telemetry: True from the first batch that it took or refused."""
        return self._answered

    @property
    def held(self) -> bool:
        """True while telemetry stays on this host, and a person must know it."""
        return bool(self._way_trouble)

    @property
    def idle(self) -> bool:
        """Whether every batch is acknowledged, and the spool is empty or cannot be sent now."""
        with self._condition:
            return not self._fresh and (self.behind or not self._spool)

    def put(self, encoded_batch: EncodedBatch) -> None:
        """Hand over one batch."""
        with self._condition:
            self._fresh.append(encoded_batch)
            self._fresh_bytes += encoded_batch.size
            if self._fresh_bytes > MEMORY_BYTES_MAX:
                self._shrink()
            self._condition.notify()

    def take_acknowledged(self) -> dict[str, int]:
        """Return and forget the newest acknowledged sequence number of each recorder that advanced since the last call,
        by path.
        """
        with self._condition:
            acknowledged, self._acknowledged = self._acknowledged, {}
            return acknowledged

    def take_losses(self) -> Losses:
        """Records that were dropped since the last call."""
        with self._condition:
            losses, self._losses = self._losses, Losses()
            return losses

    def close(self, within_s: float) -> None:
        """Send for at most `within_s` seconds, spool the rest, and end the thread."""
        with self._condition:
            self._deadline_s = self._clock.monotonic_s() + within_s
            self._condition.notify()
        self.join(within_s + 15.0)

    def run(self) -> None:
        """Send until closed. Not for callers."""
        self._spool = self._try_open()
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._fresh or self._spool or self._deadline_s is not None, 1.0)
                done = self._deadline_s is not None and not (self._fresh or self._spool)
            if done or self._overdue():
                break
            if self._spool and self._fresh_bytes > MEMORY_EASY_BYTES:
                self._spill()
            if self._fresh or self._spool:
                self._send_oldest()
        self._spill()
        if self._spool is not None:
            self._spool.close()

    def _overdue(self) -> bool:
        return self._deadline_s is not None and self._clock.monotonic_s() >= self._deadline_s

    def _send_oldest(self) -> None:
        """Send the oldest segment of the spool, else the oldest batch in memory."""
        if self._spool is not None and (spooled := self._spool.peek()):
            for body, outcome in zip(spooled, self._publish(spooled), strict=False):
                if not self._ended(body, outcome):
                    return
                self._spool.pop()
            return
        with self._condition:
            fresh = self._fresh[0] if self._fresh else None
        if fresh is None:
            return
        if fresh.body:
            [outcome] = self._publish([fresh.body])
            if not self._ended(fresh.body, outcome):
                return
        with self._condition:
            if self._fresh and self._fresh[0] is fresh:
                self._settle()

    def _ended(self, body: bytes, outcome: Outcome) -> bool:
        """Whether a batch is finished, accepted or refused; if it must be retried, waits before it returns False."""
        if isinstance(outcome, Later):
            self._wait(outcome)
            return False
        self._recovered()
        if isinstance(outcome, Refused):
            _log.warning("refused: %s %s", outcome.reason, outcome.detail)
            self._refused = f"some telemetry was refused and is lost: {outcome.reason} {outcome.detail}".strip()
            with self._condition:
                self._losses += all_records(body, outcome.reason)
        return True

    def _wait(self, outcome: Later) -> None:
        self._failures += 1
        if self._failures == 1:
            self._failing_since_s = self._clock.monotonic_s()
        if outcome.reason not in self._reasons_logged and len(self._reasons_logged) < REASONS_LOGGED_MAX:
            self._reasons_logged.add(outcome.reason)
            _log.warning("the service does not accept telemetry: %s; spooling", outcome.reason)
        lasting = self._clock.monotonic_s() - self._failing_since_s >= TELL_AFTER_S
        if outcome.for_a_person or lasting:
            self._way_trouble = f"telemetry stays on this host for now: {outcome.reason}"
        self._spill()
        # Jitter, so that the agents of a large job do not all retry at the same moment.
        if outcome.after_s is not None:
            pause_s = min(RETRY_AFTER_MAX_S, outcome.after_s) * random.uniform(1.0, 1.2)  # noqa: S311 - no secret
        else:
            backoff_s = BACKOFF_FIRST_S * 2.0 ** min(self._failures - 1, 10)
            pause_s = min(BACKOFF_MAX_S, backoff_s) * random.uniform(0.7, 1.0)  # noqa: S311 - no secret
        with self._condition:
            self._condition.wait_for(lambda: self._deadline_s is not None, pause_s)
            if self._deadline_s is not None:
                self._condition.wait(0.1)

    def _recovered(self) -> None:
        if self._failures:
            _log.info("the service accepts telemetry again after %d failures", self._failures)
        self._failures = 0
        self._reasons_logged.clear()
        self._answered = True
        self._way_trouble = ""

    def _spill(self) -> None:
        """Move the batches in memory to the spool, until it is done or a write fails."""
        self._spool = self._spool or self._try_open()
        while self._spool is not None:
            with self._condition:
                if not self._fresh:
                    return
                encoded_batch = self._fresh[0]
            try:
                if encoded_batch.body:
                    self._spool.append(encoded_batch.body)
            except OSError as error:
                self._spool_failed(error)
                return
            with self._condition:
                self._losses += self._spool.losses
                self._spool.losses.clear()
                if self._fresh and self._fresh[0] is encoded_batch:
                    self._settle()

    def _settle(self) -> None:
        encoded_batch = self._fresh.popleft()
        self._fresh_bytes -= encoded_batch.size
        self._acknowledged.update(encoded_batch.positions)

    def _shrink(self) -> None:
        """Drop the oldest records in memory down to three quarters of the limit, step and values records first."""
        goal = MEMORY_BYTES_MAX * 3 // 4
        # Keep the first batch: it may be in a request right now.
        kept = deque([self._fresh.popleft()])
        while self._fresh and self._fresh_bytes > goal:
            encoded_batch = self._fresh.popleft()
            rest, losses = without_records(encoded_batch.body) if encoded_batch.body else (None, Losses())
            self._losses += losses
            self._fresh_bytes -= encoded_batch.size
            kept.append(EncodedBatch(rest or b"", encoded_batch.positions))
            self._fresh_bytes += kept[-1].size
        positions: dict[str, int] = {}
        while len(kept) > 1 and self._fresh_bytes > goal:
            encoded_batch = kept[1]
            del kept[1]
            if encoded_batch.body:
                self._losses += all_records(encoded_batch.body, "spool")
            self._fresh_bytes -= encoded_batch.size
            positions.update(encoded_batch.positions)
        if positions:
            # Dropped records count as acknowledged, in their order: the rings need not keep them either.
            kept.insert(1, EncodedBatch(b"", positions))
            self._fresh_bytes += kept[1].size
        kept.extend(self._fresh)
        self._fresh = kept

    def _try_open(self) -> Spool | None:
        try:
            spool = self._open_spool()
        except OSError as error:
            self._spool_failed(error)
            return None
        self._spool_trouble = ""
        return spool

    def _spool_failed(self, error: OSError) -> None:
        # Log each error once: the next try comes within seconds and would repeat it.
        if not self._spool_trouble.endswith(f": {error}"):
            _log.warning("the spool cannot be written, so telemetry is kept in memory: %s", error)
        self._spool_trouble = f"the spool cannot be written, so telemetry is kept in memory: {error}"
