"""The devices of a job's hosts (GPUs, network ports, hosts as a whole): newest counters, and counters over time."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query
from sqlalchemy import RowMapping, select

from rankwatch_service.api.dependencies import Context, Ctx
from rankwatch_service.api.http.paging import Page, Time, Wanted, fetch_page
from rankwatch_service.api.http.problem import ProblemError, not_found
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.api.routes.steps import Reader, SeriesLine, chosen_numbers, lines_of, shown
from rankwatch_service.job.device_boards import COUNTER_CHARS_MAX, SLOT_S
from rankwatch_service.names import NAME_CHARS_MAX, series_of_devices
from rankwatch_service.series.query import POINTS_MAX, LastValues, Reduce, last_values, metrics, series
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import Attempt, Job, JobDevice, JobHostDevice

router = APIRouter(prefix="/jobs/{job}/devices", tags=["devices"])

SLOT_NS: Final = SLOT_S * 10**9
FRESH_SLOTS: Final = {"gpu": 12, "port": 1, "host": 1}
"""By kind: slots after which a counter that is no longer reported, as a rate of a port that is down, is left out. Of
ports and hosts every reading has all; some counters of GPUs are read at every tenth."""
Kind = Annotated[Literal["gpu", "port", "host"], Query(description="GPUs, network ports, or hosts as a whole")]


class Device(ApiReply):
    """A device of one of the job's hosts."""

    kind: str
    """gpu, port or host."""
    number: int
    """Its index in the series of this job's devices of its kind."""
    host: str
    index: int
    """Of a GPU: on its host, in the driver's order; not an ordinal of CUDA."""
    uuid: str
    """Of a GPU, empty where the driver does not report it; of a port its name; of a host empty."""
    ranks: list[int]
    """Ranks of the newest attempt that are known to use it."""
    counters: dict[str, float | None]
    """Newest values, without those that are measured no more. Units are part of the names."""
    at_unix_ns: int | None
    """When these were read, to 5 s; null before any was stored."""


class CounterNames(ApiReply):
    """Names of the counters of a job's devices."""

    items: list[str]


class DeviceSegment(ApiReply):
    """A stretch of a series over time. `at_unix_ns` is the beginning of each point; lines of single devices are called
    `device:NUMBER`.
    """

    at_unix_ns: list[int]
    lines: list[SeriesLine]


class DeviceSeries(ApiReply):
    """A counter over time."""

    counter: str
    segments: list[DeviceSegment]


@router.get("")
def list_devices(
    job: str,
    context: Ctx,
    window: Wanted,
    _identity: Reader,
    kind: Kind = "gpu",
    host: Annotated[str | None, Query(max_length=NAME_CHARS_MAX, description="Those of one host")] = None,
) -> Page[Device]:
    """The devices that the job's agents have reported, those seen last first, with their newest counters."""
    users = _users(context, job)
    table = JobDevice if kind == "gpu" else JobHostDevice
    query = select(table.__table__).where(table.job == job)
    if table is JobHostDevice:
        query = query.where(JobHostDevice.kind == kind)
    if host is not None:
        query = query.where(table.host == host)
    listed = f"devices {job} {kind} {host}"
    with read(context.engine) as connection:
        page = fetch_page(connection, query, [table.number], window, context.cursors, listed, partial(_device, kind))
    numbers = [device.number for device in page.items]
    newest = last_values(context.engine, series_of_devices(job, kind), numbers, FRESH_SLOTS[kind])
    for device, values in zip(page.items, newest, strict=True):
        device.ranks = users.get((device.host, device.uuid), []) if device.uuid else []
        _add(device, values)
    return page


@router.get("/counters")
def list_counters(job: str, context: Ctx, _identity: Reader, kind: Kind = "gpu") -> CounterNames:
    """Names of the counters that the job's devices have."""
    _users(context, job)
    return CounterNames(items=metrics(context.engine, series_of_devices(job, kind)))


@router.get("/series")
def show_device_series(
    job: str,
    context: Ctx,
    _identity: Reader,
    counter: Annotated[str, Query(min_length=1, max_length=COUNTER_CHARS_MAX)],
    kind: Kind = "gpu",
    from_unix_ns: Time = None,
    to_unix_ns: Time = None,
    devices: Annotated[str | None, Query(pattern=r"^\d+(-\d+)?(,\d+(-\d+)?)*$", max_length=1_000)] = None,
    reduce: Annotated[Reduce, Query()] = Reduce.MEAN,
    points: Annotated[int, Query(ge=1, le=POINTS_MAX)] = 1_000,
) -> DeviceSeries:
    """A counter over time, of all devices or of those whose numbers are in a list such as 0,4-7."""
    _users(context, job)
    known = metrics(context.engine, series_of_devices(job, kind))
    if known and counter not in known:
        raise ProblemError(422, f"{kind} devices of {job} have no counter {counter!r}; they have {', '.join(known)}")
    first, last = (None if at is None else at // SLOT_NS for at in (from_unix_ns, to_unix_ns))
    chosen = chosen_numbers(devices, "devices") if devices else []
    found = series(context.engine, series_of_devices(job, kind), counter, first or 0, last, chosen, reduce, points)
    segments = [
        DeviceSegment(at_unix_ns=[step * SLOT_NS for step in segment.step.tolist()], lines=lines_of(segment, "device"))
        for segment in found
    ]
    return DeviceSeries(counter=counter, segments=segments)


def _users(context: Context, job: str) -> dict[tuple[str, str], list[int]]:
    """The ranks of the newest attempt that use a device, by host and UUID; 404 if there is no such job."""
    newest = select(Attempt.topology).where(Attempt.job == job).order_by(Attempt.number.desc()).limit(1)
    with read(context.engine) as connection:
        if connection.scalar(select(Job.name).where(Job.name == job)) is None:
            raise not_found("job", job)
        topology: dict[str, Any] = connection.scalar(newest) or {}
    users: dict[tuple[str, str], list[int]] = {}
    for rank in topology.get("ranks", ()):
        users.setdefault((rank["host"], rank.get("device_uuid", "")), []).append(rank["rank"])
    return users


def _device(kind: str, row: RowMapping) -> Device:
    return Device(
        kind=kind,
        number=row["number"],
        host=row["host"],
        index=row["index"],
        uuid=row["uuid"],
        ranks=[],
        counters={},
        at_unix_ns=None,
    )


def _add(device: Device, newest: LastValues) -> None:
    device.counters = {name: shown(value) for name, value in newest.values.items()}
    device.at_unix_ns = newest.step * SLOT_NS if newest.step >= 0 else None
