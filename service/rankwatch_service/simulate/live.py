"""Sends a synthetic job into a running service, as its hosts' agents would: in order for each host, until accepted.

Each thread has one connection for `HOSTS_PER_CONNECTION` hosts; there are at most `CONNECTIONS_MAX`. Batches wait in
queues of `WAITING_MAX`; if one is full, the job itself waits and reports that it is behind. Where the devices of the
ranks are known, the batches have their counters: busy, and hot where they are throttled.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol
from zlib import crc32

import httpx2
import msgspec
import numpy as np

from rankwatch import wire
from rankwatch.trust import Trust, explain_tls_error, split_token
from rankwatch_service.clock import Clock
from rankwatch_service.simulate.batches import batches
from rankwatch_service.simulate.faults import Throttle
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job
from rankwatch_service.simulate.transit import disturbed

HOSTS_PER_CONNECTION: Final = 8
CONNECTIONS_MAX: Final = 16
WAITING_MAX: Final = 64
"""Batches for each connection: 64 x 20 KB (64 rank-steps of 16 metrics, progress) are about 1 MB."""

TOGETHER_MAX: Final = 32
"""Most batches that a connection sends at a time."""

FLUSH_S: Final = 0.15
"""Seconds of steps in one batch, as agents send them."""

GIVE_UP_AFTER_S: Final = 60.0
"""How long one batch is tried before sending fails."""

PAUSE_FIRST_S: Final = 0.1
PAUSE_MAX_S: Final = 2.0
"""Longest pause between two tries; the first is doubled each time."""


class NotYetError(Exception):
    """The batch was not accepted now, but may be later: in `after_s` seconds, if that is not 0."""

    def __init__(self, message: str, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.after_s = after_s


class RefusedError(Exception):
    """The batch will never be accepted."""


class LiveConnection(Protocol):
    """One connection to the service, used by one thread."""

    def send(self, job: str, bodies: Sequence[bytes]) -> None:
        """Return once these batches are durable there, in their order.

        Raises:
            NotYetError: send them again; batches that were accepted already have no effect the second time.
            RefusedError: they will never be accepted.
        """
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


@dataclass(slots=True)
class SendStatus:
    """Totals of what has been sent. Several threads write them, the counts under the lock."""

    batches: int = 0
    bytes: int = 0
    rank_steps: int = 0
    retries: int = 0
    behind_s: float = 0.0
    """How late the last batch was put into its queue."""
    retry_reason: str = ""
    """Why batches are being retried; empty if they are not."""
    failure: str = ""
    """Why sending ended early."""
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast the job is played: 1: real time, 10: ten times as fast, 0: as fast as it can be sent."""

    speed: float
    clock: Clock


def send_job(
    job: Job,
    name: str,
    connect: Callable[[], LiveConnection],
    pace: Pace,
    stopped: Callable[[], bool] = lambda: False,
    report: Callable[[SendStatus], None] = lambda _sent: None,
) -> SendStatus:
    """Send the job to its end, to the first failure, or until `stopped`; `report` is called after each batch."""
    sent = SendStatus()
    # The start time makes launch and boot unique, so that a second run of the same name is not taken for repeats.
    begins_unix_ns = pace.clock.unix_ns()
    job = replace(job, launch=f"sim-{begins_unix_ns // 10**9}-")
    hosts = len(set(job.topology().host))
    senders = [
        _HostSender(name, connect, pace.clock, sent, stopped)
        for _ in range(min(-(-hosts // HOSTS_PER_CONNECTION), CONNECTIONS_MAX))
    ]
    for sender in senders:
        sender.start()
    try:
        for host, body, rank_steps in _paced(job, name, begins_unix_ns, pace, sent, stopped):
            if sent.failure:
                break
            senders[crc32(host.encode()) % len(senders)].offer(body, rank_steps)
            report(sent)
    finally:
        for sender in senders:
            sender.end()
        for sender in senders:
            sender.join()
    return sent


def _paced(
    job: Job, name: str, begins_unix_ns: int, pace: Pace, sent: SendStatus, stopped: Callable[[], bool]
) -> Iterator[tuple[str, bytes, int]]:
    """Each batch at its time: its host, the encoded batch, and how many rank-steps are in it."""
    steps_per_batch = max(round(FLUSH_S / job.step_s), 1)
    boot = f"sim-{begins_unix_ns}"
    made = batches(name, generate(job), steps_per_batch, begins_unix_ns, boot=boot, can=())
    devices = DeviceReader(job)
    begins_s = pace.clock.monotonic_s()
    for message in disturbed(made, job.transit, job.seed):
        due_s = begins_s + message.time_s / pace.speed if pace.speed else 0.0
        while pace.speed and not stopped() and not sent.failure:
            left_s = due_s - pace.clock.monotonic_s()
            if left_s <= 0:
                break
            pace.clock.sleep(min(left_s, 0.5))
        if stopped():
            return
        sent.behind_s = max(pace.clock.monotonic_s() - due_s, 0.0) if pace.speed else 0.0
        # By the clock and not by the job's own time, which may go faster: the service expects them to be of now.
        batch = devices.read_for(message.batch, pace.clock.unix_ns())
        yield batch.host, wire.encode(batch), batch.steps.rows if batch.steps is not None else 0


class _HostSender(threading.Thread):
    """Sends batches of some hosts from a queue, in order."""

    def __init__(
        self,
        job: str,
        connect: Callable[[], LiveConnection],
        clock: Clock,
        sent: SendStatus,
        stopped: Callable[[], bool],
    ) -> None:
        super().__init__(name="simulated hosts", daemon=True)
        self._job = job
        self._connect = connect
        self._clock = clock
        self._sent = sent
        self._stopped = stopped
        self._waiting: queue.Queue[tuple[bytes, int] | None] = queue.Queue(WAITING_MAX)

    def offer(self, body: bytes, rank_steps: int) -> None:
        """Enqueue a batch; wait while the queue is full."""
        self._put((body, rank_steps))

    def end(self) -> None:
        """End the thread once everything is sent."""
        self._put(None)

    def _put(self, what: tuple[bytes, int] | None) -> None:
        while not self._sent.failure:
            try:
                self._waiting.put(what, timeout=0.2)
                break
            except queue.Full:
                continue

    def run(self) -> None:
        connection: LiveConnection | None = None
        try:
            while not self._sent.failure:
                try:
                    entry = self._waiting.get(timeout=0.2)
                except queue.Empty:
                    continue
                if entry is None:
                    return
                entries, ended = self._with_what_waits(entry)
                connection = connection or self._connect()
                self._deliver(connection, entries)
                if ended:
                    return
        except (RefusedError, NotYetError) as error:
            self._sent.failure = str(error)
        except Exception as error:  # noqa: BLE001 - otherwise the job would wait for a thread that has ended
            self._sent.failure = f"{type(error).__name__}: {error}"
        finally:
            if connection is not None:
                connection.close()

    def _with_what_waits(self, first: tuple[bytes, int]) -> tuple[list[tuple[bytes, int]], bool]:
        """Return this entry with further waiting ones, and whether the queue has ended."""
        entries = [first]
        while len(entries) < TOGETHER_MAX:
            try:
                entry = self._waiting.get_nowait()
            except queue.Empty:
                break
            if entry is None:
                return entries, True
            entries.append(entry)
        return entries, False

    def _deliver(self, connection: LiveConnection, entries: Sequence[tuple[bytes, int]]) -> None:
        bodies = [body for body, _ in entries]
        deadline_s = self._clock.monotonic_s() + GIVE_UP_AFTER_S
        pause_s = PAUSE_FIRST_S
        while True:
            try:
                connection.send(self._job, bodies)
                break
            except NotYetError as error:
                if self._stopped() or self._clock.monotonic_s() > deadline_s:
                    raise
                with self._sent.lock:
                    self._sent.retries += 1
                    self._sent.retry_reason = str(error)
                self._clock.sleep(min(max(error.after_s, pause_s), PAUSE_MAX_S))
                pause_s = min(pause_s * 2, PAUSE_MAX_S)
        with self._sent.lock:
            self._sent.retry_reason = ""
            self._sent.batches += len(bodies)
            self._sent.bytes += sum(map(len, bodies))
            self._sent.rank_steps += sum(rank_steps for _, rank_steps in entries)


READ_EVERY_NS: Final = 10**9

MEMORY_BYTES: Final = 80 * 10**9
USED_BYTES: Final = 68 * 10**9
CLOCK_HZ: Final = 1.98e9
POWER_W: Final = 640.0
TEMPERATURE_CELSIUS: Final = 62.0
THROTTLED_CELSIUS: Final = 91.0
THROTTLED_SPEED: Final = 0.6
"""Clock and power of a throttled device, as a share."""
POWER_CAP, HEAT = 0x04, 0x40
"""Of NVML's clocks event reasons: the usual one of a busy device, and that of a hot one."""


class DeviceReader:
    """The devices on which the ranks of a job compute; there are none if these have no UUIDs."""

    def __init__(self, job: Job) -> None:
        self._chance = np.random.default_rng(job.seed)
        topology = job.topology()
        self._throttles = [
            (topology.device_uuid[fault.rank], fault) for fault in job.faults if isinstance(fault, Throttle)
        ]
        self._devices: dict[str, list[tuple[str, float]]] = {}
        """UUID of each device, and how much warmer it is than others, by host."""
        for host, uuid in zip(topology.host, topology.device_uuid, strict=True):
            if uuid:
                self._devices.setdefault(host, []).append((uuid, float(self._chance.normal(0, 2))))
        self._read_ns: dict[str, int] = {}

    def read_for(self, batch: wire.Batch, unix_ns: int) -> wire.Batch:
        """The batch with the counters of its host's devices, if they were not read within the last second."""
        if (
            not batch.progress
            or batch.host not in self._devices
            or unix_ns - self._read_ns.get(batch.host, 0) < READ_EVERY_NS
        ):
            return batch
        self._read_ns[batch.host] = unix_ns
        step = max((block.step for block in batch.progress), default=-1)
        hot = {
            uuid
            for uuid, fault in self._throttles
            if fault.from_step <= step and (fault.until_step is None or step < fault.until_step)
        }
        samples = tuple(
            self._sample(index, uuid, warmer, unix_ns, hot=uuid in hot)
            for index, (uuid, warmer) in enumerate(self._devices[batch.host])
        )
        return msgspec.structs.replace(batch, devices=samples)

    def _sample(self, index: int, uuid: str, warmer: float, unix_ns: int, *, hot: bool) -> wire.DeviceSample:
        speed = (THROTTLED_SPEED if hot else 1.0) * (1 + 0.01 * float(self._chance.normal()))
        return wire.DeviceSample(
            uuid,
            unix_ns,
            index,
            temperature_celsius=round((THROTTLED_CELSIUS if hot else TEMPERATURE_CELSIUS + warmer) + 2 * (speed - 1)),
            power_w=POWER_W * speed,
            sm_clock_hz=round(CLOCK_HZ * min(speed, 1.0), -6),
            utilization_ratio=round(min(0.98 + 0.01 * float(self._chance.normal()), 1.0), 2),
            memory_used_bytes=USED_BYTES,
            memory_total_bytes=MEMORY_BYTES,
            throttle_reasons=HEAT if hot else POWER_CAP,
        )


TIMEOUT_S: Final = 30.0
NEVER_TAKEN: Final = frozenset((400, 401, 403, 404, 413, 415, 422))
"""Statuses that no retry changes while URL and token stay the same."""


class HttpConnection:
    """`POST /api/v1/telemetry`, over one persistent connection."""

    def __init__(self, url: str, token: str, trust: Trust) -> None:
        """Connect with the first batch.

        Args:
            url: of the service.
            token: as it was issued.
            trust: what the service has to prove before anything is sent.

        Raises:
            ValueError: no batch can be sent to this URL, or with this token.
        """
        try:
            httpx2.URL(url)
        except httpx2.InvalidURL as error:
            raise ValueError(f"{url!r} is not the URL of a service: {error}") from error
        trust.check(url)
        token = split_token(token).token
        if not (token.isascii() and token.isprintable()):
            raise ValueError("the token is not valid: it has characters that are not printable ASCII")
        headers = {"Content-Type": "application/msgpack"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._url = url
        verify = trust.context() if url.startswith("https:") else True
        self._client = httpx2.Client(base_url=url, headers=headers, timeout=TIMEOUT_S, verify=verify, trust_env=False)

    def send(self, job: str, bodies: Sequence[bytes]) -> None:  # noqa: ARG002 - a batch names its job
        """Send batches one after the other; see `LiveConnection`."""
        for body in bodies:
            self._post(body)

    def _post(self, body: bytes) -> None:
        try:
            answer = self._client.post("/api/v1/telemetry", content=body)
        except httpx2.TransportError as error:
            if why := explain_tls_error(self._url, error):
                raise RefusedError(why) from error
            raise NotYetError(f"{self._client.base_url}: {type(error).__name__}: {error}") from error
        if answer.is_success:
            return
        message = f"{answer.url}: {answer.status_code} {answer.text[:300]}"
        if answer.status_code in NEVER_TAKEN:
            raise RefusedError(message)
        after = answer.headers.get("Retry-After", "")
        raise NotYetError(message, float(after) if after.isdecimal() else 0.0)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()
