"""What is known of the service's health, and what is wrong by that."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, Engine, func, select, text

from rankwatch_detectors.base import Severity
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.clock import Clock
from rankwatch_service.job.detection import DETECTOR_OFF
from rankwatch_service.notify.lease import LEASE_NS
from rankwatch_service.notify.outbox import undelivered
from rankwatch_service.settings import Settings
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import (
    AgentView,
    DeadLetter,
    Delivery,
    Job,
    Lease,
    LogPartition,
    Outbox,
    Receiver,
    StreamPosition,
    StreamProcess,
    StreamReport,
)

FRESH_S: Final = 2.0
"""How long one reading serves everybody who asks."""

DAY_NS: Final = 86_400 * 10**9

SILENT_NS: Final = 30 * 10**9
"""Every part reports every few seconds. One that has been silent for this long does not work."""

AGENTS_SHOWN_MAX: Final = 200
"""Agents in one reply: those that have been silent longest."""

JOBS_SHOWN_MAX: Final = 100
"""Jobs with dropped records in one reply: those seen last."""

_TRAINING: Final = ("running", "stalled", "paused")


class NotifierState(ApiReply):
    """The process that delivers notifications, and what it has to do."""

    reported_unix_ns: int | None
    """When it last renewed its lease; null: there never was one."""
    waiting: int
    """Notifications not delivered yet."""
    oldest_waiting_unix_ns: int | None


class ReceiverState(ApiReply):
    """A receiver, and what became of its notifications of the last 24 hours."""

    name: str
    enabled: bool
    disabled_reason: str
    waiting: int
    oldest_waiting_unix_ns: int | None
    failed: int
    """Given up in the last 24 hours."""
    delivered_unix_ns: int | None
    """When the newest one was delivered; null: none in the last 24 hours."""
    error: str
    """Why the newest try failed; empty if it succeeded, or nothing was tried."""


class AgentState(ApiReply):
    """An agent of a job that trains, with its last report."""

    job: str
    attempt: str
    host: str
    reported_unix_ns: int


class DatabaseState(ApiReply):
    """The store, and what keeps the log of telemetry."""

    kind: str
    """sqlite or postgresql."""
    telemetry_log: str
    """database or kafka."""
    size_bytes: int
    free_bytes: int | None
    """Left on the disk of the database; null with PostgreSQL, whose disk is another machine's."""


class DroppedRecords(ApiReply):
    """What did not reach the detectors or the charts of a job of the last 24 hours."""

    job: str
    reasons: dict[str, int]


class DetectorOff(ApiReply):
    """A detector that was switched off in a job, since it failed too often."""

    job: str
    detector: str
    failures: int


class HealthFacts(ApiReply):
    """All inputs of `health_problems.evaluate`."""

    at_unix_ns: int
    """When this was read."""
    stream: StreamState
    notifier: NotifierState
    receivers: list[ReceiverState]
    agents: list[AgentState]
    """Those that have been silent longest first, at most 200."""
    agents_total: int
    agents_silent: int
    """Agents of jobs that train that have not reported for 30 s."""
    detectors_off: list[DetectorOff]
    dropped: list[DroppedRecords]
    dead_letters_day: int
    """Records of the last 24 hours that could not be used."""
    database: DatabaseState


class HealthReader:
    """Reads the facts of this process's service. Every open page asks for them; they are read once in `FRESH_S`."""

    def __init__(self, engine: Engine, settings: Settings, clock: Clock) -> None:
        self._engine = engine
        self._settings = settings
        self._clock = clock
        self._reading = threading.Lock()
        self._newest: HealthFacts | None = None

    def facts(self) -> HealthFacts:
        """All facts in one consistent view, `FRESH_S` old at most, or as old as when the present reading began.

        Only the first reading is waited for: while a database does not answer, pages must not occupy all threads.
        """
        newest = self._newest
        if not self._reading.acquire(blocking=newest is None):
            assert newest is not None
            return newest
        try:
            now, newest = self._clock.unix_ns(), self._newest
            if newest is None or not 0 <= now - newest.at_unix_ns < FRESH_S * 1e9:
                with read(self._engine) as connection:
                    newest = _facts(connection, now, self._settings.data_dir, not self._settings.kafka)
                self._newest = newest
            return newest
        finally:
            self._reading.release()


def _facts(connection: Connection, now_unix_ns: int, data_dir: Path, in_store: bool) -> HealthFacts:
    agents, total, silent = _agents(connection, now_unix_ns)
    dropped, off = _dropped(connection, now_unix_ns)
    letters = select(func.count()).select_from(DeadLetter).where(DeadLetter.at_unix_ns > now_unix_ns - DAY_NS)
    return HealthFacts(
        at_unix_ns=now_unix_ns,
        stream=StreamState(partitions=partitions(connection, in_store), processes=processes(connection)),
        notifier=_notifier(connection),
        receivers=_receivers(connection, now_unix_ns),
        agents=agents,
        agents_total=total,
        agents_silent=silent,
        detectors_off=off,
        dropped=dropped,
        dead_letters_day=connection.scalar(letters) or 0,
        database=_database(connection, data_dir, in_store),
    )


def _notifier(connection: Connection) -> NotifierState:
    until = connection.scalar(select(Lease.expires_unix_ns).where(Lease.name == "notify"))
    count, oldest = undelivered(connection)
    return NotifierState(
        reported_unix_ns=None if until is None else max(until - LEASE_NS, 0),
        waiting=count,
        oldest_waiting_unix_ns=oldest,
    )


def _receivers(connection: Connection, now_unix_ns: int) -> list[ReceiverState]:
    counted = (Outbox.receiver, func.count(), func.min(Outbox.created_unix_ns), func.max(Outbox.tries))
    waiting = select(*counted).where(Outbox.state == "waiting").group_by(Outbox.receiver)
    # The next try of a message that is settled is when it was settled, and has an index.
    recent = Outbox.next_try_unix_ns > now_unix_ns - DAY_NS
    newest = (Outbox.receiver, func.count(), func.max(Outbox.next_try_unix_ns))
    settled = select(*newest).where(recent).group_by(Outbox.receiver)
    waits = {name: rest for name, *rest in connection.execute(waiting)}
    failed = {name: rest for name, *rest in connection.execute(settled.where(Outbox.state == "failed"))}
    sent = {name: rest for name, *rest in connection.execute(settled.where(Outbox.state == "delivered"))}
    receivers = select(Receiver.name, Receiver.enabled, Receiver.disabled_reason).order_by(Receiver.name)
    found = []
    for name, enabled, reason in connection.execute(receivers).all():
        count, oldest, tries = waits.get(name, (0, None, 0))
        given_up, given_up_unix_ns = failed.get(name, (0, 0))
        delivered_unix_ns = sent.get(name, (0, None))[1]
        fails = tries > 0 or given_up_unix_ns > (delivered_unix_ns or 0)
        found.append(
            ReceiverState(
                name=name,
                enabled=enabled,
                disabled_reason=reason,
                waiting=count,
                oldest_waiting_unix_ns=oldest,
                failed=given_up,
                delivered_unix_ns=delivered_unix_ns,
                error=_newest_error(connection, name) if fails else "",
            )
        )
    return found


def _newest_error(connection: Connection, receiver: str) -> str:
    query = (
        select(Delivery.error)
        .join(Outbox, Outbox.id == Delivery.outbox_id)
        .where(Outbox.receiver == receiver, Outbox.state.in_(("waiting", "failed")))
        .order_by(Delivery.id.desc())
        .limit(1)
    )
    return connection.scalar(query) or ""


def _agents(connection: Connection, now_unix_ns: int) -> tuple[list[AgentState], int, int]:
    """Agents of jobs that train, in their running attempt: those shown, how many there are, how many are silent."""
    columns = (AgentView.job, AgentView.attempt, AgentView.host, AgentView.at_unix_ns)
    newest = (Job.name == AgentView.job) & (Job.attempt == AgentView.attempt)
    trains = Job.state.in_(_TRAINING)
    counted = select(func.count()).select_from(AgentView).join(Job, newest).where(trains)
    total = connection.scalar(counted) or 0
    silent = connection.scalar(counted.where(AgentView.at_unix_ns < now_unix_ns - SILENT_NS)) or 0
    longest = select(*columns).join(Job, newest).where(trains).order_by(AgentView.at_unix_ns, AgentView.host)
    shown = [
        AgentState(job=job, attempt=attempt, host=host.partition("/")[0], reported_unix_ns=at)
        for job, attempt, host, at in connection.execute(longest.limit(AGENTS_SHOWN_MAX))
    ]
    return shown, total, silent


def _dropped(connection: Connection, now_unix_ns: int) -> tuple[list[DroppedRecords], list[DetectorOff]]:
    recent = Job.last_seen_unix_ns > now_unix_ns - DAY_NS
    query = select(Job.name, Job.dropped).where(recent).order_by(Job.last_seen_unix_ns.desc()).limit(JOBS_SHOWN_MAX)
    dropped, off = [], []
    for job, counts in connection.execute(query):
        for reason, count in counts.items():
            if reason.startswith(DETECTOR_OFF):
                off.append(DetectorOff(job=job, detector=reason.removeprefix(DETECTOR_OFF), failures=count))
        reasons = dict(_without_detectors(counts.items()))
        if reasons:
            dropped.append(DroppedRecords(job=job, reasons=reasons))
    return dropped, off


def _without_detectors(counts: Iterable[tuple[str, int]]) -> Iterable[tuple[str, int]]:
    return ((reason, count) for reason, count in counts if count and not reason.startswith(DETECTOR_OFF))


def _database(connection: Connection, data_dir: Path, in_store: bool) -> DatabaseState:
    kind = connection.dialect.name
    if kind == "postgresql":
        size = connection.scalar(text("SELECT pg_database_size(current_database())")) or 0
        free = None
    else:
        pages = connection.scalar(text("SELECT page_count * page_size FROM pragma_page_count, pragma_page_size"))
        size, free = pages or 0, shutil.disk_usage(data_dir).free
    log = "database" if in_store else "kafka"
    return DatabaseState(kind=kind, telemetry_log=log, size_bytes=size, free_bytes=free)


class PartitionState(ApiReply):
    """One partition of the log of telemetry."""

    partition: int
    owner: str
    """HOST:PID of the process that reported it; empty if none has."""
    epoch: int
    """Grows whenever another process takes the partition over."""
    position: int
    """Committed up to here."""
    end: int
    """Position of the next record; with Kafka, as last reported by the owner."""
    lag: int
    """Records not committed yet."""
    lost_records: int
    """Records that the log removed before this owner could read them."""
    tick_unix_ns: int
    """Time of its newest tick; does not advance while all its jobs are idle."""
    reported_unix_ns: int


class ProcessState(ApiReply):
    """One stream process of the last 24 hours."""

    owner: str
    started_unix_ns: int
    counters: dict[str, int]
    """Events since its start, by name."""
    reported_unix_ns: int


class StreamState(ApiReply):
    """All partitions and processes of stream."""

    partitions: list[PartitionState]
    processes: list[ProcessState]


def partitions(connection: Connection, in_store: bool) -> list[PartitionState]:
    """All partitions that ever had an owner or, if the log is in the store, were ever written to."""
    committed = {row.partition: row for row in connection.execute(select(StreamPosition.__table__))}
    reports = {row.partition: row for row in connection.execute(select(StreamReport.__table__))}
    ends: dict[int, int] = {}
    if in_store:
        written = connection.execute(select(LogPartition.partition, LogPartition.next_position))
        ends = {partition: end for partition, end in written}  # noqa: C416 - rows are no tuples to the type checker
    states = []
    for partition in sorted({*committed, *ends}):
        row, report = committed.get(partition), reports.get(partition)
        position = row.position if row is not None else 0
        end = ends.get(partition, report.end if report is not None else position)
        states.append(
            PartitionState(
                partition=partition,
                owner=report.owner if report is not None else "",
                epoch=row.epoch if row is not None else 0,
                position=position,
                end=end,
                lag=max(end - position, 0),
                lost_records=report.lost_records if report is not None else 0,
                tick_unix_ns=report.tick_unix_ns if report is not None else 0,
                reported_unix_ns=report.at_unix_ns if report is not None else 0,
            )
        )
    return states


def processes(connection: Connection) -> list[ProcessState]:
    """Processes of the last 24 hours, newest start first."""
    rows = connection.execute(select(StreamProcess.__table__).order_by(StreamProcess.started_unix_ns.desc()))
    return [
        ProcessState(
            owner=row.owner, started_unix_ns=row.started_unix_ns, counters=row.counters, reported_unix_ns=row.at_unix_ns
        )
        for row in rows
    ]


BEHIND_NS: Final = 60 * 10**9
"""Stream that is this far behind opens incidents late."""

FAILING_NS: Final = 60 * 10**9
"""Age at which a notification whose delivery has failed is a problem: it was tried four times."""

WAITING_NS: Final = 600 * 10**9
"""Age at which one that waits for another reason is a problem: it is late for whoever is on call."""

FREE_BYTES_MIN: Final = 1_000_000_000
"""Less than this on the disk of the database is a problem: a write that finds no room is lost."""

NAMED_MAX: Final = 3
"""Hosts that one sentence names."""


class HealthArea(StrEnum):
    """The part of rankwatch that a problem is about."""

    STREAM = "stream"
    DETECTORS = "detectors"
    AGENTS = "agents"
    NOTIFIER = "notifier"
    RECEIVERS = "receivers"
    DATABASE = "database"
    API = "api"


OF_NO_JOB: Final = frozenset({HealthArea.STREAM, HealthArea.NOTIFIER, HealthArea.DATABASE, HealthArea.API})
"""Areas whose problems name no job, host or receiver: everybody may read them."""


class HealthProblem(ApiReply):
    """One thing that is wrong."""

    area: HealthArea
    severity: Severity
    """critical: incidents are not found, or nobody is notified of them. warning: some are late or incomplete."""
    text: str
    advice: str
    """What to do about it."""


def evaluate(facts: HealthFacts, *, driver_alive: bool) -> list[HealthProblem]:
    """All problems, the critical ones first."""
    parts = (_stream_problems, _detectors_problems, _notifier_problems, _receivers_problems, _agents_problems)
    found = [problem for part in parts for problem in part(facts)]
    if facts.database.free_bytes is not None and facts.database.free_bytes < FREE_BYTES_MIN:
        megabytes = facts.database.free_bytes // 1_000_000
        text = f"Only {megabytes} MB are free on the disk of the database."
        found.append(_problem(HealthArea.DATABASE, Severity.CRITICAL, text, "Free space, or lower what is kept."))
    if not driver_alive:
        text = "This api process carries out no commands: its driver does not run."
        found.append(_problem(HealthArea.API, Severity.CRITICAL, text, "Restart the api."))
    return sorted(found, key=lambda problem: problem.severity is not Severity.CRITICAL)


def _stream_problems(facts: HealthFacts) -> Iterator[HealthProblem]:
    newest = max((process.reported_unix_ns for process in facts.stream.processes), default=None)
    if newest is None or facts.at_unix_ns - newest > SILENT_NS:
        since = "has ever reported" if newest is None else f"has reported for {_age(facts.at_unix_ns - newest)}"
        text = f"No stream process {since}: telemetry is stored and not evaluated, so no incident opens."
        yield _problem(HealthArea.STREAM, Severity.CRITICAL, text, "Start `rankwatch stream`; it evaluates what waits.")
        return
    for one in facts.stream.partitions:
        silent_ns = facts.at_unix_ns - one.reported_unix_ns
        behind_ns = facts.at_unix_ns - one.tick_unix_ns if one.lag and one.tick_unix_ns else 0
        if one.owner and one.lag and silent_ns > SILENT_NS:
            text = (
                f"No process has owned partition {one.partition} for {_age(silent_ns)}; {one.lag} records wait in it."
            )
            advice = "Look at the log of the stream processes."
            yield _problem(HealthArea.STREAM, Severity.CRITICAL, text, advice)
        elif behind_ns > BEHIND_NS:
            text = f"Stream is {_age(behind_ns)} behind in partition {one.partition}: {one.lag} records wait."
            advice = "If it does not catch up, add stream processes or give it a faster machine."
            yield _problem(HealthArea.STREAM, Severity.WARNING, text, advice)


def _detectors_problems(facts: HealthFacts) -> Iterator[HealthProblem]:
    for one in facts.detectors_off:
        text = f"The detector {one.detector} is switched off in {one.job}: it failed {one.failures} times."
        advice = "The log line detector_failed of stream says why; a new launch of the job switches it on again."
        yield _problem(HealthArea.DETECTORS, Severity.WARNING, text, advice)


def _notifier_problems(facts: HealthFacts) -> Iterator[HealthProblem]:
    reported = facts.notifier.reported_unix_ns
    if reported is None or facts.at_unix_ns - reported > SILENT_NS:
        since = "has ever run" if reported is None else f"has run for {_age(facts.at_unix_ns - reported)}"
        text = f"No notifier {since}: nobody is notified of incidents."
        yield _problem(HealthArea.NOTIFIER, Severity.CRITICAL, text, "Start `rankwatch notify`.")


def _receivers_problems(facts: HealthFacts) -> Iterator[HealthProblem]:
    for one in facts.receivers:
        if not one.enabled and one.disabled_reason != "switched off":
            text = f"The receiver {one.name} is no longer notified: {one.disabled_reason or 'it is disabled'}."
            advice = "Correct its URL, which switches it on again, or remove it."
            yield _problem(HealthArea.RECEIVERS, Severity.WARNING, text, advice)
        elif text := _undelivered(one, facts.at_unix_ns):
            advice = "Test it on the page of notifications; waiting messages are sent again automatically."
            yield _problem(HealthArea.RECEIVERS, Severity.WARNING, text, advice)


def _undelivered(one: ReceiverState, now_unix_ns: int) -> str:
    """What is wrong with the messages to an enabled receiver; empty: nothing."""
    why = f": {one.error}" if one.error else ""
    longest_ns = FAILING_NS if one.error else WAITING_NS
    if one.oldest_waiting_unix_ns is not None and now_unix_ns - one.oldest_waiting_unix_ns > longest_ns:
        age = _age(now_unix_ns - one.oldest_waiting_unix_ns)
        return f"{_count(one.waiting, 'message')} to {one.name} could not be delivered, the oldest for {age}{why}."
    if one.failed and one.error:
        return f"{_count(one.failed, 'message')} to {one.name} failed in the last 24 h{why}."
    return ""


def _agents_problems(facts: HealthFacts) -> Iterator[HealthProblem]:
    if not facts.agents_silent:
        return
    silent = [one for one in facts.agents if facts.at_unix_ns - one.reported_unix_ns > SILENT_NS]
    named = ", ".join(f"{one.host} ({one.job})" for one in silent[:NAMED_MAX])
    more = f" and {facts.agents_silent - NAMED_MAX} more" if facts.agents_silent > NAMED_MAX else ""
    jobs = Counter(one.job for one in silent)
    text = (
        f"{facts.agents_silent} of {_count(facts.agents_total, 'agent')} of {_count(len(jobs), 'job')} that train have"
        f" not reported for 30 s: {named}{more}."
    )
    advice = "Check the agent and the network of these hosts. Training itself continues."
    yield _problem(HealthArea.AGENTS, Severity.WARNING, text, advice)


def _problem(area: HealthArea, severity: Severity, text: str, advice: str) -> HealthProblem:
    return HealthProblem(area=area, severity=severity, text=text, advice=advice)


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _age(ns: int) -> str:
    """A duration for people.

    >>> [_age(42 * 10**9), _age(7_500 * 10**9)]
    ['42 s', '2 h 5 min']
    """
    seconds = ns // 10**9
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3_600:
        return f"{seconds // 60} min"
    return f"{seconds // 3_600} h {seconds % 3_600 // 60} min"
