"""Metrics of notifications: what became of them by receiver, silences, the notifier and its heartbeat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from sqlalchemy import Connection, func, select

from rankwatch_service.notify.counts import NotificationCounts
from rankwatch_service.notify.heartbeat import SETTING as HEARTBEAT
from rankwatch_service.notify.lease import LEASE_NS
from rankwatch_service.store.models import Lease, Outbox, Receiver, Setting, Silence

SWITCHED_OFF: Final = "switched off"
"""Reason of a receiver that a person has disabled; every other one has answered that it is gone."""


def notification_metrics(connection: Connection, now_unix_ns: int) -> Iterator[Metric]:
    """All families."""
    waiting = select(func.count(), func.min(Outbox.created_unix_ns)).where(Outbox.state == "waiting")
    depth, oldest = connection.execute(waiting).one()
    yield GaugeMetricFamily("rankwatch_outbox_depth", "Notifications not yet delivered", depth)
    age_s = 0.0 if oldest is None else max(now_unix_ns - oldest, 0) / 1e9
    yield GaugeMetricFamily(
        "rankwatch_outbox_oldest_age_seconds", "Age of the oldest notification not yet delivered", age_s
    )
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
    counted = Counter({"enabled": 0, "disabled": 0, "gone": 0})
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
