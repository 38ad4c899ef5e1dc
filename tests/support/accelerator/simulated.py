"""A simulated accelerator: work, events and collectives on streams, with the order and the waits of a real one.

The host gives work and goes on; it waits only where it synchronizes, or is `QUEUE_MAX` pieces of work ahead. A worker
thread computes when each piece begins and ends: after what was given to its stream before, not before it was given,
and, in a collective, not before all ranks are there. Nothing is computed but these times.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

QUEUE_MAX: Final = 1024
"""Pieces of work that a host may be ahead of its device, as with CUDA."""
RESOLVED_LIMIT_S: Final = 120.0
"""Limit of the wait for other ranks in a collective; a job that is stuck so long fails."""
COMPUTE: Final = "compute"
COMMUNICATION: Final = "communication"
TYPE: Final = "simulated"


class VirtualClock:
    """A host's clock that only `work` and waits advance, so that times do not depend on the load of the machine."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        """Seconds on a clock that all ranks share."""
        return self._now_s

    def wait_until(self, at_s: float) -> None:
        """Return when the clock has reached this time."""
        self._now_s = max(self._now_s, at_s)

    def work(self, seconds: float) -> None:
        """The host is busy for so long."""
        self._now_s += seconds


class CaptureError(RuntimeError):
    """An event was recorded, asked or waited for while work is captured into a graph."""


class HostTensor(torch.Tensor):
    """Pinned memory of the host: reading it, or a part of it, waits for no device."""


class _Point:
    """When the device passes a point of its work; known once the worker has computed it."""

    def __init__(self) -> None:
        self._known = threading.Event()
        self._at_s = 0.0

    def resolve(self, at_s: float) -> None:
        self._at_s = at_s
        self._known.set()

    @property
    def at_s(self) -> float:
        if not self._known.wait(RESOLVED_LIMIT_S):
            raise TimeoutError(f"other ranks did not come to a collective within {RESOLVED_LIMIT_S:.0f} s")
        return self._at_s


class SimulatedEvent:
    """A recorded point; implements `rankwatch.torch_probe.device.Moment`. It may be recorded again."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self.point = _Point()

    def query(self) -> bool:
        """Whether the device has passed it; not to be asked in a capture."""
        self._device.refuse_in_capture("query")
        return self.point.at_s <= self._device.clock.now_s()

    def elapsed_time(self, end: SimulatedEvent) -> float:
        """Milliseconds to a later event; both must have been passed."""
        now_s = self._device.clock.now_s()
        if max(self.point.at_s, end.point.at_s) > now_s:
            raise RuntimeError("the device has not passed both events")
        return (end.point.at_s - self.point.at_s) * 1e3


@dataclass(frozen=True, slots=True)
class _Work:
    """A piece of work."""

    stream: str
    given_s: float
    seconds: float
    done: _Point
    after: _Point | None = None
    tells: str = ""
    """What other ranks are told when it begins."""
    hears: tuple[str, Sequence[int]] | None = None
    """What it waits for, and of which ranks."""


class SimulatedDevice:
    """One rank's device. Implements `rankwatch.torch_probe.device.Device`."""

    def __init__(
        self,
        uuid: str,
        clock: VirtualClock,
        meeting: Any = None,
        *,
        slowness: Callable[[], float] = lambda: 1.0,
        launch_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`meeting`: where ranks tell each other when they come to a collective or send a message; a single rank has
        none. `slowness`: by how much longer than usual work takes now. `launch_s`: seconds of host time to give the
        device one piece of work.
        """
        self.uuid = uuid
        self.clock = clock
        self.synchronizations: Counter[str] = Counter()
        """How often the host has waited for the device, by calling module."""
        self._meeting = meeting
        self._slowness = slowness
        self._launch_s = launch_s
        self._graph: list[float] | None = None
        self._free: list[SimulatedEvent] = []
        self._ahead: deque[_Point] = deque()
        self._current = threading.local()
        self._streams = {COMPUTE, COMMUNICATION}
        self._met: Counter[str] = Counter()
        """Collectives so far, by group."""
        self._work: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="simulated-accelerator", daemon=True).start()

    # ---- what a training script does ---------------------------------------------------------------------------------

    def launch(self, seconds: float) -> None:
        """Give this thread's current stream work of this length."""
        if self._graph is not None:
            self._graph.append(seconds)
            return
        self.clock.work(self._launch_s())
        self._give(self.current_stream, seconds * self._slowness())

    @property
    def current_stream(self) -> str:
        """The stream that this thread gives its work to."""
        name: str = getattr(self._current, "stream", COMPUTE)
        return name

    @contextmanager
    def on_stream(self, name: str) -> Iterator[None]:
        """Let this thread give its work to another stream; other threads go on as before."""
        before, self._current.stream = self.current_stream, name
        self._streams.add(name)
        try:
            yield
        finally:
            self._current.stream = before

    def wait_for_stream(self, name: str) -> None:
        """What is given to the current stream from now on begins after the work of another so far. The host goes on."""
        self._give(self.current_stream, 0.0, after=self._give(name, 0.0))

    def collective(self, seconds: float, group: str = "", ranks: Sequence[int] = ()) -> None:
        """A collective on the communication stream of its group ("": of all ranks), after the work of the current
        stream. It takes `seconds` once the last rank is there.
        """
        self.refuse_in_capture("collective")
        after = self._give(self.current_stream, 0.0)
        self._met[group] += 1
        name = f"collective-{group}-{self._met[group]}"
        hears = (name, ranks or self._meeting.ranks) if self._meeting is not None else None
        stream = COMMUNICATION + group
        self._streams.add(stream)
        self._give(stream, seconds, after=after, tells=name, hears=hears)

    def wait_for_communication(self, group: str = "") -> None:
        """As `wait_for_stream`, for the collectives of a group so far."""
        self.wait_for_stream(COMMUNICATION + group)

    def send(self, message: str) -> None:
        """A message to another rank, after the work of the current stream, which does not wait for it."""
        self._give(self.current_stream, 0.0, tells=message)

    def receive(self, message: str, rank: int, seconds: float) -> None:
        """What is given to the current stream from now on begins when a message of a rank has come, in so long."""
        self._give(self.current_stream, seconds, hears=(message, (rank,)))

    def synchronize(self) -> None:
        """Wait until all work so far is done."""
        self.refuse_in_capture("synchronize")
        self.synchronizations[sys._getframe(1).f_globals.get("__name__", "")] += 1
        for stream in sorted(self._streams):
            self.clock.wait_until(self._give(stream, 0.0).at_s)

    @contextmanager
    def capture(self) -> Iterator[list[float]]:
        """Capture work into a graph, which `replay` gives to the device."""
        graph: list[float] = []
        self._graph = graph
        try:
            yield graph
        finally:
            self._graph = None

    def replay(self, graph: list[float]) -> None:
        """Give the device the work of a captured graph, in one call."""
        self.clock.work(self._launch_s())
        for seconds in graph:
            self._give(self.current_stream, seconds * self._slowness())

    # ---- rankwatch.torch_probe.device.Device -------------------------------------------------------------------------

    def describe(self, known_uuid: str, failed: Callable[[Exception], None]) -> Mapping[str, str]:
        del failed
        return {"device_type": TYPE, "device_uuid": known_uuid or self.uuid}

    def pinned(self, rows: int, words: int) -> torch.Tensor:
        return torch.zeros((rows, words), dtype=torch.int64).as_subclass(HostTensor)

    def now(self) -> SimulatedEvent:
        self.refuse_in_capture("record")
        event = self._free.pop() if self._free else SimulatedEvent(self)
        event.point = self._give(self.current_stream, 0.0)
        return event

    def stream(self) -> str:
        return self.current_stream

    def host_s(self) -> float:
        """See `Device.host_s`."""
        return self.clock.now_s()

    def free(self, moment: Any) -> None:
        self._free.append(moment)

    def captures(self) -> bool:
        return self._graph is not None

    # ---- the device --------------------------------------------------------------------------------------------------

    def refuse_in_capture(self, what: str) -> None:
        """Raise `CaptureError` if work is being captured."""
        if self._graph is not None:
            raise CaptureError(f"{what} while work is captured into a graph")

    def _give(self, stream: str, seconds: float, **how: Any) -> _Point:
        done = _Point()
        self._work.put(_Work(stream, self.clock.now_s(), seconds, done, **how))
        if seconds:
            self._ahead.append(done)
            if len(self._ahead) > QUEUE_MAX:
                self.clock.wait_until(self._ahead.popleft().at_s)
        return done

    def _run(self) -> None:
        free_s: dict[str, float] = {}
        while True:
            work = self._work.get()
            begin_s = max(free_s.get(work.stream, 0.0), work.given_s, work.after.at_s if work.after else 0.0)
            if self._meeting is not None and work.tells:
                self._meeting.tell(work.tells, begin_s)
            if self._meeting is not None and work.hears:
                begin_s = max(begin_s, self._meeting.last_s(*work.hears))
            free_s[work.stream] = begin_s + work.seconds
            work.done.resolve(free_s[work.stream])
