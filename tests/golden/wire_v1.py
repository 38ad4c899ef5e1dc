"""The wire schema as version 1 was released: what a reader of that version knows. Never changed afterwards."""

from typing import Any

import msgspec


class Column(msgspec.Struct, array_like=True, frozen=True):
    dtype: str
    data: bytes
    base: int = 0
    mask: bytes | None = None


class Table(msgspec.Struct, frozen=True):
    rows: int
    columns: dict[str, Column]


class RankInfo(msgspec.Struct, frozen=True):
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
    replicated: bool = False
    can: tuple[str, ...] = ()


class Progress(msgspec.Struct, array_like=True, frozen=True):
    rank: int
    step: int
    phase: str
    phase_age_s: float
    step_age_s: float
    collective_seq: int = 0
    state: str = "running"
    order: str = ""
    answer: str = ""
    answer_step: int = -1
    answer_k: int = 0
    answer_fingerprint: int = 0
    os_state: str = "R"
    cpu_s: float = 0.0
    answer_detail: str = ""


class DeviceSample(msgspec.Struct, array_like=True, frozen=True):
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


class Event(msgspec.Struct, frozen=True):
    kind: str
    time_unix_ns: int
    rank: int | None = None
    step: int | None = None
    fields: dict[str, Any] = {}


class Batch(msgspec.Struct, frozen=True):
    schema: int
    job: str
    attempt: str
    host: str
    boot: str
    seq: int
    sent_unix_ns: int
    ranks: tuple[RankInfo, ...] = ()
    steps: Table | None = None
    values: Table | None = None
    progress: tuple[Progress, ...] = ()
    devices: tuple[DeviceSample, ...] = ()
    events: tuple[Event, ...] = ()


class View(msgspec.Struct, frozen=True):
    job: str
    attempt: str
    host: str
    boot: str
    sent_unix_ns: int
    ranks: tuple[Progress, ...]
