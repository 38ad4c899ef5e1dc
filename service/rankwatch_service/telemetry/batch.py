"""The border for telemetry: bytes become a checked `wire.Batch`, or a `BadBatchError` with the reason.

The api checks what it is sent before it appends it; stream checks again what it reads. After this point no rank, step,
length, name or number can surprise anyone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final

import msgspec
import numpy as np

from rankwatch import wire
from rankwatch_detectors.base import Ints
from rankwatch_service.log.base import ALL_JOBS
from rankwatch_service.telemetry.columns import Block, ColumnError, Records, blocks, joined
from rankwatch_service.telemetry.json_form import JsonBatch, from_json
from rankwatch_service.telemetry.stacked import read_blocks

WORLD_SIZE_MAX: Final = 131_072
"""Largest accepted attempt: twice the largest published training job, and 1 MB for each metric of a frame."""

STEP_MAX: Final = 2**53
"""Largest accepted step: beyond it JSON readers lose digits."""

NAME_CHARS_MAX: Final = 200
"""Longest job, attempt, host and boot name: a DNS name has at most 253, a URL wants less."""

LIST_MAX: Final = 8_192
"""Rank infos, progress blocks, device samples and events in one batch, each: 64 hosts' worth of 128 ranks."""

PARAMETERS_MAX: Final = 65_536
"""Parameter names that one rank may declare: 10 times those of the largest published models."""

FIELDS_DEPTH_MAX: Final = 4
"""Nesting of an event's fields; ours have one level."""

MSGPACK_TYPES: Final = frozenset({"application/msgpack", "application/x-msgpack", "application/vnd.msgpack"})
JSON_TYPE: Final = "application/json"

FAMILIES: Final = ("steps", "values")
"""The tables of a batch."""

_NIL: Final = 0xC0
"""Nothing, as msgpack writes it."""

# A name appears in URLs, on pages and in file names: printable, no separators at its ends, no slash.
_NAME: Final = re.compile(
    r"[^\s\x00-\x1f\x7f/\ud800-\udfff](?:[^\x00-\x1f\x7f/\ud800-\udfff]*[^\s\x00-\x1f\x7f/\ud800-\udfff])?"
)
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
    """A job, attempt, host, boot or metric name that cannot be one."""
    COLUMNS = "columns"
    """Columns whose length, type or mask does not fit their table."""
    RANGE = "range"
    """A rank, step, world size or age that cannot be."""
    FAILED = "failed"
    """It is sound as far as we can tell, and processing it failed all the same: our error."""


class BadBatchError(Exception):
    """A batch that can never be accepted, however often it is sent."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class Envelope(wire.Batch, frozen=True):
    """A batch in which everything is checked but its tables; these are still as they came."""

    steps: msgspec.Raw = msgspec.Raw()  # type: ignore[assignment]
    values: msgspec.Raw = msgspec.Raw()  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Checked:
    """A batch in which everything is possible, and its tables as arrays, by family ("steps", "values")."""

    batch: wire.Batch
    tables: dict[str, Records]

    @property
    def rows(self) -> int:
        """Rows of all tables."""
        return sum(len(rows.step) for rows in self.tables.values())


@dataclass(frozen=True, slots=True)
class Bundle:
    """Batches of one attempt that are taken together, and their tables read as one, by family."""

    batches: Sequence[Envelope]
    tables: dict[str, Records]
    origin: dict[str, Ints]
    """For each row of a table the number of its batch."""


def validate(body: bytes, content_type: str) -> wire.Batch:
    """Decode and check one telemetry body.

    Args:
        body: as it was sent.
        content_type: of the HTTP request; parameters (`; charset=...`) are ignored.

    Returns:
        The batch; columns of a JSON body are raw columns like those of a msgpack body.

    Raises:
        BadBatchError: it can never be accepted.
    """
    if len(body) > wire.BATCH_BYTES_MAX:
        raise BadBatchError(Reason.TOO_LARGE, f"{len(body)} bytes; at most {wire.BATCH_BYTES_MAX} are accepted")
    media_type = _media_type(content_type)
    if media_type in MSGPACK_TYPES:
        batch: wire.Batch = _decode(body, _BATCH, _VERSION)
    elif media_type == JSON_TYPE:
        plain = _decode(body, _JSON_BATCH, _JSON_VERSION)
        try:
            batch = from_json(plain)
        except ColumnError as error:
            raise BadBatchError(Reason.COLUMNS, str(error)) from error
    else:
        raise BadBatchError(Reason.CONTENT_TYPE, f"{media_type!r}: send application/msgpack or application/json")
    check(batch)
    return batch


def opened(body: bytes) -> Envelope:
    """Decode one msgpack body and check everything in it but its tables: `read` and `read_together` do that.

    Raises:
        BadBatchError: it can never be accepted.
    """
    if len(body) > wire.BATCH_BYTES_MAX:
        raise BadBatchError(Reason.TOO_LARGE, f"{len(body)} bytes; at most {wire.BATCH_BYTES_MAX} are accepted")
    envelope: Envelope = _decode(body, _ENVELOPE, _VERSION)
    _check_header(envelope)
    return envelope


@lru_cache(maxsize=64)
def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def check(batch: wire.Batch) -> Checked:
    """Check everything in a batch whose tables have been taken apart.

    Raises:
        BadBatchError: something in it is not possible.
    """
    _check_header(batch)
    tables = {"steps": batch.steps, "values": batch.values}
    return Checked(batch, {family: _read(family, table) for family, table in tables.items() if table is not None})


def read(envelope: Envelope) -> Checked:
    """Read and check the tables of a batch.

    Raises:
        BadBatchError: something in them is not possible.
    """
    found = {}
    for family in FAMILIES:
        raw = getattr(envelope, family)
        if _is_table(raw):
            found[family] = _joined(family, _blocks(family, [raw]))
    return Checked(envelope, found)


def read_together(envelopes: Sequence[Envelope]) -> Bundle:
    """Read and check the tables of several batches.

    Raises:
        BadBatchError: something in one of them is not possible; which one, `read` tells.
    """
    tables: dict[str, Records] = {}
    origin: dict[str, Ints] = {}
    for family in FAMILIES:
        there = [(number, raw) for number, raw in enumerate(map(attrgetter(family), envelopes)) if _is_table(raw)]
        if there:
            numbers, raws = zip(*there, strict=True)
            parts = _blocks(family, raws)
            tables[family] = _joined(family, parts)
            origin[family] = np.repeat(
                [numbers[at] for part in parts for at in part.numbers], [rows for part in parts for rows in part.rows]
            )
    return Bundle(envelopes, tables, origin)


def _is_table(raw: msgspec.Raw) -> bool:
    written = memoryview(raw)
    return len(written) > 1 or (len(written) == 1 and written[0] != _NIL)


def _check_header(batch: wire.Batch) -> None:
    if batch.schema != wire.SCHEMA_VERSION:
        raise BadBatchError(Reason.VERSION, f"schema {batch.schema}; this service reads {wire.SCHEMA_VERSION}")
    _check_names(batch.job, batch.attempt, batch.host, batch.boot)
    if not (0 <= batch.seq <= STEP_MAX and 0 <= batch.sent_unix_ns < 2**63):
        raise BadBatchError(Reason.RANGE, f"seq {batch.seq} or sent_unix_ns {batch.sent_unix_ns} cannot be")
    # Most messages hold rows and nothing else: looking before calling is cheaper.
    if batch.ranks or batch.progress or batch.devices or batch.events:
        _check_lists(batch)


def _check_lists(batch: wire.Batch) -> None:
    if max(len(batch.ranks), len(batch.progress), len(batch.devices), len(batch.events)) > LIST_MAX:
        raise BadBatchError(Reason.TOO_LARGE, f"more than {LIST_MAX} ranks, progress blocks, device samples or events")
    _check_ranks(batch.ranks)
    _check_progress(batch.progress)
    for sample in batch.devices:
        _check_range("time_unix_ns", sample.time_unix_ns, 0, 2**63 - 1)
    for event in batch.events:
        _check_event(event)


class _Version(msgspec.Struct):
    schema: int


_ENVELOPE: Final = msgspec.msgpack.Decoder(Envelope)
_BATCH: Final = msgspec.msgpack.Decoder(wire.Batch)
_VERSION: Final = msgspec.msgpack.Decoder(_Version)
_JSON_BATCH: Final = msgspec.json.Decoder(JsonBatch)
_JSON_VERSION: Final = msgspec.json.Decoder(_Version)


def _decode(body: bytes, decoder: Any, version: Any) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        # A newer version may have another shape: then its number is the better reason.
        try:
            schema = version.decode(body).schema
        except (msgspec.MsgspecError, ValueError, RecursionError):
            schema = wire.SCHEMA_VERSION
        if schema != wire.SCHEMA_VERSION:
            detail = f"schema {schema}; this service reads {wire.SCHEMA_VERSION}"
            raise BadBatchError(Reason.VERSION, detail) from error
        raise BadBatchError(Reason.MALFORMED, str(error)) from error


@lru_cache(maxsize=65_536)
def _check_names(job: str, attempt: str, host: str, boot: str) -> None:
    # A sender says the same in every batch.
    for what, name in (("job", job), ("attempt", attempt), ("host", host), ("boot", boot)):
        if len(name) > NAME_CHARS_MAX or not _NAME.fullmatch(name):
            raise BadBatchError(
                Reason.NAME, f"{what} {name[:80]!r}: 1 to {NAME_CHARS_MAX} printable characters, no '/'"
            )
    if job == ALL_JOBS:
        raise BadBatchError(Reason.NAME, f"no job can be called {ALL_JOBS!r}")
    if not _ATTEMPT.fullmatch(attempt):
        raise BadBatchError(Reason.NAME, f"attempt {attempt!r} is not LAUNCH.k")


def _check_range(what: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise BadBatchError(Reason.RANGE, f"{what} {value} is not in {low}..{high}")


def _check_ranks(ranks: Sequence[wire.RankInfo]) -> None:
    for info in ranks:
        _check_range("world_size", info.world_size, 1, WORLD_SIZE_MAX)
        _check_range("rank", info.rank, 0, info.world_size - 1)
        for what in ("local_rank", "dp", "tp", "pp", "cp", "ep"):
            _check_range(what, getattr(info, what), 0, WORLD_SIZE_MAX)
        _check_range("pid", info.pid, 0, 2**31)
        if len(info.parameters) > PARAMETERS_MAX:
            raise BadBatchError(Reason.TOO_LARGE, f"more than {PARAMETERS_MAX} parameter names")
    if len({info.world_size for info in ranks}) > 1:
        raise BadBatchError(Reason.RANGE, "ranks of one attempt disagree on its world size")


def _check_progress(progress: Sequence[wire.Progress]) -> None:
    for block in progress:
        if not (
            0 <= block.rank < WORLD_SIZE_MAX
            and -1 <= block.step <= STEP_MAX
            and 0 <= block.collective_seq < 2**63
            and 0 <= block.phase_age_s < 1e9  # NaN is not either
            and 0 <= block.step_age_s < 1e9
            and 0 <= block.cpu_s < 1e9
            and -1 <= block.outside_s < 1e9
        ):
            raise BadBatchError(Reason.RANGE, f"progress of rank {block.rank}: a number in {block} cannot be")


def _check_event(event: wire.Event) -> None:
    if event.rank is not None:
        _check_range("rank", event.rank, 0, WORLD_SIZE_MAX - 1)
    if event.step is not None:
        _check_range("step", event.step, -1, STEP_MAX)
    _check_range("time_unix_ns", event.time_unix_ns, 0, 2**63 - 1)
    if not _is_json(event.fields, FIELDS_DEPTH_MAX):
        raise BadBatchError(Reason.MALFORMED, f"fields of event {event.kind[:80]!r} are not plain JSON")


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


def _blocks(family: str, tables: Sequence[msgspec.Raw]) -> list[Block]:
    try:
        return read_blocks(tables)
    except ColumnError as error:
        raise BadBatchError(Reason.COLUMNS, f"{family}: {error}") from error
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadBatchError(Reason.MALFORMED, f"{family}: {error}") from error


def _read(family: str, table: wire.Table) -> Records:
    try:
        parts = blocks([table], [0])
    except ColumnError as error:
        raise BadBatchError(Reason.COLUMNS, f"{family}: {error}") from error
    return _joined(family, parts)


def _joined(family: str, parts: Sequence[Block]) -> Records:
    try:
        found = joined(parts)
    except ColumnError as error:
        raise BadBatchError(Reason.COLUMNS, f"{family}: {error}") from error
    if len(found.step):
        _check_range("step", int(found.step.min()), 0, STEP_MAX)
        _check_range("step", int(found.step.max()), 0, STEP_MAX)
        _check_range("rank", int(found.rank.min()), 0, WORLD_SIZE_MAX - 1)
        _check_range("rank", int(found.rank.max()), 0, WORLD_SIZE_MAX - 1)
        _check_range("kind", int(found.kind.max()), 0, 2)
    return found
