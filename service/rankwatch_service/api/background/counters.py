"""The metrics of an api process: its own counters, and gauges of the state that all processes share.

Labels are bounded: reasons and states are closed lists, jobs are capped. There are no metrics per rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import Connection, Engine, func, select

from rankwatch_service.alerts import waiting_count
from rankwatch_service.api.background.health_facts import partitions, processes
from rankwatch_service.api.background.notification_metrics import notification_metrics
from rankwatch_service.clock import Clock
from rankwatch_service.policy.precision import Feedback
from rankwatch_service.series.rows import kept_bytes
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import (
    Command,
    DeadLetter,
    Incident,
    Job,
    Order,
)
from rankwatch_service.store.settings_rows import feedback_counts, policy_action_counts

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
        self.alerts = Counter("rankwatch_alerts", "Alerts received, by result", ["result"], registry=registry)
        self.views = Counter("rankwatch_agent_views", "Views of agents that were stored", registry=registry)
        self.streams_refused = Counter(
            "rankwatch_streams_refused", "Event streams refused because too many are open", registry=registry
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
            "rankwatch_series_trimmed",
            "Rows of series removed for age or size",
            ["tier"],
            registry=registry,
        )
        self.driver_failures = Counter(
            "rankwatch_driver_failures", "Passes over the orders that failed and were retried", registry=registry
        )


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
