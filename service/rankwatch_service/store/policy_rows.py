"""The policy as it is stored: rules in their table, limits and switches as one setting."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

from sqlalchemy import Connection, delete, insert, select

from rankwatch_service.policy.policy import Policy, PolicyLimits
from rankwatch_service.store.models import PolicyRule, Setting
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
