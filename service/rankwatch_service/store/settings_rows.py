"""What people set, in the store: the policy, rules on metrics, and feedback on incidents.

An incident counts once, by the majority of its feedback. In a tie, useful goes before noise and
noise before duplicate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from sqlalchemy import Connection, Label, Select, Subquery, and_, case, delete, func, insert, select
from sqlalchemy.orm import InstrumentedAttribute

from rankwatch_detectors.metric_rule import MetricRule
from rankwatch_service.policy.policy import Policy, PolicyLimits
from rankwatch_service.policy.precision import WINDOW_DAYS, Feedback, Precision
from rankwatch_service.store.models import Command, Incident, IncidentFeedback, MetricRuleRow, PolicyRule, Setting
from rankwatch_service.store.rows import policy_rule_of, policy_rule_row

SETTING: Final = "policy"


def read_policy(connection: Connection) -> Policy:
    """The stored policy; the default one if none is stored."""
    rows = connection.execute(select(PolicyRule.__table__).order_by(PolicyRule.position, PolicyRule.id))
    rules = tuple(policy_rule_of(row) for row in rows.mappings())
    stored = connection.scalar(select(Setting.value).where(Setting.name == SETTING))
    if stored is None:
        return Policy(rules)
    switches = (stored["hands_off"], stored["two_people"], stored["unsigned_until_unix_ns"])
    return Policy(rules, PolicyLimits(**stored["limits"]), *switches)


def write_policy(connection: Connection, policy: Policy, now_unix_ns: int) -> None:
    """Replace the stored policy, in a `write`."""
    connection.execute(delete(PolicyRule))
    rows = [policy_rule_row(rule, position) for position, rule in enumerate(policy.rules)]
    if rows:
        connection.execute(insert(PolicyRule), rows)
    connection.execute(delete(Setting).where(Setting.name == SETTING))
    value = {
        "hands_off": policy.hands_off,
        "two_people": policy.two_people,
        "unsigned_until_unix_ns": policy.unsigned_until_unix_ns,
        "limits": asdict(policy.limits),
    }
    connection.execute(insert(Setting).values(name=SETTING, value=value, updated_unix_ns=now_unix_ns))


@dataclass(frozen=True, slots=True)
class StoredRule:
    """A rule, and who changed it last."""

    rule: MetricRule
    updated_by: str
    updated_unix_ns: int


def read_rules(connection: Connection) -> list[StoredRule]:
    """All rules, in their order."""
    rows = connection.execute(select(MetricRuleRow.__table__).order_by(MetricRuleRow.position, MetricRuleRow.name))
    return [StoredRule(MetricRule.of(row.rule), row.updated_by, row.updated_unix_ns) for row in rows]


def write_rules(connection: Connection, wanted: Sequence[MetricRule], actor: str, now_unix_ns: int) -> list[StoredRule]:
    """Replace all rules, in a `write`; one that stays as it is keeps who changed it last. Returns all of them."""
    before = {stored.rule.name: stored for stored in read_rules(connection)}
    stored = [
        known
        if (known := before.get(rule.name)) is not None and known.rule == rule
        else StoredRule(rule, actor, now_unix_ns)
        for rule in wanted
    ]
    connection.execute(delete(MetricRuleRow))
    rows = [
        {
            "name": one.rule.name,
            "position": position,
            "rule": one.rule.fields(),
            "updated_by": one.updated_by,
            "updated_unix_ns": one.updated_unix_ns,
        }
        for position, one in enumerate(stored)
    ]
    if rows:
        connection.execute(insert(MetricRuleRow), rows)
    return stored


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
