"""The outcome of a run over a recorded input, and the check that faults did not change it.

The reference is always the run of the same input without the fault. What must be equal is what people and other systems
act upon: the incidents (who, where, since when), the commands, and the distinct ids of the messages to receivers.
Where records come at other times than in the reference, as in any live run with outages, an incident may be opened by
its consequence and then updated by its cause: then `messages` may differ, but not `turns`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from sqlalchemy import Engine, select, true

from rankwatch_detectors.catalogue import CatalogueConfig, detectors
from rankwatch_service.notify.pipeline import ReceiverRoute
from rankwatch_service.replay.layout import parse_mapping
from rankwatch_service.replay.run import ReplayResult, replay
from rankwatch_service.replay.sources import open_source
from rankwatch_service.store.engine import open_engine, read
from rankwatch_service.store.models import Command, DeadLetter, Incident, IncidentTransition, Outbox
from tests.support.recordings.recording import Timed, end_of, record_log, stream_over
from tests.support.service.webhook_receiver import route_all, subscribe


@dataclass(frozen=True)
class Outcome:
    """Compare with `==`; a failing assertion shows the difference of the sets."""

    incidents: frozenset[tuple]
    """(job, attempt, kind, scope, episode, ranks, onset step)."""
    commands: frozenset[tuple]
    """(job, attempt, action, kind and scope of the incident)."""
    messages: frozenset[str]
    """Ids of the messages to receivers, which are the webhooks' ids."""
    turns: frozenset[tuple]
    """(job, attempt, kind, scope, episode, "opened" or "resolved")."""

    def kinds(self, job: str) -> set[str]:
        """Kinds of a job's incidents."""
        return {row[2] for row in self.incidents if row[0] == job}

    def of(self, job: str) -> set[tuple]:
        """A job's incidents as (kind, scope, ranks, onset step)."""
        return {(row[2], row[3], *row[5:]) for row in self.incidents if row[0] == job}


def with_body(timed: Timed, body: bytes, time_s: float | None = None) -> Timed:
    """The same record with another value, and perhaps at another time."""
    return replace(timed, time_s=timed.time_s if time_s is None else time_s, entry=replace(timed.entry, value=body))


def outcome_of(engine: Engine, receiver: str | None = None) -> Outcome:
    """What the database says; of the messages only those to one receiver, if one is named."""
    theirs = true() if receiver is None else Outbox.receiver == receiver
    with read(engine) as connection:
        incidents = connection.execute(
            select(
                Incident.job,
                Incident.attempt,
                Incident.kind,
                Incident.scope,
                Incident.episode,
                Incident.ranks,
                Incident.onset_step,
            )
        )
        commands = connection.execute(
            select(Command.job, Command.attempt, Command.action, Incident.kind, Incident.scope).join(
                Incident, Incident.id == Command.incident_id
            )
        )
        messages = connection.scalars(select(Outbox.id).where(theirs))
        turns = connection.execute(
            select(
                Incident.job, Incident.attempt, Incident.kind, Incident.scope, Incident.episode, IncidentTransition.what
            )
            .join(IncidentTransition, IncidentTransition.incident_id == Incident.id)
            .where(IncidentTransition.what.in_(("opened", "resolved")))
        )
        return Outcome(
            frozenset((*row[:5], tuple(row.ranks), row.onset_step) for row in incidents),
            frozenset(tuple(row) for row in commands),
            frozenset(messages),
            frozenset(tuple(row) for row in turns),
        )


def dead_letters(engine: Engine) -> list[tuple[str, str]]:
    """(reason, detail) of every record that was refused, in the order of refusal."""
    with read(engine) as connection:
        query = select(DeadLetter.reason, DeadLetter.detail).order_by(DeadLetter.id)
        return [(row.reason, row.detail) for row in connection.execute(query)]


@dataclass
class Lived:
    """A database after a whole recording went through a stream of this process."""

    engine: Engine
    outcome: Outcome

    @property
    def refused(self) -> list[tuple[str, str]]:
        return dead_letters(self.engine)


def live_through(folder: Path, entries: list[Timed], make_detectors=detectors) -> Lived:
    """Record the entries in a new SQLite database in `folder` and let a stream and a router process all of it."""
    folder.mkdir(parents=True, exist_ok=True)
    engine = open_engine(f"sqlite:///{record_log(folder, entries)}")
    subscribe(engine, ReceiverRoute("oncall"))
    clock = end_of(entries)
    stream = stream_over(engine, clock, make_detectors)
    stream.start()
    while stream.step():
        pass
    route_all(engine, clock.now_ns)
    return Lived(engine, outcome_of(engine))


def replayed(*paths: Path, mapping: str = "", until_step: int | None = None) -> ReplayResult:
    """The outcome with the usual settings; raises what is wrong with a file."""
    outcome = replay(
        [open_source(path) for path in paths],
        parse_mapping(mapping),
        [CatalogueConfig()],
        job="gpt",
        until_step=until_step,
        progress=lambda done, steps: None,
    )
    if outcome.broken is not None:
        raise outcome.broken
    return outcome
