"""Decodes and checks the header of a telemetry batch, and the signature of its agent. Pure.

A batch that can never be accepted raises `BadBatchError` with the reason. `telemetry.bundle` reads the tables, of
several batches at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final

import msgspec

from rankwatch import wire
from rankwatch.signed import Purpose, split
from rankwatch_service.names import ALL_JOBS, NAME_CHARS_MAX, is_name

WORLD_SIZE_MAX: Final = 131_072
"""Largest accepted world size: twice the largest published training job, and 1 MB for each metric of a frame."""

STEP_MAX: Final = 2**53
"""Largest accepted step. JSON readers lose digits beyond it."""

LIST_MAX: Final = 8_192
"""Rank infos, progress blocks, device samples and events in one batch, each: enough for 64 hosts of 128 ranks."""

PARAMETERS_MAX: Final = 65_536
"""Parameter names that one rank may declare: 10 times those of the largest published models."""

ANSWER_CHARS_MAX: Final = 400
"""Characters of the detail of a rank's answer, as many as a rank can send its agent."""

FIELDS_DEPTH_MAX: Final = 4
"""Nesting of an event's fields. Agents send one level."""

LINE_CHARS_MAX: Final = 4_096
"""Characters in the line that says what is watched."""

CAN_MAX: Final = 64
"""Actions that a rank may declare as supported, of at most `NAME_CHARS_MAX` characters each."""

SLICE_CHARS_MAX: Final = 64
"""Characters that name the content of a slice: a hash of 16, and an index and a number for each of 6 axes."""

FIELDS_CHARS_MAX: Final = 256 * 1024
"""Characters in an event's fields together: four times the longest stack that agents send."""

_ATTEMPT: Final = re.compile(r".+\.\d{1,9}", re.DOTALL)


class Reason(StrEnum):
    """Why a batch can never be accepted."""

    TOO_LARGE = "too_large"
    CONTENT_TYPE = "content_type"
    MALFORMED = "malformed"
    """Not msgpack or JSON, cut off, or of another shape."""
    VERSION = "version"
    """A schema version that this service does not know."""
    NAME = "name"
    """An invalid job, attempt, host, boot or metric name."""
    COLUMNS = "columns"
    """A column whose length, type or mask does not fit its table."""
    RANGE = "range"
    """A rank, step, world size or age that is out of range."""
    FORGED = "forged"
    """It is not from the agent that it names, or this agent does not own a rank in it."""
    NO_RANK = "no_rank"
    """Its agent carries no rank of the attempt: one whose ranks another has taken over, or one that never had any."""
    LIMIT = "limit"
    """There is no room for one more job, or for its ranks and metrics. Sent again later, it may be accepted."""
    FAILED = "failed"
    """The batch seems valid, and processing it failed: a defect of the service."""


class BadBatchError(Exception):
    """A batch that can never be accepted, however often it is sent."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class Envelope(wire.Batch, frozen=True):
    """A batch whose header is checked and whose tables are still the bytes that were sent."""

    steps: msgspec.Raw = msgspec.Raw()  # type: ignore[assignment]
    values: msgspec.Raw = msgspec.Raw()  # type: ignore[assignment]
    agent: str = ""
    """The agent that signed it, by `read_envelope`; what a sender writes here counts for nothing."""


def decode_envelope(body: bytes) -> Envelope:
    """Decode one msgpack body and check everything in it but its tables.

    Raises:
        BadBatchError: the batch can never be accepted.
    """
    check_size(body)
    envelope: Envelope = decode(body, _ENVELOPE, _VERSION)
    check_header(envelope)
    return envelope


def check_size(body: bytes) -> None:
    """Check the length of a body.

    Raises:
        BadBatchError: it is too long.
    """
    if len(body) > wire.BATCH_BYTES_MAX:
        raise BadBatchError(Reason.TOO_LARGE, f"{len(body)} bytes; at most {wire.BATCH_BYTES_MAX} are accepted")


def check_range(what: str, value: int, low: int, high: int) -> None:
    """Check that a number is between `low` and `high`, both included.

    Raises:
        BadBatchError: it is not.
    """
    if not low <= value <= high:
        raise BadBatchError(Reason.RANGE, f"{what} {value} is not in {low}..{high}")


def decode(body: bytes, decoder: Any, version: Any) -> Any:
    """Decode a body as msgpack or JSON.

    Args:
        body: as it was sent.
        decoder: decodes the whole batch.
        version: decodes its schema version alone (`SchemaVersion`).

    Raises:
        BadBatchError: the body is malformed, or of another version.
    """
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        # A newer version may have another shape; then the version is the better reason.
        try:
            schema = version.decode(body).schema
        except (msgspec.MsgspecError, ValueError, RecursionError):
            schema = wire.SCHEMA_VERSION
        if schema != wire.SCHEMA_VERSION:
            detail = f"schema {schema}; this service reads {wire.SCHEMA_VERSION}"
            raise BadBatchError(Reason.VERSION, detail) from error
        raise BadBatchError(Reason.MALFORMED, str(error)) from error


class SchemaVersion(msgspec.Struct):
    """The schema version of a batch of any version."""

    schema: int


_ENVELOPE: Final = msgspec.msgpack.Decoder(Envelope)
_VERSION: Final = msgspec.msgpack.Decoder(SchemaVersion)


def check_header(batch: wire.Batch) -> None:
    """Check everything in a batch but its tables.

    Raises:
        BadBatchError: the batch can never be accepted.
    """
    if batch.schema != wire.SCHEMA_VERSION:
        raise BadBatchError(Reason.VERSION, f"schema {batch.schema}; this service reads {wire.SCHEMA_VERSION}")
    check_names(batch.job, batch.attempt, batch.host, batch.boot)
    if not (0 <= batch.seq <= STEP_MAX and 0 <= batch.sent_unix_ns < 2**63):
        raise BadBatchError(Reason.RANGE, f"seq {batch.seq} or sent_unix_ns {batch.sent_unix_ns} is out of range")
    # Most batches have only rows, and the test is cheaper than the call.
    if batch.ranks or batch.progress or batch.devices or batch.events or batch.host_devices:
        _check_lists(batch)


def _check_lists(batch: wire.Batch) -> None:
    devices = len(batch.devices) + len(batch.host_devices)
    if max(len(batch.ranks), len(batch.progress), devices, len(batch.events)) > LIST_MAX:
        raise BadBatchError(Reason.TOO_LARGE, f"more than {LIST_MAX} ranks, progress blocks, device samples or events")
    _check_ranks(batch.ranks)
    check_progress(batch.progress)
    for sample in batch.devices:
        check_range("time_unix_ns", sample.time_unix_ns, 0, 2**63 - 1)
    for host_sample in batch.host_devices:
        check_range("time_unix_ns", host_sample.time_unix_ns, 0, 2**63 - 1)
        if host_sample.kind not in (wire.PORT, wire.HOST):
            raise BadBatchError(Reason.RANGE, f"kind {host_sample.kind[:80]!r} is neither {wire.PORT} nor {wire.HOST}")
    for event in batch.events:
        _check_event(event)


@lru_cache(maxsize=65_536)
def check_names(job: str, attempt: str, host: str, boot: str) -> None:
    """Check the names that a batch or a view has.

    Raises:
        BadBatchError: one is not valid.
    """
    # A sender repeats its names in every batch, so the answers are cached.
    for what, name in (("job", job), ("attempt", attempt), ("host", host), ("boot", boot)):
        if not is_name(name):
            raise BadBatchError(
                Reason.NAME,
                f"{what} {name[:80]!r}: 1 to {NAME_CHARS_MAX} printable characters, no '/', not '.' or '..'",
            )
    if job == ALL_JOBS:
        raise BadBatchError(Reason.NAME, f"{ALL_JOBS!r} is reserved and cannot name a job")
    if not _ATTEMPT.fullmatch(attempt):
        raise BadBatchError(Reason.NAME, f"attempt {attempt!r} is not LAUNCH.k")


def _check_ranks(ranks: Sequence[wire.RankInfo]) -> None:
    for info in ranks:
        check_range("world_size", info.world_size, 1, WORLD_SIZE_MAX)
        check_range("rank", info.rank, 0, info.world_size - 1)
        for what in ("local_rank", "dp", "tp", "pp", "cp", "ep"):
            check_range(what, getattr(info, what), 0, WORLD_SIZE_MAX)
        check_range("pid", info.pid, 0, 2**31)
        if len(info.parameters) > PARAMETERS_MAX:
            raise BadBatchError(Reason.TOO_LARGE, f"more than {PARAMETERS_MAX} parameter names")
        if len(info.can) > CAN_MAX or len(info.watched) > LINE_CHARS_MAX:
            raise BadBatchError(Reason.TOO_LARGE, f"rank {info.rank}: more than {CAN_MAX} actions, or a long line")
        texts = [one.content for one in info.slices or ()]
        for one in info.slices or ():
            check_range("replica_of", one.replica_of, -1, info.world_size - 1)
        if len(texts) > wire.SLICES_MAX or max(map(len, texts), default=0) > SLICE_CHARS_MAX:
            raise BadBatchError(
                Reason.TOO_LARGE, f"rank {info.rank}: more than {wire.SLICES_MAX} slices, or a long one"
            )
        if max(map(len, (info.host, info.device_uuid, info.device_type, info.switch, *info.can))) > NAME_CHARS_MAX:
            raise BadBatchError(Reason.NAME, f"rank {info.rank}: a name of more than {NAME_CHARS_MAX} characters")
    if len({info.world_size for info in ranks}) > 1:
        raise BadBatchError(Reason.RANGE, "ranks of one attempt disagree on its world size")


def check_progress(progress: Sequence[wire.Progress]) -> None:
    """Check progress blocks of a batch or a view.

    Raises:
        BadBatchError: a number is out of range, or a text is longer than agents send.
    """
    for block in progress:
        if not (
            0 <= block.rank < WORLD_SIZE_MAX
            and -1 <= block.step <= STEP_MAX
            and 0 <= block.collective_seq < 2**63
            and 0 <= block.phase_age_s < 1e9  # false for NaN too
            and 0 <= block.step_age_s < 1e9
            and 0 <= block.cpu_s < 1e9
            and -1 <= block.outside_s < 1e9
            and len(block.phase) + len(block.state) + len(block.os_state) + len(block.doing) <= NAME_CHARS_MAX
            and len(block.order) + len(block.answer) <= NAME_CHARS_MAX
            and len(block.answer_detail) <= ANSWER_CHARS_MAX
        ):
            detail = f"progress of rank {block.rank}: a number is out of range, or a text too long, in {block}"[:500]
            raise BadBatchError(Reason.RANGE, detail)


def _check_event(event: wire.Event) -> None:
    if event.rank is not None:
        check_range("rank", event.rank, 0, WORLD_SIZE_MAX - 1)
    if event.step is not None:
        check_range("step", event.step, -1, STEP_MAX)
    check_range("time_unix_ns", event.time_unix_ns, 0, 2**63 - 1)
    if len(event.kind) > NAME_CHARS_MAX:
        raise BadBatchError(Reason.NAME, f"kind of an event: more than {NAME_CHARS_MAX} characters")
    if not _is_json(event.fields, FIELDS_DEPTH_MAX):
        raise BadBatchError(Reason.MALFORMED, f"fields of event {event.kind!r} are not plain JSON")
    if _chars(event.fields) > FIELDS_CHARS_MAX:
        detail = f"fields of event {event.kind!r}: more than {FIELDS_CHARS_MAX} characters"
        raise BadBatchError(Reason.TOO_LARGE, detail)


def _is_json(value: Any, depth: int) -> bool:
    if value is None or isinstance(value, str | bool | float):
        return True
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    if depth == 0:
        return False
    if isinstance(value, list):
        return all(_is_json(item, depth - 1) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(item, depth - 1) for key, item in value.items())
    return False


def _chars(value: Any) -> int:
    """Characters of all texts in fields, and one for each other value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list):
        return sum(map(_chars, value))
    if isinstance(value, dict):
        return sum(len(key) + _chars(item) for key, item in value.items())
    return 1


SecretOf = Callable[[str, str, str], bytes]
"""(job, host, agent) -> the agent's secret."""


def no_secrets(job: str, host: str, agent: str) -> bytes:  # noqa: ARG001 - a `SecretOf`
    """For a stream without a key, which takes unsigned batches alone.

    Raises:
        BadBatchError: always.
    """
    raise BadBatchError(Reason.FORGED, "a signed batch, and this stream has no key to verify it with")


def read_envelope(body: bytes, secret_of: SecretOf) -> Envelope:
    """Decode one body of the log, signed or not, and check everything in it but its tables.

    `Envelope.agent` and `RankInfo.agent` are the agent that signed it, and empty in an unsigned one.

    Raises:
        BadBatchError: the batch can never be accepted, or it is not from the agent that it names.
    """
    signed = split(body)
    envelope = decode_envelope(signed.message if signed else body)
    agent = signed.agent if signed else ""
    if signed and not signed.is_by(secret_of(envelope.job, envelope.host, agent), Purpose.BATCH):
        raise BadBatchError(Reason.FORGED, f"the signature is not that of agent {agent} on host {envelope.host!r}")
    if agent and any(info.host != envelope.host for info in envelope.ranks):
        raise BadBatchError(Reason.FORGED, f"agent {agent} of host {envelope.host!r} introduces a rank of another host")
    ranks = tuple(msgspec.structs.replace(info, agent=agent) for info in envelope.ranks)
    return msgspec.structs.replace(envelope, agent=agent, ranks=ranks)
