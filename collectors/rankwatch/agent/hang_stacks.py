"""Stacks of the ranks of a host when their job hangs: Python frames, and native ones if py-spy is installed.

Reads what faulthandler writes: where a rank stands, so that ranks at the same place are known by it. Pure.

Addresses differ between processes. So do the threads of loggers and loaders, which Python's `threading` has started:
they run on one rank only, or stand elsewhere by chance. The thread that trains counts, and those in which the autograd
engine runs Python code.

Takes the Python stacks of a rank, which its own faulthandler writes on a real-time signal.

No debugger and no privilege is needed, and it works while the rank is blocked in C++ or loops in Python. The signal is
sent only to a process that is provably our rank and has a handler for it. A stopped process runs no handler; then its
state, its kernel function and its last phase are reported alone.

All ranks of a host may be asked at once. Those that stand at the same place send its text once.

Takes the native frames of a hanging rank with py-spy, where that is installed on the host.

py-spy stops the process for some milliseconds, so only a rank whose stack was asked for is, and at each place of a host
only one. Nothing waits for it: a rank that is killed meanwhile has none. It needs the right to trace the process;
without it there are Python frames alone, and the log says so once.

What the ranks of a host are asked when their job hangs: stacks and native frames.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import subprocess
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import dropwhile
from pathlib import Path
from typing import Any, Final

from rankwatch import children, layout, wire
from rankwatch.agent.clock import AgentClock
from rankwatch.agent.processes import RankProcess, catches, read_stat, wait_channel
from rankwatch.agent.ranks import LocalRank, Look
from rankwatch.reader import ProgressBlock

DIGEST_CHARS: Final = 16
"""64 bits: two of the 131,072 places of the largest job are equal by chance once in 2 x 10^9 hangs."""
POSITION_CHARS_MAX: Final = 240
"""Longest text of a place; functions with longer names are cut."""

_THREAD: Final = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)\b.*$", re.MULTILINE)
_FRAME: Final = re.compile(r'^  File "(.*)", line (\S+) in (.*)$', re.MULTILINE)
_COLLECTIVES: Final = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
_BACKWARD: Final = "_engine_run_backward"
"""Torch's function in which a rank computes its gradients, and waits for those of its peers."""
_OUTERMOST: Final = ("<module>", "_run_module_as_main", "_bootstrap")
"""Functions in which a thread begins. Another one was called by the interpreter that shuts down."""
_FRAMES_MAX: Final = 100
"""faulthandler writes no more frames of a thread."""
OWN_WAITS: Final = ("do_nanosleep", "hrtimer_nanosleep", "do_wait", "pipe_read")
"""Kernel functions (`wchan`) in which a process waits for a timer, a child or a pipe, and for no peer."""
_OURS: Final = str(Path(layout.__file__).parent)
_OUTPUT: Final = "/rankwatch/output/tail.py"
_INSTALLED: Final = ("/lib/python3", "/site-packages/", "/dist-packages/", "<frozen ", _OURS)


@dataclass(frozen=True, slots=True)
class StackFrame:
    """One call of a stack."""

    file: str
    line: str
    function: str

    @property
    def is_own(self) -> bool:
        """Whether it is code of the job, and not of Python or of an installed package."""
        return not any(part in self.file for part in _INSTALLED)

    @property
    def is_collective(self) -> bool:
        """Whether it calls collectives of torch, or hands on what they do."""
        return self.file.endswith(_COLLECTIVES)

    def __str__(self) -> str:
        return f"{self.function} ({self.file.rpartition('/')[2]}:{self.line})"


@dataclass(frozen=True, slots=True)
class StackPosition:
    """The position of a rank in its code."""

    digest: str
    """Equal for equal frames: file, line and function of each."""
    text: str
    """The innermost frame of the thread that trains, and that of the job's own code if it is another one."""
    frames: tuple[StackFrame, ...]
    """Frames of the thread that trains, innermost first."""

    def doing(self, os_state: str, wchan: str) -> str:
        """Its activity, by its stack and its process's state in the kernel; see `wire.Progress.doing`."""
        if not self.frames:
            return ""
        if len(self.frames) < _FRAMES_MAX and self.frames[-1].function not in _OUTERMOST:
            return wire.ENDING
        if any(frame.is_collective for frame in self.frames):
            return wire.COLLECTIVE
        if self.frames[0].function == _BACKWARD:
            return wire.COLLECTIVE if os_state != "R" else ""
        if any("/torch/utils/data/" in frame.file for frame in self.frames):
            return wire.DATA
        return wire.OWN if os_state == "R" or wchan in OWN_WAITS else ""


def stack_position(stack: str, thread: int) -> StackPosition | None:
    """The position of a rank in its code; None if the text has no frames.

    Args:
        stack: stacks of all threads as faulthandler writes them, innermost frame first.
        thread: `threading.get_ident()` of the thread that trains. If the text lacks it, the last one counts, which is
            the oldest: the main thread.
    """
    heads = list(_THREAD.finditer(stack))
    ends = [*(head.start() for head in heads), len(stack)][1:]
    threads = {int(head[1], 16): _frames(stack, head.end(), end) for head, end in zip(heads, ends, strict=True)}
    if not threads or not any(threads.values()):
        return None
    training = threads.pop(thread) if thread in threads else threads.popitem()[1]
    engine = sorted(map(repr, (frames for frames in threads.values() if frames and not _is_servant(frames))))
    digest = sha256("\n".join([repr(training), *engine]).encode()).hexdigest()[:DIGEST_CHARS]
    return StackPosition(digest, _text_of(training), training)


def _frames(stack: str, begin: int, end: int) -> tuple[StackFrame, ...]:
    """The frames of a thread, innermost first, without ours around a `write` of the rank's output."""
    frames = (StackFrame(*found) for found in _FRAME.findall(stack, begin, end))
    return tuple(dropwhile(lambda frame: frame.file.endswith(_OUTPUT), frames))


def _is_servant(frames: tuple[StackFrame, ...]) -> bool:
    """Whether Python's `threading` has started the thread."""
    return frames[-1].function == "_bootstrap" and frames[-1].file.endswith("/threading.py")


def _text_of(frames: tuple[StackFrame, ...]) -> str:
    if not frames:
        return "no Python frame"
    own = next((frame for frame in frames if frame.is_own), frames[0])
    text = str(frames[0]) if own is frames[0] else f"{frames[0]}, from {own}"
    return text[:POSITION_CHARS_MAX]


STACK_WAIT_S: Final = 2.0
"""A handler runs within milliseconds unless the process is stopped or in the kernel; this allows for swapping."""
STACK_SETTLE_S: Final = 0.1
"""A stack counts as complete when its file has not grown for this long."""
LOOK: Final = ""
"""Request of the agent's own look."""
LOOK_AFTER_S: Final = 2.0
"""A rank that stands still is looked at after this time, and again whenever it has stood twice as long."""
STACK_FILE_MAX: Final = 1024 * 1024
"""Bytes of a rank's file of stacks beyond which it is emptied."""
STACK_BYTES_MAX: Final = 64 * 1024
"""faulthandler writes at most 100 frames of 100 threads; the first 64 KiB are enough to see where a rank waits."""
REQUESTS_REMEMBERED: Final = 4_096
"""Answered (request, rank) pairs: eight requests to the 512 ranks that one agent reads. Also the (request, place) pairs
whose text was sent."""

STOPPED_STATES: Final = ("T", "t")
STOPPED: Final = "stopped by a signal"


@dataclass(slots=True)
class _Waiting:
    rank: LocalRank
    attempt: str
    fields: dict[str, Any]
    step: int
    path: Path
    before: int
    until_s: float
    size: int
    grown_s: float
    stands: tuple[int, ...]
    """Where the rank stood when it was asked; see `Look.stands`."""


class Stacks:
    """Takes stacks of local ranks; no call blocks until a stack is written."""

    def __init__(self, clock: AgentClock) -> None:
        self._clock = clock
        self._answered: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._sent: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._waiting: list[_Waiting] = []

    @property
    def pending(self) -> bool:
        """True while a stack is outstanding."""
        return bool(self._waiting)

    def begin(self, request: str, rank: LocalRank) -> None:
        """Request a rank's stack, once for each request, and a `Look` each time."""
        if request != LOOK and not _is_new(self._answered, (request, rank.path)):
            return
        now_s = self._clock.monotonic_s()
        block = rank.reader.progress()
        fields = _evidence(rank, block, now_s)
        fields["order"] = request
        path = Path(layout.stack_path(rank.path))
        size = _size(path)
        if size > STACK_FILE_MAX and not any(waiting.path == path for waiting in self._waiting):
            with contextlib.suppress(OSError):  # it is gone: then so is the rank
                os.truncate(path, 0)
            size = _size(path)
        until_s, stands = now_s + STACK_WAIT_S, rank.look.stands
        waiting = _Waiting(rank, rank.attempt(block.k), fields, block.step, path, size, until_s, size, now_s, stands)
        number = int(rank.identity.get("stack_signal") or 0)
        fields["reason"] = _obstacle(rank, fields["os_state"], number)
        if fields["reason"] or rank.process is None or not rank.process.send(number):
            waiting.until_s = now_s
        self._waiting.append(waiting)

    def take(self) -> list[tuple[str, wire.Event]]:
        """Attempts with `stack_dump` events: complete stacks, and those that failed, with the reason."""
        now_s = self._clock.monotonic_s()
        ready = []
        for waiting in list(self._waiting):
            size = _size(waiting.path)
            if size != waiting.size:
                waiting.size, waiting.grown_s = size, now_s
            whole = waiting.size > waiting.before and now_s - waiting.grown_s >= STACK_SETTLE_S
            if whole or now_s >= waiting.until_s:
                self._waiting.remove(waiting)
                stack = _read(waiting.path, waiting.before)
                if not stack and not waiting.fields["reason"]:
                    _explain(waiting)
                place = stack_position(stack, int(waiting.rank.identity.get("stack_thread") or 0))
                doing = "" if place is None else place.doing(waiting.fields["os_state"], waiting.fields["wchan"])
                if waiting.fields["order"] == LOOK:
                    if waiting.rank.look.stands == waiting.stands:  # it has not moved meanwhile
                        waiting.rank.look = waiting.rank.look._replace(doing=doing)
                    continue
                waiting.fields |= self._reported(waiting, place, stack) | {"doing": doing}
                event = wire.Event("stack_dump", self._clock.unix_ns(), waiting.rank.rank, waiting.step, waiting.fields)
                ready.append((waiting.attempt, event))
        return ready

    def _reported(self, waiting: _Waiting, place: StackPosition | None, stack: str) -> dict[str, Any]:
        """The fields of a stack. Its text stands for all ranks of this host that stand at the same place."""
        if place is None:
            return {"stack": stack, "place": "", "where": ""}
        new = _is_new(self._sent, (waiting.fields["order"], place.digest))
        return {"stack": stack if new else "", "place": place.digest, "where": place.text}


def _is_new(known: OrderedDict[tuple[str, str], None], key: tuple[str, str]) -> bool:
    """Add a key, of which the oldest are forgotten; whether it was not there."""
    if key in known:
        return False
    known[key] = None
    if len(known) > REQUESTS_REMEMBERED:
        known.popitem(last=False)
    return True


def _evidence(rank: LocalRank, block: ProgressBlock, now_s: float) -> dict[str, Any]:
    stat = None if rank.is_followed else read_stat(rank.header.pid)
    if stat is not None and stat.start_ticks != rank.header.start_ticks:
        stat = None
    return {
        "os_state": "?" if rank.is_followed else "X" if stat is None else stat.state,
        "cpu_ticks": 0 if stat is None else stat.cpu_ticks,
        "wchan": "" if stat is None else wait_channel(rank.header.pid),
        "phase": block.phase,
        "phase_age_s": max(0.0, now_s - block.phase_since_ns / 1e9),
    }


def _explain(waiting: _Waiting) -> None:
    """Set the reason why no stack came although the signal was sent: the process may have been stopped since."""
    stat = read_stat(waiting.rank.header.pid)
    if stat is not None and stat.state in STOPPED_STATES:
        waiting.fields |= {"os_state": stat.state, "reason": STOPPED}
    else:
        waiting.fields["reason"] = "the handler did not run"


def _obstacle(rank: LocalRank, os_state: str, number: int) -> str:
    """Why the signal must not be sent; empty if it may."""
    if rank.is_followed:
        return "only its log is known"
    if rank.gone_since_s is not None or rank.process is None or not rank.reader.owner_alive():
        return "its process is gone"
    if os_state in STOPPED_STATES:
        return STOPPED
    # Only a rank that has declared the signal writes stacks on it; any other handler could do anything.
    if not number or not catches(rank.process.pid, number):
        return "no handler for the stack signal"
    return ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read(path: Path, offset: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(STACK_BYTES_MAX).decode("utf-8", "replace")
    except OSError:
        return ""


PROGRAM: Final = "py-spy"
DUMP_WITHIN_S: Final = 10.0
"""py-spy reads the symbols of all libraries of the process, which takes seconds for torch's."""
NATIVE_STACKS_MAX: Final = 4
"""Places of a host whose native frames are taken for one request."""
NATIVE_BYTES_MAX: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class StackedRank:
    """A rank whose frames are wanted."""

    request: str
    attempt: str
    rank: int
    step: int | None
    process: RankProcess


class NativeStacks:
    """Asks py-spy for one rank after the other in a thread of its own; no call waits for it."""

    def __init__(self, clock: AgentClock, program: str = PROGRAM) -> None:
        self._clock = clock
        self._program = children.program(program)
        self._asked: queue.SimpleQueue[StackedRank] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[StackedRank, str]] = queue.SimpleQueue()
        self._newest, self._count = "", 0
        """The newest request, and how many ranks were asked for it."""
        self._thread: threading.Thread | None = None
        self._refused = False

    def begin(self, rank: StackedRank) -> None:
        """Request a rank's native frames; nothing happens without py-spy, or beyond `NATIVE_STACKS_MAX` of a
        request.
        """
        if rank.request != self._newest:
            self._newest, self._count = rank.request, 0
        if self._program is None or self._count >= NATIVE_STACKS_MAX:
            return
        self._count += 1
        self._asked.put(rank)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="native-stacks", daemon=True)
            self._thread.start()

    def take(self) -> list[tuple[str, wire.Event]]:
        """Attempts with `native_stack` events."""
        ready = []
        while not self._answers.empty():
            rank, stack = self._answers.get()
            fields = {"order": rank.request, "stack": stack}
            event = wire.Event("native_stack", self._clock.unix_ns(), rank.rank, rank.step, fields)
            ready.append((rank.attempt, event))
        return ready

    def _run(self) -> None:
        assert self._program is not None
        while True:
            rank = self._asked.get()
            if rank.process.exiting():
                continue  # another process may have its PID
            rank.process.is_traced = True
            try:
                stack = dumped([self._program, "dump", "--native", "--pid", str(rank.process.pid)])
            except (OSError, subprocess.SubprocessError) as error:
                if not self._refused:
                    self._refused = True
                    reported = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
                    _log.warning("no native frames of rank %d: %s", rank.rank, str(reported).strip()[-300:])
            else:
                self._answers.put((rank, stack))
            finally:
                rank.process.is_traced = False


def dumped(command: Sequence[str]) -> str:
    """What the command writes.

    Raises:
        OSError, subprocess.SubprocessError: it cannot be started, fails, or does not end within `DUMP_WITHIN_S`.
    """
    done = children.run(
        command, capture_output=True, check=True, timeout=DUMP_WITHIN_S, stdin=subprocess.DEVNULL, text=True,
        errors="replace",
    )  # fmt: skip
    return str(done.stdout[:NATIVE_BYTES_MAX])


_log = logging.getLogger(__name__)


class HangAnswers:
    """Asks local ranks; no call waits for an answer."""

    def __init__(self, clock: AgentClock) -> None:
        self._clock = clock
        self._stacks = Stacks(clock)
        self._native_stacks = NativeStacks(clock)
        self._processes: dict[int, RankProcess] = {}
        """The process that was asked last, by rank."""

    @property
    def pending(self) -> bool:
        """True while a stack is outstanding."""
        return self._stacks.pending

    def begin(self, request: wire.StackRequest, rank: LocalRank) -> None:
        """Ask a rank for its answer, once for each request."""
        self._stacks.begin(request.request, rank)
        if rank.process is not None:
            self._processes[rank.rank] = rank.process

    def look(self, rank: LocalRank, block: ProgressBlock) -> None:
        """Find out what a rank of several does that has stood still for a while: once, and again ever less often."""
        entered_ns = block.step_entered_ns, block.phase_since_ns, block.outside_ns
        stands = block.k, block.step, block.collective_seq, *entered_ns
        now_s = self._clock.monotonic_s()
        stood_s = now_s - max(entered_ns) / 1e9
        if stands != rank.look.stands:
            rank.look = Look(stands, now_s + LOOK_AFTER_S - stood_s)
        if now_s < rank.look.again_s or int(rank.identity.get("world_size") or 1) < 2 or block.step < 0:
            return
        rank.look = rank.look._replace(again_s=now_s + max(stood_s, LOOK_AFTER_S))
        self._stacks.begin(LOOK, rank)

    def take(self) -> list[tuple[str, wire.Event]]:
        """Attempts with the events that have become ready."""
        stacks = self._stacks.take()
        for attempt, event in stacks:
            # The first rank of a place has sent its text.
            if event.fields["stack"] and event.rank in self._processes:
                order, process = str(event.fields["order"]), self._processes[event.rank]
                self._native_stacks.begin(StackedRank(order, attempt, event.rank, event.step, process))
        return [*stacks, *self._native_stacks.take()]
