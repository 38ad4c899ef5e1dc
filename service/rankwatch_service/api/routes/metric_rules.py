"""Rules on metrics that jobs log. A change holds from its record in the control log on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field

from rankwatch_detectors.metric_rule import MetricRule
from rankwatch_service.access.grants import Scope
from rankwatch_service.access.identities import Identity
from rankwatch_service.api.dependencies import Context, Ctx, Precondition, PreconditionDep, Require
from rankwatch_service.api.http.problem import ProblemError, not_found
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.log.base import Entry
from rankwatch_service.names import ALL_JOBS
from rankwatch_service.policy.control_records import RulesSet, encode_control
from rankwatch_service.store import audit_trail
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.settings_rows import StoredRule, read_rules, write_rules
from rankwatch_service.written_rule import RULES_MAX, WrittenRule, check_together

router = APIRouter(prefix="/rules", tags=["rules"])

Reader = Annotated[Identity, Depends(Require(Scope.READ, every_job=True))]
Operator = Annotated[Identity, Depends(Require(Scope.OPERATE, every_job=True))]


class ShownRule(WrittenRule, ApiReply):
    """A rule, and who changed it last."""

    model_config = ConfigDict(extra="ignore")
    updated_by: str
    updated_unix_ns: int


class ShownRules(ApiReply):
    """All rules, in the order in which they are judged."""

    items: list[ShownRule]


class NewRules(BaseModel):
    """All rules: those that are not among them are deleted."""

    model_config = ConfigDict(extra="forbid")
    rules: Annotated[list[WrittenRule], Field(max_length=RULES_MAX)]


@router.get("")
def list_rules(context: Ctx, precondition: PreconditionDep, _identity: Reader) -> ShownRules:
    """All rules on metrics."""
    with read(context.engine) as connection:
        return precondition.show(_shown(read_rules(connection)))


@router.put("")
def set_rules(body: NewRules, context: Ctx, precondition: PreconditionDep, identity: Operator) -> ShownRules:
    """Replace all rules on metrics; with `If-Match`, only if they are still those that were read."""
    return _change(
        context, precondition, identity, "rules.set", "rules", lambda _: [rule.rule() for rule in body.rules]
    )


@router.put("/{name}")
def set_rule(
    name: str, body: WrittenRule, context: Ctx, precondition: PreconditionDep, identity: Operator
) -> ShownRules:
    """Add one rule, or replace the one of that name. `If-Match` is about all rules."""
    if body.name != name:
        raise ProblemError(422, f"the rule has the name {body.name!r}, not {name!r}")

    def changed(before: Sequence[MetricRule]) -> list[MetricRule]:
        known = any(rule.name == name for rule in before)
        fresh = body.rule()
        return [fresh if rule.name == name else rule for rule in before] + ([] if known else [fresh])

    return _change(context, precondition, identity, "rule.set", name, changed)


@router.delete("/{name}", status_code=204)
def delete_rule(name: str, context: Ctx, precondition: PreconditionDep, identity: Operator) -> None:
    """Delete a rule. Incidents that it opened end. `If-Match` is about all rules."""

    def changed(before: Sequence[MetricRule]) -> list[MetricRule]:
        kept = [rule for rule in before if rule.name != name]
        if len(kept) == len(before):
            raise not_found("rule", name)
        return kept

    _change(context, precondition, identity, "rule.delete", name, changed)


def _change(
    context: Context,
    precondition: Precondition,
    identity: Identity,
    what: str,
    target: str,
    changed: Callable[[Sequence[MetricRule]], list[MetricRule]],
) -> ShownRules:
    """Store changed rules, send them to stream, and write the audit trail."""
    with write(context.engine) as connection:
        before = read_rules(connection)
        precondition.check(_shown(before))
        wanted = changed([stored.rule for stored in before])
        try:
            check_together([WrittenRule.of(rule) for rule in wanted])
        except ValueError as error:
            raise ProblemError(422, str(error)) from error
        now, fields = context.clock.unix_ns(), {"rules": [rule.fields() for rule in wanted]}
        stored = write_rules(connection, wanted, identity.actor, now)
        context.controls.append_in(connection, [Entry(ALL_JOBS, encode_control(RulesSet(tuple(wanted))))])
        audit_trail.append(connection, now, identity.actor, what, target, "ok", fields=fields)
    return precondition.show(_shown(stored))


def _shown(stored: Sequence[StoredRule]) -> ShownRules:
    return ShownRules(
        items=[
            ShownRule(
                **WrittenRule.of(one.rule).model_dump(), updated_by=one.updated_by, updated_unix_ns=one.updated_unix_ns
            )
            for one in stored
        ]
    )
