"""Control records: what stream's decisions depend on besides telemetry, as the control log holds it.

The api appends a record in the same transaction as the row that it explains, under the name of the job that it concerns
("*": all jobs). So stream reads it between the same two records of telemetry when it replays. Stream alone writes rows
of incidents: for a `IncidentReview` the api only appends the record, and waits until stream has applied it.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from rankwatch_detectors.metric_rule import MetricRule
from rankwatch_service.tuning import TuningSet


class OrderPhase(msgspec.Struct, frozen=True, tag="order", tag_field="record"):
    """An order entered a phase. From `hold` until `closed`, ranks that stand still do so because of the order."""

    order: str
    command: str
    job: str
    attempt: str
    action: str
    phase: str
    """As in wire.OrderView."""
    step: int
    k: int = 0
    """Rollback number of the attempt (LAUNCH.k) in which the ranks train after the order."""
    checkpoint: str = ""
    checkpoint_step: int = -1
    mode: str = ""
    """For rollback: full or relaunch."""
    paused: bool = False
    """Whether the ranks are paused, be it while a checkpoint is saved."""


class IncidentReview(msgspec.Struct, frozen=True, tag="judgement", tag_field="record"):
    """A person acknowledged, unacknowledged, resolved or commented on an incident."""

    incident: str
    what: str
    """acknowledged, unacknowledged, resolved, commented."""
    actor: str
    text: str = ""


class TelemetryRefused(msgspec.Struct, frozen=True, tag="refusal", tag_field="record"):
    """The api refused messages of a job, and the job shall have an incident of it."""

    kind: str
    """limit or forged."""
    fields: dict[str, str | int]
    """As in `rankwatch_detectors.refusals`."""


class ReportedAlert(msgspec.Struct, frozen=True):
    """What a Prometheus reported of one alert; texts are cut to their limits."""

    fingerprint: str
    name: str
    state: str
    """firing; resolved, as its sender says; expired: it was not repeated in time."""
    severity: str = "warning"
    summary: str = ""
    hosts: tuple[str, ...] = ()
    """Names of the host that it is about, as its labels have them; none: they name no host."""
    rank: int | None = None
    starts_s: float = 0.0
    """Unix time."""
    labels: dict[str, str] = {}
    url: str = ""
    """Its query in its Prometheus; empty: unknown. The same for the runbook."""
    runbook_url: str = ""


class AlertsReceived(msgspec.Struct, frozen=True, tag="alerts", tag_field="record"):
    """Alerts about a job began or ended; all those of one request."""

    alerts: tuple[ReportedAlert, ...]

    @property
    def kind(self) -> str:
        """The kind of its occurrence."""
        return "alert"

    @property
    def fields(self) -> dict[str, Any]:
        """As in `rankwatch_detectors.alerts`."""
        return {"alerts": msgspec.to_builtins(self.alerts)}


class JobDeleted(msgspec.Struct, frozen=True, tag="job_deleted", tag_field="record"):
    """A person deleted the job: all that came before this record is dropped, and later telemetry begins a new job."""

    job: str


class JobOwnership(msgspec.Struct, frozen=True, tag="project", tag_field="record"):
    """The project and the owner of a job, as a person set them or it inherited them when it began."""

    job: str
    project: str = ""
    """Empty: none; the same for owner."""
    owner: str = ""


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
    project: str = ""


class PolicySet(msgspec.Struct, frozen=True, tag="policy", tag_field="record"):
    """The whole policy; appended whenever any of it changes. Rules are in the order in which they are tried."""

    hands_off: bool
    rules: tuple[PolicyRuleRecord, ...]
    limits: dict[str, Any]
    """Fields of `policy.PolicyLimits`."""
    two_people: bool = False
    unsigned_until_unix_ns: int | None = None


class PrecisionSet(msgspec.Struct, frozen=True, tag="precision", tag_field="record"):
    """The precision of all kinds of incidents; appended whenever any of it changes, also because time passes."""

    kinds: dict[str, tuple[int, int]]
    """How many incidents were useful and how many noise, by kind. A kind of which none is judged may be missing."""


class RulesSet(msgspec.Struct, frozen=True, tag="rules", tag_field="record"):
    """All rules on metrics; appended whenever any of them changes. They hold from this record on."""

    rules: tuple[MetricRule, ...]


ServiceReport = TelemetryRefused | AlertsReceived
"""What is an occurrence for the detectors of its job, of kind `kind` and with `fields`, and nothing else."""

ControlRecord = (
    OrderPhase
    | IncidentReview
    | TelemetryRefused
    | AlertsReceived
    | JobDeleted
    | JobOwnership
    | PolicySet
    | PrecisionSet
    | RulesSet
    | TuningSet
)

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
