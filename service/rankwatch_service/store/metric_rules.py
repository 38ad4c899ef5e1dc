"""The stored rules on metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, delete, insert, select

from rankwatch_detectors.metric_rule import MetricRule
from rankwatch_service.store.models import MetricRuleRow


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
