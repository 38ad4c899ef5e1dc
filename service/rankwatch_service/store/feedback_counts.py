"""Counts incidents by what people say of them, and the policy's actions by what people say of their incidents.

An incident counts once, by what most people say of it. Where as many say one as the other, useful goes before noise and
noise before duplicate.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Connection, Label, Select, Subquery, and_, case, func, select
from sqlalchemy.orm import InstrumentedAttribute

from rankwatch_service.policy.precision import WINDOW_DAYS, Feedback, Precision
from rankwatch_service.store.models import Command, Incident, IncidentFeedback

WINDOW_NS: Final = WINDOW_DAYS * 86_400 * 10**9


def feedback_counts(now_unix_ns: int, *by: InstrumentedAttribute[Any]) -> Select[Any]:
    """Selects these columns of incidents, and of each combination how many were useful, noise, duplicate, unanswered.

    Incidents detected within the last `WINDOW_DAYS` count.
    """
    answers = _answers()
    counts: Any = select(*by, *_counts(answers)).outerjoin(answers, answers.c.incident_id == Incident.id)
    query: Select[Any] = counts.where(Incident.detected_unix_ns >= now_unix_ns - WINDOW_NS).group_by(*by)
    return query


def precision_by_kind(connection: Connection, now_unix_ns: int) -> dict[str, Precision]:
    """The precision of each kind that has incidents."""
    rows = connection.execute(feedback_counts(now_unix_ns, Incident.kind))
    return {row.kind: Precision(row.useful, row.noise) for row in rows}


def policy_action_counts(now_unix_ns: int) -> Select[Any]:
    """Selects how many actions that the policy carried out were about useful incidents, noise, and so on; one row.

    Actions requested within the last `WINDOW_DAYS` count.
    """
    answers = _answers()
    counts: Any = select(*_counts(answers)).select_from(Command)
    query: Select[Any] = counts.outerjoin(answers, answers.c.incident_id == Command.incident_id).where(
        Command.requested_by == "policy",
        Command.state == "applied",
        Command.requested_unix_ns >= now_unix_ns - WINDOW_NS,
    )
    return query


def _counts(answers: Subquery) -> list[Label[int]]:
    """Of what is joined with answers: how many are useful, noise, duplicate, unanswered."""
    counts = [func.count(case((answers.c.answer == str(answer), 1))).label(answer) for answer in Feedback]
    return [*counts, func.count(case((answers.c.answer.is_(None), 1))).label("unanswered")]


def _answers() -> Subquery:
    """By `incident_id`, the `answer` of each incident that has one."""
    said = {answer: func.sum(case((IncidentFeedback.answer == str(answer), 1), else_=0)) for answer in Feedback}
    useful, noise, duplicate = said.values()
    answer = case(
        (and_(useful >= noise, useful >= duplicate), str(Feedback.USEFUL)),
        (noise >= duplicate, str(Feedback.NOISE)),
        else_=str(Feedback.DUPLICATE),
    )
    query = select(IncidentFeedback.incident_id, answer.label("answer"))
    return query.group_by(IncidentFeedback.incident_id).subquery()
