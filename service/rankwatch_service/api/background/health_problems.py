"""What is wrong with rankwatch itself, as sentences for people. Pure: facts in, problems out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from enum import StrEnum
from typing import Final

from rankwatch_detectors.base import Severity
from rankwatch_service.api.background.health_facts import SILENT_NS, HealthFacts, ReceiverState
from rankwatch_service.api.reply import ApiReply

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


def judge(facts: HealthFacts, *, driver_alive: bool) -> list[HealthProblem]:
    """All problems, the critical ones first.

    Args:
        facts: what is known.
        driver_alive: whether this api process carries out orders.
    """
    found = [*_stream(facts), *_detectors(facts), *_notifier(facts), *_receivers(facts), *_agents(facts)]
    if facts.database.free_bytes is not None and facts.database.free_bytes < FREE_BYTES_MIN:
        megabytes = facts.database.free_bytes // 1_000_000
        text = f"Only {megabytes} MB are free on the disk of the database."
        found.append(_problem(HealthArea.DATABASE, Severity.CRITICAL, text, "Free space, or lower what is kept."))
    if not driver_alive:
        text = "This api process carries out no commands: its driver does not run."
        found.append(_problem(HealthArea.API, Severity.CRITICAL, text, "Restart the api."))
    return sorted(found, key=lambda problem: problem.severity is not Severity.CRITICAL)


def _stream(facts: HealthFacts) -> Iterator[HealthProblem]:
    newest = max((process.reported_unix_ns for process in facts.stream.processes), default=None)
    if newest is None or facts.at_unix_ns - newest > SILENT_NS:
        since = "has ever reported" if newest is None else f"has reported for {_age(facts.at_unix_ns - newest)}"
        text = f"No stream process {since}: telemetry is stored and not judged, so no incident opens."
        yield _problem(
            HealthArea.STREAM, Severity.CRITICAL, text, "Start `rankwatch stream`; what waits is judged then."
        )
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


def _detectors(facts: HealthFacts) -> Iterator[HealthProblem]:
    for one in facts.detectors_off:
        text = f"The detector {one.detector} is switched off in {one.job}: it failed {one.failures} times."
        advice = "The log line detector_failed of stream says why; a new launch of the job switches it on again."
        yield _problem(HealthArea.DETECTORS, Severity.WARNING, text, advice)


def _notifier(facts: HealthFacts) -> Iterator[HealthProblem]:
    reported = facts.notifier.reported_unix_ns
    if reported is None or facts.at_unix_ns - reported > SILENT_NS:
        since = "has ever run" if reported is None else f"has run for {_age(facts.at_unix_ns - reported)}"
        text = f"No notifier {since}: nobody is notified of incidents."
        yield _problem(HealthArea.NOTIFIER, Severity.CRITICAL, text, "Start `rankwatch notify`.")


def _receivers(facts: HealthFacts) -> Iterator[HealthProblem]:
    for one in facts.receivers:
        if not one.enabled and one.disabled_reason != "switched off":
            text = f"The receiver {one.name} gets nothing any more: {one.disabled_reason or 'it is disabled'}."
            advice = "Correct its URL, which switches it on again, or remove it."
            yield _problem(HealthArea.RECEIVERS, Severity.WARNING, text, advice)
        elif text := _undelivered(one, facts.at_unix_ns):
            advice = "Test it on the page of notifications; waiting messages are tried again by themselves."
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


def _agents(facts: HealthFacts) -> Iterator[HealthProblem]:
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
    advice = "Look whether the agent and the network of these hosts work; training itself goes on."
    yield _problem(HealthArea.AGENTS, Severity.WARNING, text, advice)


def _problem(area: HealthArea, severity: Severity, text: str, advice: str) -> HealthProblem:
    return HealthProblem(area=area, severity=severity, text=text, advice=advice)


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _age(ns: int) -> str:
    """A duration as people say it.

    >>> [_age(42 * 10**9), _age(7_500 * 10**9)]
    ['42 s', '2 h 5 min']
    """
    seconds = ns // 10**9
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3_600:
        return f"{seconds // 60} min"
    return f"{seconds // 3_600} h {seconds % 3_600 // 60} min"
