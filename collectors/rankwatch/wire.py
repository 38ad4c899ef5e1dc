"""The wire schema: what agents send and the service reads. Nothing here does I/O.

One `Batch` is one message: a header and the records of one host's ranks of one attempt. Step and values records are
columnar (`Table`); records that come once a second or more rarely are lists of small structs. Msgpack keeps NaN and
Inf; in the plain JSON form (`docs/design.md`, "Wire") a column is a list in which `null` means "not measured" and
`"NaN"`, `"Inf"`, `"-Inf"` are values.

Fields are only ever appended and have defaults, so that version N reads N-1 and the other way round.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

SCHEMA_VERSION: Final = 1
"""Version of this schema. A batch with a higher one is refused with a dead letter, never guessed at."""

BATCH_BYTES_MAX: Final = 8 * 1024 * 1024
"""Largest accepted body. 64 steps x 512 ranks x 24 columns x 8 bytes = 6.3 MB; a bigger one must be split."""

ORDERS_VALID_S: Final = 30.0
"""How long signed orders may be on their way. The service sends them anew every 10 s."""

METRIC_NAME_BYTES_MAX: Final = 64
"""Longest metric name, UTF-8."""

SLICES_MAX: Final = 8
"""Slices of one rank, as many as a recorder has."""


class Column(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One column of a `Table`: raw little-endian values, one for each row, absent rows included (as zero).

    `dtype` is one of u1 u2 u4 i8 f4 f8. Integer columns hold value - `base`. `mask` has one bit for each row, least
    significant bit first, 1 = present; None means that every row is present. NaN is a value, not an absence.
    """

    dtype: str
    data: bytes
    base: int = 0
    mask: bytes | None = None


class Table(msgspec.Struct, frozen=True):
    """`rows` records, by column name.

    Known columns of step records: `step`, `rank`, `time_unix_ns`, `relative_step` (steps since this process
    started), `kind` (0 train, 1 eval, 2 checkpoint), `step_time_s`, `busy_s`, `busy_cpu_s`, `wait_s`,
    `queued_s` (the part of `busy_s` in which the training thread waited for a core),
    `device_step_s`, `device_busy_s` and `device_wait_s` (what the device measures: the step, its own work in it, and
    its wait for other ranks),
    `loss`, `grad_norm`, `local_grad_norm`, `nonfinite` (how many local gradients or logged values were not finite),
    `nonfinite_first` (index of the first parameter that had one), `fingerprint`, `grad_norm.N` and `fingerprint.N` (of
    the rank's N-th slice, from 0), `tokens`, `tokens_squared`,
    `step_work` (how much the step had to do, as a multiple of the first one),
    `phase.NAME` (seconds of each phase), and any user metric.
    Values records: `step`, `rank`, and any of the metrics.
    `step` and `rank` are present in every row.
    """

    rows: int
    columns: dict[str, Column]


class Slice(msgspec.Struct, array_like=True, frozen=True):
    """What a rank holds of those parameters of a sharded model that are divided alike."""

    content: str
    """Which part of which parameters: ranks with equal texts hold the same, and have equal gradients of it."""
    replica_of: int = -1
    """The lowest rank that is known to keep the same bits, to which fingerprints compare; -1: no other one is."""


class RankInfo(msgspec.Struct, frozen=True):
    """AgentIdentity of one rank of an attempt. A restart may give a device another rank; (host, device_uuid) stays."""

    rank: int
    world_size: int
    local_rank: int = 0
    host: str = ""
    device_uuid: str = ""
    pid: int = 0
    dp: int = 0
    tp: int = 0
    pp: int = 0
    cp: int = 0
    ep: int = 0
    parameters: tuple[str, ...] = ()
    """Parameter names, in the order that `nonfinite_first` indexes."""
    replicated: bool = False
    """Parameters are bit-equal on all ranks of the same (tp, pp, cp, ep): fingerprints compare over dp."""
    can: tuple[str, ...] = ()
    """Actions that the job supports: pause, resume, trace, checkpoint, rollback, stop; relaunch (by its launcher).

    `rollback` is a full one inside the processes: from memory with `rollback_memory`, from disk with `rollback_disk`.
    """
    optimizers: int = 0
    """Optimizers that the torch probe watches; 0 = without one."""
    watched: str = ""
    """One line on what the torch probe watches of this job and what not; from one rank of the job."""
    lockstep: bool = True
    """Ranks wait for each other in each step; False: each goes at its own pace, as rollouts and servers do."""
    agent: str = ""
    """Set by the service, whatever is sent: the agent that introduced the rank; empty if it has not enrolled."""
    checkpoint_roots: tuple[str, ...] = ()
    """Folders and URLs below which this host's ranks save checkpoints."""
    checkpoint_shards: int = 0
    """How many ranks save a part of a checkpoint; 0: every rank that can. An event cannot lower it."""
    slices: tuple[Slice, ...] | None = None
    """What the rank holds of a sharded model: `grad_norm.N` and `fingerprint.N` are of the N-th. None: its model is not
    sharded, or it is not known how."""
    device_type: str = ""
    """Where the watched parameters lie, as torch calls it: cuda (ROCm too), xpu, mps, cpu, ...; empty: not known."""
    switch: str = ""
    """The switch that the rank's host is connected to; empty: not known."""


COLLECTIVE: Final = "collective"
DATA: Final = "data"
OWN: Final = "own"
ENDING: Final = "ending"
ACTIVITIES: Final = (COLLECTIVE, DATA, OWN, ENDING)
"""It waits for other ranks; it waits for its data loader; it computes in its own code, or waits there for a timer, a
child or a pipe; Python shuts down."""


class Progress(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One rank's progress block as its agent read it. Ages are monotonic-clock differences, safe from clock skew."""

    rank: int
    step: int
    """Step the rank is in; -1 before the first."""
    phase: str
    """Name of the phase it is in; "" between phases."""
    phase_age_s: float
    step_age_s: float
    collective_seq: int = 0
    """Collectives this rank has entered, where they are counted."""
    state: str = "running"
    """running, held (waits for a directive), left (its loop ended), exited (process gone, or an error ends it)."""
    order: str = ""
    """Id of the newest order the rank has answered."""
    answer: str = ""
    """held, done, failed, passed (saw the order after its step), released, went (went on after go)."""
    answer_step: int = -1
    answer_k: int = 0
    """Rollbacks inside the process, counted; part of the attempt's text LAUNCH.k."""
    answer_fingerprint: int = 0
    os_state: str = "R"
    """State letter of the process in /proc: R, S, D, T (stopped by a signal), Z, X; "?" unknown."""
    cpu_s: float = 0.0
    """CPU seconds the process has used."""
    answer_detail: str = ""
    """For `done`: what the hook returned (a checkpoint's location); for `failed`: the error."""
    outside_s: float = -1.0
    """Seconds since its step's work was done, while it evaluates, saves or logs; -1 within a step."""
    doing: str = ""
    """What a rank that stands still does, by its stack: one of `ACTIVITIES`; "" if it moves, or that is not known."""


GPU: Final = "gpu"
PORT: Final = "port"
HOST: Final = "host"
DEVICE_KINDS: Final = (GPU, PORT, HOST)
"""What an agent reads counters of: GPUs, network ports, and the host as a whole."""


class DeviceSample(msgspec.Struct, array_like=True, frozen=True):
    """Counters of one device at one time. None: the device or the driver does not have the counter."""

    device_uuid: str
    time_unix_ns: int
    local_index: int = 0
    temperature_celsius: float | None = None
    power_w: float | None = None
    sm_clock_hz: float | None = None
    utilization_ratio: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    throttle_reasons: int | None = None
    ecc_uncorrected: int | None = None
    xid: int | None = None
    extra: dict[str, float] = {}


class HostDeviceSample(msgspec.Struct, array_like=True, frozen=True):
    """Counters of a network port, or of the host as a whole, at one time."""

    kind: str
    """`PORT` or `HOST`."""
    name: str
    """Name of a port (eth0, mlx5_0/1); empty for the host itself."""
    time_unix_ns: int
    counters: dict[str, float]
    """What it has, by name; units are part of the names."""


class Event(msgspec.Struct, frozen=True):
    """Something that happened once. `kind` is one of the names in `EVENT_KINDS`; `fields` belong to the kind."""

    kind: str
    time_unix_ns: int
    rank: int | None = None
    step: int | None = None
    fields: dict[str, Any] = {}


EVENT_KINDS: Final = (
    "rank_start",  # pid
    "rank_left",  # reason: end | break | stop; of a break: where, and type and message of what broke it, if known
    # the loop is left by break or an exception, and whether that ends the process is not known: where, type, message
    "loop_broken_off",
    # code: int | None, signal: int | None, how: pidfd | zombie | excepthook | unknown, error: str, where (in its code),
    # pid, phase, left: its loop had ended normally, exit_order: index among the ended ranks of this launch and host,
    # abrupt: how is unknown, and Python did not shut down, grace_s: the launcher's grace, as the job declares it,
    # broken_off_unix_ns: of a process that a signal ended: when it had broken off its loop, without one since,
    # output: what it has printed of its end: line, role (`output.errors.LineRole`), pattern, certain (no lost peer
    # brings it about), where, unix_ns (0: not known), lines: this one and some around it, or, without a line that says
    # why, `lines` alone: the last ones; files: to which it writes
    "process_exit",
    "exception",  # ends the process: type, message, where, code, left: its loop had ended before, grace_s
    "checkpoint_saved",  # checkpoint, tier, location, seconds, bytes, shards
    "checkpoint_loaded",  # checkpoint, seconds, mode
    # what: save | restore, type, message, where, errno (0: not an error of a file system), location ("": not known),
    # checkpoint: the one to be restored, tier: memory of a capture, ordered: the ranks are held until all have restored
    "checkpoint_failed",
    "checkpoint_succeeded",  # what, tier (as above): the first without an exception after a failure, or of a process
    "checkpoint_gone",  # checkpoint, reason: not in a rank's memory, or on a host's disks, any more
    "checkpoint_disk",  # path, free_bytes, total_bytes, save_bytes (0: not known): the file system of the newest save
    "location_refused",  # checkpoint, location, reason: an agent does not pass it on to its ranks
    # stack: str, os_state, wchan, cpu_ticks, phase, phase_age_s, order, reason (why there is no stack), place (equal
    # for equal frames), where (the place for people), lines: what it has printed last. Of an agent's ranks at
    # one place only the first has the stack and the lines
    "stack_dump",
    "native_stack",  # order, stack: frames of C and C++ too, of a rank whose `stack_dump` came before
    "trace",  # request, error (why there is none) or what `rankwatch_service.policy.traces.TraceSummary` has
    "agent_start",
    "agent_stop",
    "records_lost",  # reason: ring | torn | spool | metric_names | late_values ..., count
    "declared",  # what, detail: an intended change, from all ranks or one; kind: model | optimizer | work, as seen
    "device_error",  # device_uuid, index, pci_bus_id, serial, xid, text: what the driver says of a device
    "device_event",  # the same names without the last two; event: what NVML tells of a device without a number
    "switch_error",  # pci_bus_id, sxid, text: an error of an NVSwitch of the host
    "device_lost",  # device_uuid, index, pci_bus_id, serial, reason
    "device_throttled",  # the same names; minutes: of the last ten, 0: over, reasons, temperature_celsius, sm_clock_hz
    "driver_silent",  # silent_s: the driver of this host's devices does not answer
    "driver_answers",  # silent_s: it answers again
    "host_notice",  # what: preemption or maintenance, empty: withdrawn; action, at, detail: as the provider says them
    "note",  # text
)


class Batch(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message. `boot` and `seq` number a sender's messages of a job: a repeat has no effect, a gap is reported."""

    schema: int
    job: str
    attempt: str
    """LAUNCH.k"""
    host: str
    boot: str
    seq: int
    sent_unix_ns: int
    ranks: tuple[RankInfo, ...] = ()
    """Sent with the first batch of an attempt and again when it changes."""
    steps: Table | None = None
    values: Table | None = None
    progress: tuple[Progress, ...] = ()
    devices: tuple[DeviceSample, ...] = ()
    """GPUs."""
    events: tuple[Event, ...] = ()
    host_devices: tuple[HostDeviceSample, ...] = ()
    """Network ports, and the host as a whole."""


class OrderView(msgspec.Struct, frozen=True):
    """An open order as the api sends it to agents. A later phase of the same order replaces an earlier one."""

    order: str
    job: str
    attempt: str
    phase: str
    """view (send progress every 50 ms), hold, do, go, release, kill, closed."""
    action: str
    """pause, checkpoint, rollback, stop."""
    step: int = -1
    """Ranks hold at the boundary before this step."""
    lease_s: float = 5.0
    """Seconds that this phase is valid for a rank without a renewal."""
    checkpoint: str = ""
    """Id of the registered checkpoint, for rollback."""
    location: str = ""
    """Location of that checkpoint, as registered with its save."""
    checkpoint_step: int = -1
    k: int = 0
    """For rollback: the k of the attempt that begins with `do`."""
    culprits: tuple[int, ...] = ()
    """For kill: ranks to end first."""
    renewal: int = 0
    """Number of renewals of the lease: when it grows, agents write the phase again, and the ranks' leases restart."""


LISTEN_BYTES: Final = 16
"""Random bytes that an agent signs to open its order stream."""


class ResumeAdvice(msgspec.Struct, frozen=True):
    """The newest good checkpoint that survives the processes; agents write it to a file for the next launch."""

    job: str
    checkpoint: str = ""
    location: str = ""
    step: int = -1


class StackRequest(msgspec.Struct, frozen=True):
    """The service asks for stacks of ranks of an attempt. An agent answers each (request, rank) once."""

    request: str
    """Id; comes back as the field `order` of the event `stack_dump`."""
    attempt: str
    ranks: tuple[int, ...] = ()
    """Empty: every rank of the attempt."""


class TraceRequest(msgspec.Struct, frozen=True):
    """The service asks for a trace of ranks of an attempt; each answers it once. One that is not sent is withdrawn."""

    request: str
    """Id; comes back as the field `request` of the event `trace`."""
    attempt: str
    ranks: tuple[int, ...]
    steps: int


class Orders(msgspec.Struct, frozen=True):
    """One message of the command stream: all open orders of the job, the advice for a relaunch, stacks and traces."""

    orders: tuple[OrderView, ...] = ()
    resume: ResumeAdvice | None = None
    stacks: tuple[StackRequest, ...] = ()
    proven: str = ""
    """Id of the newest good checkpoint in the ranks' memory: newer captures do not evict it."""
    traces: tuple[TraceRequest, ...] = ()


class View(msgspec.Struct, frozen=True):
    """POSTed by an agent while an order of the attempt is open: its ranks' progress blocks, answers included."""

    job: str
    attempt: str
    host: str
    boot: str
    sent_unix_ns: int
    ranks: tuple[Progress, ...]


class EnrolmentRequest(msgspec.Struct, frozen=True):
    """POSTed by an agent that has no identity yet, as JSON; the answer is `Enrolled`."""

    job: str
    host: str
    nonce: str = ""
    """What the proofs are for; empty: there are none."""
    host_id: str = ""
    """`signed.host_of` an agent that has enrolled from this folder; empty: none has."""
    host_proof: str = ""
    """`signed.proof_of` job and host, by the key that this agent was given for the host."""


class Enrolled(msgspec.Struct, frozen=True):
    """The identity of an agent within one job and host, which its messages are signed with from now on."""

    agent: str
    """16 hexadecimal digits."""
    secret: str
    """64 hexadecimal digits."""
    proof: str = ""
    """`signed.proof_of` this answer; empty if the token has no enrolment key."""
    host_key: str = ""
    """Hexadecimal: by it further agents show that they are on the same host, under this name. It stays there."""


class SignedOrders(msgspec.Struct, frozen=True):
    """`Orders` for one agent, signed by its secret. All other fields are part of what is signed."""

    orders: str
    """`Orders` as JSON."""
    nonce: str
    """What the agent's request brought: the answer is to this request and to no other."""
    sequence: int
    """Counts the messages on one event stream; 0 in the answer to a view."""
    at_unix_ns: int
    """The service's time. The message expires `ORDERS_VALID_S` later."""
    code: str = ""
    """`signed.code_of(ORDERS, ...)` of `signed_part`, in hexadecimal."""

    def signed_part(self) -> bytes:
        """The bytes that `code` signs."""
        return f"{self.nonce}\0{self.sequence}\0{self.at_unix_ns}\0{self.orders}".encode()


_ENCODER: Final = msgspec.msgpack.Encoder()
_BATCH_DECODER: Final = msgspec.msgpack.Decoder(Batch)


def encode(message: Batch | View | Orders) -> bytes:
    """Encode one message as msgpack."""
    return _ENCODER.encode(message)


def decode_batch(body: bytes) -> Batch:
    """Decode one msgpack batch.

    Raises:
        msgspec.DecodeError: the body is not msgpack, is cut off, or does not have this shape.
    """
    return _BATCH_DECODER.decode(body)
