"""Control records: whatever decides and is not telemetry, as it stands in the control log.

The api appends one in the same transaction as the row it explains, keyed by the job it concerns ("*" for all jobs), so
that stream learns of it at one place in the order of things and learns the same when it replays. Rows of incidents have
one writer, stream: for a `Judgement` the api changes no incident itself, it appends the record and waits for stream.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec


class OrderPhase(msgspec.Struct, frozen=True, tag="order", tag_field="record"):
    """An order entered a phase. From `hold` on, until `closed`, ranks that stand still do so because we said so."""

    order: str
    command: str
    job: str
    attempt: str
    action: str
    phase: str
    """As in wire.OrderView."""
    step: int
    k: int = 0
    checkpoint: str = ""
    checkpoint_step: int = -1
    mode: str = ""
    """For rollback: full or weights."""


class Judgement(msgspec.Struct, frozen=True, tag="judgement", tag_field="record"):
    """A person acknowledged, resolved or commented on an incident."""

    incident: str
    what: str
    """acknowledged, resolved, commented."""
    actor: str
    text: str = ""


class SilenceSet(msgspec.Struct, frozen=True, tag="silence", tag_field="record"):
    """A silence was made or changed. One that was ended early has its end in the past."""

    id: str
    job: str
    kind: str
    scope: str
    starts_unix_ns: int
    ends_unix_ns: int


class ReceiverRoute(msgspec.Struct, frozen=True):
    """What one receiver wants to hear. Its URL and secret are nobody's business but the notifier's."""

    name: str
    kinds: tuple[str, ...] = ()
    severities: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    enabled: bool = True


class ReceiversSet(msgspec.Struct, frozen=True, tag="receivers", tag_field="record"):
    """All receivers, whenever one of them changes."""

    receivers: tuple[ReceiverRoute, ...]


class PolicyRuleRecord(msgspec.Struct, frozen=True):
    """One policy rule, see `policy.Rule`."""

    id: str
    kind: str
    severity: str
    job: str
    confidence_min: float
    mode: str
    action: str
    rollback_mode: str = ""


class PolicySet(msgspec.Struct, frozen=True, tag="policy", tag_field="record"):
    """The whole policy, whenever any of it changes. Rules stand in the order in which they are tried."""

    hands_off: bool
    rules: tuple[PolicyRuleRecord, ...]
    limits: dict[str, Any]
    """Fields of `policy.PolicyLimits`."""


ControlRecord = OrderPhase | Judgement | SilenceSet | ReceiversSet | PolicySet

_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final[msgspec.json.Decoder[ControlRecord]] = msgspec.json.Decoder(ControlRecord)


def encode_control(record: ControlRecord) -> bytes:
    """The record as JSON: the value of an entry of the control log."""
    return _ENCODER.encode(record)


def decode_control(value: bytes) -> ControlRecord:
    """Read a control record.

    Raises:
        msgspec.DecodeError: it is not one of the records above.
    """
    return _DECODER.decode(value)
