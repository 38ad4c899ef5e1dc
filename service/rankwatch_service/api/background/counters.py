"""Metrics of the api and of what is stored: requests, batches, processes, incidents, notifications."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.metadata import version
from itertools import product
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from sqlalchemy import Connection, Engine, func, select

from rankwatch_service.access.budgets import LIMITS, Budgets, Whose
from rankwatch_service.alerts import AlertResult, waiting_count
from rankwatch_service.api.background.health_facts import partitions, processes
from rankwatch_service.clock import Clock
from rankwatch_service.incidents.lost_time import HOUR_NS
from rankwatch_service.notify.heartbeat import SETTING as HEARTBEAT
from rankwatch_service.notify.lease import LEASE_NS
from rankwatch_service.notify.outbox import NotificationCounts, undelivered
from rankwatch_service.policy.precision import Feedback
from rankwatch_service.series.rows import kept_bytes
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import (
    Command,
    DeadLetter,
    Incident,
    Job,
    Lease,
    Order,
    Outbox,
    Receiver,
    Setting,
    Silence,
)
from rankwatch_service.store.settings_rows import feedback_counts, policy_action_counts

SWITCHED_OFF: Final = "switched off"
"""Reason of a receiver that a person has disabled; every other one has answered that it is gone."""


def notification_metrics(connection: Connection, now_unix_ns: int) -> Iterator[Metric]:
    """All families."""
    depth, oldest = undelivered(connection)
    yield GaugeMetricFamily("rankwatch_outbox_depth", "Notifications not yet delivered", depth)
    age_s = 0.0 if oldest is None else max(now_unix_ns - oldest, 0) / 1e9
    yield GaugeMetricFamily(
        "rankwatch_outbox_oldest_age_seconds", "Age of the oldest notification not yet delivered", age_s
    )
    held = GaugeMetricFamily(
        "rankwatch_notifications_held", "Notifications of the last hour that the limit held back", labels=["kind"]
    )
    lately = select(Incident.kind, func.count()).join(Outbox, Outbox.incident_id == Incident.id)
    held_lately = (Outbox.state == "held", Outbox.created_unix_ns > now_unix_ns - HOUR_NS)
    for kind, count in connection.execute(lately.where(*held_lately).group_by(Incident.kind)):
        held.add_metric([kind], count)
    yield held
    yield from _by_receiver(connection)
    yield from _receivers(connection)
    active = select(func.count()).where(Silence.starts_unix_ns <= now_unix_ns, Silence.ends_unix_ns > now_unix_ns)
    yield GaugeMetricFamily("rankwatch_silences_active", "Silences in force", connection.scalar(active) or 0)
    yield from _notifier(connection, now_unix_ns)


def _by_receiver(connection: Connection) -> Iterator[Metric]:
    ended = CounterMetricFamily(
        "rankwatch_notifications", "Notifications delivered or given up", labels=["receiver", "state"]
    )
    tries = CounterMetricFamily(
        "rankwatch_notification_tries", "Tries to deliver a notification", labels=["receiver", "result"]
    )
    latency = HistogramMetricFamily(
        "rankwatch_notification_latency_seconds",
        "Time from the commit of a notification to its delivery",
        labels=["receiver"],
    )
    for receiver, counts in NotificationCounts(connection).by_receiver.items():
        ended.add_metric([receiver, "delivered"], counts.delivered)
        ended.add_metric([receiver, "failed"], counts.failed)
        for result in ("delivered", "refused", "unanswered"):
            tries.add_metric([receiver, result], getattr(counts, result))
        latency.add_metric([receiver], list(counts.buckets()), counts.latency_s)
    yield from (ended, tries, latency)


def _receivers(connection: Connection) -> Iterator[Metric]:
    counted = collections.Counter({"enabled": 0, "disabled": 0, "gone": 0})
    for enabled, reason in connection.execute(select(Receiver.enabled, Receiver.disabled_reason)):
        counted["enabled" if enabled else "disabled" if reason == SWITCHED_OFF else "gone"] += 1
    family = GaugeMetricFamily("rankwatch_receivers", "Receivers by state", labels=["state"])
    for state, count in counted.items():
        family.add_metric([state], count)
    yield family


def _notifier(connection: Connection, now_unix_ns: int) -> Iterator[Metric]:
    report = GaugeMetricFamily(
        "rankwatch_notifier_report_age_seconds", "Age of the notifier's newest report", labels=[]
    )
    expires_unix_ns = connection.scalar(select(Lease.expires_unix_ns).where(Lease.name == "notify"))
    if expires_unix_ns is not None:
        report.add_metric([], max(now_unix_ns - expires_unix_ns + LEASE_NS, 0) / 1e9)
    beat = GaugeMetricFamily(
        "rankwatch_heartbeat_last_success_timestamp_seconds", "When the heartbeat last reached its URL", labels=[]
    )
    stored = connection.scalar(select(Setting.value).where(Setting.name == HEARTBEAT)) or {}
    if stored.get("success_unix_ns"):
        beat.add_metric([], stored["success_unix_ns"] / 1e9)
    yield from (report, beat)


JOBS_MAX: Final = 200
"""Jobs with metrics of their own: those seen last."""


class Counters:
    """The counters of this process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.batches = Counter("rankwatch_ingest_batches", "Telemetry batches by result", ["result"], registry=registry)
        self.bytes = Counter("rankwatch_ingest_bytes", "Bytes of accepted telemetry", registry=registry)
        self.append_s = Histogram(
            "rankwatch_ingest_append_seconds",
            "Time from a valid batch to a durable one",
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5),
            registry=registry,
        )
        self.forged = Counter(
            "rankwatch_forged_messages",
            "Messages refused because they were not from their agent",
            ["what"],
            registry=registry,
        )
        self.agents_refused = Counter(
            "rankwatch_agents_refused",
            "Agents that did not enrol because their token admits no more",
            registry=registry,
        )
        self.budget_refused = Counter(
            "rankwatch_budget_refused",
            "What was refused to accounts of a kind, or taken from them for others",
            ["what", "whose"],
            registry=registry,
        )
        self._budget_held = Gauge(
            "rankwatch_budget_held", "What accounts of a kind hold", ["what", "whose"], registry=registry
        )
        self.alerts = Counter("rankwatch_alerts", "Alerts received, by result", ["result"], registry=registry)
        self.views = Counter("rankwatch_agent_views", "Views of agents that were stored", registry=registry)
        self.waited = Counter(
            "rankwatch_requests_waited",
            "Requests that had to wait for their turn, by the kind of account",
            ["whose"],
            registry=registry,
        )
        self.not_relayed = Counter(
            "rankwatch_requests_not_relayed",
            "Requests of people that the first api process answered, since the second did not run",
            registry=registry,
        )
        self.refused = Counter(
            "rankwatch_requests_refused",
            "Requests without a valid token (401), without the scope (403), too many (429)",
            ["status"],
            registry=registry,
        )
        self.connections_closed = Counter(
            "rankwatch_connections_closed",
            "Connections refused, closed by a limit, or failed in their TLS handshake",
            ["reason"],
            registry=registry,
        )
        self.series_trimmed = Counter(
            "rankwatch_series_trimmed", "Rows of series removed for age or size", ["tier"], registry=registry
        )
        self.driver_failures = Counter(
            "rankwatch_driver_failures", "Passes over the orders that failed and were retried", registry=registry
        )
        self.order_failures = Counter(
            "rankwatch_order_reads_failed", "Orders of a job that could not be read for its streams", registry=registry
        )

    def count_alerts(self, results: Mapping[AlertResult, int] | Mapping[str, int]) -> None:
        """Count alerts that were received, by `AlertResult`."""
        for result, count in results.items():
            self.alerts.labels(result).inc(count)

    def watch(self, budgets: Budgets) -> None:
        """Show what its accounts hold."""
        for limit, whose in product(LIMITS, Whose):
            self._budget_held.labels(limit.what, whose).set_function(partial(budgets.held, limit, whose))


class StoreCollector(Collector):
    """Reads gauges from the database at each scrape."""

    def __init__(self, engine: Engine, clock: Clock, log_in_store: bool) -> None:
        self._engine = engine
        self._clock = clock
        self._log_in_store = log_in_store

    def collect(self) -> Iterator[Metric]:
        """All families, from one consistent read."""
        yield InfoMetricFamily("rankwatch_build", "This service", {"version": version("rankwatch")})
        with read(self._engine) as connection:
            yield from self._families(connection)

    def _families(self, connection: Connection) -> Iterator[Metric]:
        incidents = GaugeMetricFamily("rankwatch_incidents_open", "Incidents not resolved", labels=["severity"])
        not_resolved = select(Incident.severity, func.count()).where(Incident.state != "resolved")
        for severity, count in connection.execute(not_resolved.group_by(Incident.severity)):
            incidents.add_metric([severity], count)
        yield incidents
        yield GaugeMetricFamily(
            "rankwatch_alerts_waiting", "Alerts that fire and that no incident has", waiting_count(connection)
        )
        feedback = GaugeMetricFamily(
            "rankwatch_incident_feedback", "Incidents of the last 30 days by feedback", labels=["kind", "answer"]
        )
        counted = connection.execute(feedback_counts(self._clock.unix_ns(), Incident.kind).order_by(Incident.kind))
        for kind, *counts in counted:
            for answer, count in zip((*Feedback, "unanswered"), counts, strict=True):
                feedback.add_metric([kind, answer], count)
        yield feedback
        commands = GaugeMetricFamily("rankwatch_commands", "Commands stored", labels=["action", "state"])
        for action, state, count in connection.execute(
            select(Command.action, Command.state, func.count()).group_by(Command.action, Command.state)
        ):
            commands.add_metric([action, state], count)
        yield commands
        acted = GaugeMetricFamily(
            "rankwatch_policy_actions", "Actions of the policy in the last 30 days by feedback", labels=["answer"]
        )
        for answer, count in connection.execute(policy_action_counts(self._clock.unix_ns())).mappings().one().items():
            acted.add_metric([answer], count)
        yield acted
        orders = connection.scalar(select(func.count()).where(Order.phase != "closed")) or 0
        yield GaugeMetricFamily("rankwatch_orders_open", "Orders being carried out", orders)
        letters = connection.scalar(select(func.max(DeadLetter.id))) or 0
        yield CounterMetricFamily("rankwatch_dead_letters", "Records that could not be used", value=letters)
        sizes = GaugeMetricFamily("rankwatch_series_bytes", "Series stored", labels=["tier"])
        for tier, size in zip(("raw", "rollup"), kept_bytes(connection), strict=True):
            sizes.add_metric([tier], size)
        yield sizes
        yield from notification_metrics(connection, self._clock.unix_ns())
        yield from self._stream(connection)
        seen = GaugeMetricFamily(
            "rankwatch_job_last_seen_timestamp_seconds", "Time of the last telemetry", labels=["job"]
        )
        step = GaugeMetricFamily("rankwatch_job_step", "Step that all ranks have reached", labels=["job"])
        newest = select(Job.name, Job.last_seen_unix_ns, Job.step).order_by(Job.last_seen_unix_ns.desc())
        for name, at_unix_ns, reached in connection.execute(newest.limit(JOBS_MAX)):
            seen.add_metric([name], at_unix_ns / 1e9)
            step.add_metric([name], reached)
        yield seen
        yield step

    def _stream(self, connection: Connection) -> Iterator[Metric]:
        now = self._clock.unix_ns()
        lag = GaugeMetricFamily("rankwatch_stream_lag_records", "Records not committed yet", labels=["partition"])
        epoch = GaugeMetricFamily(
            "rankwatch_stream_epoch", "Number of times a process took the partition over", labels=["partition"]
        )
        lost = GaugeMetricFamily(
            "rankwatch_stream_lost_records", "Records that the log removed before they were read", labels=["partition"]
        )
        tick = GaugeMetricFamily("rankwatch_stream_tick_age_seconds", "Age of the newest tick", labels=["partition"])
        report = GaugeMetricFamily(
            "rankwatch_stream_report_age_seconds", "Age of the owner's newest report", labels=["partition"]
        )
        for state in partitions(connection, self._log_in_store):
            name = [str(state.partition)]
            lag.add_metric(name, state.lag)
            epoch.add_metric(name, state.epoch)
            if state.owner:
                lost.add_metric(name, state.lost_records)
                report.add_metric(name, max(now - state.reported_unix_ns, 0) / 1e9)
            if state.tick_unix_ns:
                tick.add_metric(name, max(now - state.tick_unix_ns, 0) / 1e9)
        events = CounterMetricFamily(
            "rankwatch_stream_events", "Events of a stream process", labels=["process", "what"]
        )
        for process in processes(connection):
            for what, count in process.counters.items():
                events.add_metric([process.owner, what], count)
        yield from (lag, epoch, lost, tick, report, events)
