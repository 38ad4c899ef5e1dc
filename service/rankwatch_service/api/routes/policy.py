"""The policy: what is done about incidents automatically. It is always replaced as a whole, so that its rules agree."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Response
from pydantic import BaseModel, ConfigDict, Field, StrictBool, model_validator
from starlette.responses import JSONResponse

from rankwatch_detectors.base import Kind, Severity
from rankwatch_service.access.grants import Scope
from rankwatch_service.access.identities import Identity
from rankwatch_service.api.dependencies import Ctx, PreconditionDep, Require
from rankwatch_service.api.http.problem import ProblemError
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.api.routes.commands import REASON_CHARS_MAX, Command
from rankwatch_service.names import ALL_JOBS, short
from rankwatch_service.orders import commands
from rankwatch_service.orders.approvals import request_change, set_policy, with_approvals
from rankwatch_service.policy import policy
from rankwatch_service.policy.actions import POLICY_ACTIONS, SET_APPROVALS, Action
from rankwatch_service.policy.notification import service_links
from rankwatch_service.policy.rollback import RollbackMode
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.rows import command_row
from rankwatch_service.store.settings_rows import read_policy

router = APIRouter(prefix="/policy", tags=["policy"])

RULES_MAX: Final = 200
WEAKENED: Final = (
    "this policy asks for fewer approvals by a second person, which needs one: change two_people and approval_ranks by "
    "PUT policy/approvals (rankwatch policy approvals)"
)
Reader = Annotated[Identity, Depends(Require(Scope.READ, every_job=True))]
Operator = Annotated[Identity, Depends(Require(Scope.OPERATE, every_job=True))]
Admin = Annotated[Identity, Depends(Require(Scope.ADMIN, every_job=True))]
Nothing = Annotated[str, Field(max_length=0)]


class Rule(BaseModel):
    """One rule; the first that matches decides. An empty kind, severity, job or project matches all."""

    model_config = ConfigDict(extra="forbid")
    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
    kind: Kind | Nothing = ""
    severity: Severity | Nothing = ""
    job: Annotated[str, Field(max_length=200)] = ""
    project: Annotated[str, Field(max_length=200)] = ""
    confidence_min: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.0
    mode: policy.Mode
    action: Action | Nothing = ""
    rollback_mode: RollbackMode | Nothing = ""
    """For rollback; empty: full if the job supports it, else relaunch."""

    @model_validator(mode="after")
    def _has_its_action(self) -> Rule:
        if self.mode is policy.Mode.NOTIFY and self.action:
            raise ValueError("a rule with mode notify has no action")
        if self.mode is not policy.Mode.NOTIFY and self.action not in POLICY_ACTIONS:
            raise ValueError(f"action must be one of {', '.join(POLICY_ACTIONS)}")
        if self.rollback_mode and self.action != Action.ROLLBACK:
            raise ValueError("only a rule with action rollback has a rollback_mode")
        return self


class Limits(BaseModel):
    """Limits on automatic actions."""

    model_config = ConfigDict(extra="forbid")
    actions_per_hour: Annotated[int, Field(strict=True, ge=0, le=1_000)] = policy.PolicyLimits().actions_per_hour
    cool_down_s: Annotated[float, Field(strict=True, ge=0, le=86_400)] = policy.PolicyLimits().cool_down_s
    confidence_min: Annotated[float, Field(strict=True, ge=0, le=1)] = policy.PolicyLimits().confidence_min
    precision_min: Annotated[float, Field(strict=True, ge=0, le=1)] = policy.PolicyLimits().precision_min
    """A rule acts on a kind of incident only if its precision is known and at least this; 0: without any feedback."""
    approval_ranks: Annotated[int, Field(strict=True, ge=0, le=2**31)] = policy.PolicyLimits().approval_ranks


class Policy(BaseModel):
    """The whole policy."""

    model_config = ConfigDict(extra="forbid")
    hands_off: StrictBool = False
    two_people: StrictBool = False
    """A person who requests rollback, relaunch or stop of a job with more than `approval_ranks` ranks needs the
    approval of another person."""
    unsigned_until_unix_ns: Annotated[int | None, Field(strict=True, ge=0, lt=2**63)] = None
    """When unsigned telemetry, as of agents that cannot enrol, is refused in all jobs; null: there is no date."""
    limits: Limits = Limits()
    rules: Annotated[list[Rule], Field(max_length=RULES_MAX)] = []

    @model_validator(mode="before")
    @classmethod
    def _as_shown(cls, content: Any) -> Any:
        """The policy as it was shown is a policy: its time in text is left out, the one in nanoseconds counts."""
        if not isinstance(content, dict):
            return content
        return {name: value for name, value in content.items() if name != "unsigned_until_at"}

    def policy(self) -> policy.Policy:
        """The policy that it describes.

        Raises:
            ProblemError: two rules have the same id.
        """
        ids = [rule.id for rule in self.rules]
        if len(set(ids)) != len(ids):
            raise ProblemError(422, "two rules have the same id")
        rules = tuple(
            policy.Rule(
                rule.id,
                rule.mode,
                str(rule.kind),
                str(rule.severity),
                rule.job,
                rule.confidence_min,
                str(rule.action),
                str(rule.rollback_mode),
                rule.project,
            )
            for rule in self.rules
        )
        switches = (self.hands_off, self.two_people, self.unsigned_until_unix_ns)
        return policy.Policy(rules, policy.PolicyLimits(**self.limits.model_dump()), *switches)


class PolicyInForce(Policy, ApiReply):
    """The policy in force. It can be sent back with changes; `unsigned_until_at` is not read."""


class Approvals(BaseModel):
    """Which commands need the approval of a second person."""

    model_config = ConfigDict(extra="forbid")
    two_people: StrictBool
    approval_ranks: Annotated[int | None, Field(strict=True, ge=0, le=2**31)] = None
    """As in the limits of the policy; null: as it is."""
    reason: Annotated[str, Field(max_length=REASON_CHARS_MAX)] = ""


class HandsOff(BaseModel):
    """The switch that stops all automatic actions."""

    model_config = ConfigDict(extra="forbid")
    hands_off: StrictBool


@router.get("")
def show_policy(context: Ctx, precondition: PreconditionDep, _identity: Reader) -> PolicyInForce:
    """The policy in force."""
    with read(context.engine) as connection:
        return precondition.show(_shown(read_policy(connection)))


@router.put("")
def replace_policy(body: Policy, context: Ctx, precondition: PreconditionDep, identity: Admin) -> PolicyInForce:
    """Replace the policy; with `If-Match`, only if it is still the one that was read.

    One that asks for fewer approvals by a second person is refused (409): see `PUT policy/approvals`.
    """
    wanted = body.policy()
    with write(context.engine) as connection:
        before = read_policy(connection)
        precondition.check(_shown(before))
        if before.is_weakened_by(wanted):
            raise ProblemError(409, WEAKENED)
        set_policy(connection, context.controls, wanted, identity.actor, "policy.set", context.clock.unix_ns())
    return precondition.show(_shown(wanted))


@router.put("/approvals", response_model=PolicyInForce, responses={202: {"model": Command}})
def set_approvals(body: Approvals, context: Ctx, identity: Admin) -> PolicyInForce | Response:
    """Set which commands need the approval of a second person.

    Fewer than before need one themselves: the change is a command (202) that is carried out once another person has
    approved it. All receivers are notified of it. While one waits, another is refused (409).
    """
    now = context.clock.unix_ns()
    with write(context.engine) as connection:
        before = read_policy(connection)
        wanted = with_approvals(before, body.two_people, body.approval_ranks)
        if not before.is_weakened_by(wanted):
            set_policy(connection, context.controls, wanted, identity.actor, "policy.approvals", now)
            return _shown(wanted)
        if (other := commands.waiting(connection, ALL_JOBS, SET_APPROVALS, now)) is not None:
            raise ProblemError(409, f"another change of approvals already waits for approval: {short(other)}")
        request = request_change(
            connection,
            SET_APPROVALS,
            body.model_dump(exclude={"reason"}, exclude_none=True),
            service_links(context.settings.public_url),
            now,
            requested_by=identity.actor,
            requester=identity.person,
            reason=body.reason,
        )
    return JSONResponse(Command(**command_row(request)).model_dump(mode="json"), 202)


@router.put("/hands-off")
def set_hands_off(body: HandsOff, context: Ctx, identity: Operator) -> PolicyInForce:
    """Set the switch that stops all automatic actions. To lift it, scope command is required."""
    commander = identity.within(Scope.COMMAND)
    if not body.hands_off and not (commander and commander.jobs.every):
        raise ProblemError(403, f"a token with scope {Scope.COMMAND} is required to lift hands-off")
    with write(context.engine) as connection:
        wanted = replace(read_policy(connection), hands_off=body.hands_off)
        set_policy(connection, context.controls, wanted, identity.actor, "policy.hands_off", context.clock.unix_ns())
    return _shown(wanted)


def _shown(stored: policy.Policy) -> PolicyInForce:
    return PolicyInForce.model_validate(
        {
            "hands_off": stored.hands_off,
            "two_people": stored.two_people,
            "unsigned_until_unix_ns": stored.unsigned_until_unix_ns,
            "limits": asdict(stored.limits),
            "rules": [asdict(rule) for rule in stored.rules],
        }
    )
