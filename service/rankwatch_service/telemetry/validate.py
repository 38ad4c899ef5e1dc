"""Validates a posted telemetry body. The stream accepts whatever passes here. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import msgspec

from rankwatch import wire
from rankwatch_service.telemetry.bundle import check_tables
from rankwatch_service.telemetry.columns import ColumnError
from rankwatch_service.telemetry.envelope import (
    BadBatchError,
    Reason,
    SchemaVersion,
    check_header,
    check_size,
    decode,
    decode_envelope,
)
from rankwatch_service.telemetry.json_form import JsonBatch, from_json

MSGPACK_TYPES: Final = frozenset({"application/msgpack", "application/x-msgpack", "application/vnd.msgpack"})
JSON_TYPE: Final = "application/json"

_JSON_BATCH: Final = msgspec.json.Decoder(JsonBatch)
_JSON_VERSION: Final = msgspec.json.Decoder(SchemaVersion)


@dataclass(frozen=True, slots=True)
class ValidBatch:
    """A batch that may be appended to the log."""

    job: str
    host: str
    body: bytes
    """As msgpack."""


def validate(body: bytes, content_type: str) -> ValidBatch:
    """Check one telemetry body.

    Args:
        body: as it was sent, as msgpack or in the plain JSON form.
        content_type: of the HTTP request; parameters (`; charset=...`) are ignored.

    Raises:
        BadBatchError: the batch can never be accepted, however often it is sent.
    """
    media_type = _media_type(content_type)
    if media_type == JSON_TYPE:
        body = _as_msgpack(body)
    elif media_type not in MSGPACK_TYPES:
        check_size(body)
        raise BadBatchError(Reason.CONTENT_TYPE, f"{media_type!r}: send application/msgpack or application/json")
    envelope = decode_envelope(body)
    check_tables(envelope)
    return ValidBatch(envelope.job, envelope.host, body)


def _as_msgpack(body: bytes) -> bytes:
    check_size(body)
    plain = decode(body, _JSON_BATCH, _JSON_VERSION)
    try:
        batch = from_json(plain)
    except ColumnError as error:
        raise BadBatchError(Reason.COLUMNS, str(error)) from error
    check_header(batch)  # first, because msgpack cannot encode some numbers that a checked header does not have
    return wire.encode(batch)


@lru_cache(maxsize=64)
def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()
