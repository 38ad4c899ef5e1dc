"""Whether anything is done about an incident by itself. Pure: the same facts give the same decision in a replay.

The first rule that matches decides: tell people (`notify`), propose an action (`suggest`), or carry it out (`act`).
Without a rule nothing is done but telling. Acting passes further gates, each of which turns it into a suggestion with
the reason: the hands-off switch, the job's capabilities, a confidence floor, a target to go back to, a cool-down and a
budget for each job, and a person's approval above a number of ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final

from rankwatch_detectors.base import Severity
from rankwatch_service.policy.checkpoint_ledger import SPEED, SURVIVES_HOSTS, SURVIVES_PROCESSES, CheckpointTier, Ledger
from rankwatch_service.policy.control_records import PolicyRuleRecord, PolicySet
from rankwatch_service.policy.rollback import Way, possible, way_back

HOUR_NS: Final = 3_600 * 10**9


class Mode(StrEnum):
    """How far a rule goes."""

    NOTIFY = "notify"
    SUGGEST = "suggest"
    ACT = "act"


class Action(StrEnum):
    """What can be asked of a job. Its ranks must say that they can (`RankInfo.can`)."""

    PAUSE = "pause"
    RESUME = "resume"
    CHECKPOINT = "checkpoint"
    ROLLBACK = "rollback"
    STOP = "stop"
    RELAUNCH = "relaunch"


POLICY_ACTIONS: Final = tuple(action for action in Action if action is not Action.RESUME)
"""What a rule may do. Only people resume what was paused."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of the policy. An empty kind, severity or job matches every one."""

    id: str
    mode: Mode
    kind: str = ""
    severity: str = ""
    job: str = ""
    confidence_min: float = 0.0
    action: str = ""
    rollback_mode: str = ""
    """For rollback: full, weights or relaunch; "" = in full, else by a relaunch."""

    def matches(self, incident: IncidentFacts) -> bool:
        """Whether this rule speaks about this incident."""
        return (
            self.kind in ("", incident.kind)
            and self.severity in ("", incident.severity)
            and self.job in ("", incident.job)
            and incident.confidence >= self.confidence_min
        )


@dataclass(frozen=True, slots=True)
class PolicyLimits:
    """Bounds on acting without a person. The defaults are those of an installation that nobody has tuned."""

    actions_per_hour: int = 4
    """For each job. Four rollbacks in an hour mean that rolling back does not help."""
    cool_down_s: float = 60.0
    """For each job: an action must have had time to show its effect."""
    confidence_min: float = 0.9
    approval_ranks: int = 64
    """Jobs with more ranks need a person's approval; every rank-hour that an action costs is somebody's."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Everything that people have decided about acting."""

    rules: tuple[Rule, ...] = ()
    limits: PolicyLimits = field(default_factory=PolicyLimits)
    hands_off: bool = False
    """Nothing is done by itself, whatever the rules say."""


@dataclass(frozen=True, slots=True)
class IncidentFacts:
    """What the policy looks at in an incident."""

    id: str
    job: str
    kind: str
    severity: str
    confidence: float
    onset_step: int | None
    ranks: tuple[int, ...]
    world_size: int
    hung: bool = False
    """Ranks cannot be expected to reach a step boundary."""
    processes_lost: bool = False
    hosts_lost: bool = False


@dataclass(frozen=True, slots=True)
class PastAction:
    """An action that this policy has taken on the job before."""

    action: str
    at_unix_ns: int


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do. `action` is empty unless mode is `suggest` or `act`; only `act` becomes a command."""

    mode: Mode
    reason: str
    rule: str = ""
    action: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    """For rollback: {"checkpoint": id}, with "mode" where the rule names one. For relaunch: {"culprits": [ranks]}."""
    approval_required: bool = False


def decide(
    incident: IncidentFacts,
    policy: Policy,
    history: Sequence[PastAction],
    capabilities: Collection[str],
    ledger: Ledger,
    now_unix_ns: int,
) -> Decision:
    """Decide about an incident that has just opened or become more severe.

    Args:
        incident: what has opened.
        policy: rules, limits and the hands-off switch as of this place in the log.
        history: actions that the policy took on this job, in any order.
        capabilities: what every rank of the attempt says it can do.
        ledger: the job's checkpoints; entries from the onset on must already be suspect.
        now_unix_ns: stream time, from the newest tick.
    """
    rule = next((rule for rule in policy.rules if rule.matches(incident)), None)
    if rule is None:
        return Decision(Mode.NOTIFY, "no rule asks for more")
    if rule.mode is Mode.NOTIFY:
        return Decision(Mode.NOTIFY, "the rule only tells", rule.id)
    params: dict[str, Any] = {}
    if rule.action == Action.ROLLBACK and (way := rollback_way(incident, ledger, capabilities, rule.rollback_mode)):
        params = {"checkpoint": way.entry.id} | ({"mode": rule.rollback_mode} if rule.rollback_mode else {})
    if rule.action == Action.RELAUNCH:
        params = {"culprits": list(incident.ranks)}
    suggestion = Decision(Mode.SUGGEST, "the rule only proposes", rule.id, rule.action, params)
    if rule.mode is Mode.SUGGEST:
        return suggestion
    if (obstacle := _obstacle(incident, rule, params, policy, history, capabilities, now_unix_ns)) is not None:
        return Decision(Mode.SUGGEST, obstacle, rule.id, rule.action, params)
    approval = incident.world_size > policy.limits.approval_ranks
    return Decision(Mode.ACT, f"rule {rule.id}", rule.id, rule.action, params, approval)


def rollback_way(incident: IncidentFacts, ledger: Ledger, capabilities: Collection[str], mode: str = "") -> Way | None:
    """The way back to before the onset, from the newest good checkpoint in a tier that survives what failed."""
    tiers: tuple[CheckpointTier, ...] = SPEED
    if incident.hosts_lost:
        tiers = SURVIVES_HOSTS
    elif incident.processes_lost or incident.hung:
        tiers = SURVIVES_PROCESSES
    # A save at the onset's step holds the state after that step on some loops and before it on others: not taken.
    return way_back(ledger.entries, capabilities, mode, survives=tiers, before_step=incident.onset_step)


def policy_record(policy: Policy) -> PolicySet:
    """The policy as a control record."""
    return PolicySet(
        policy.hands_off,
        tuple(
            PolicyRuleRecord(
                rule.id,
                rule.kind,
                rule.severity,
                rule.job,
                rule.confidence_min,
                rule.mode,
                rule.action,
                rule.rollback_mode,
            )
            for rule in policy.rules
        ),
        asdict(policy.limits),
    )


def policy_of(record: PolicySet) -> Policy:
    """The policy that a control record tells. Limits that a later version has added take their defaults."""
    rules = tuple(
        Rule(
            rule.id,
            Mode(rule.mode),
            rule.kind,
            rule.severity,
            rule.job,
            rule.confidence_min,
            rule.action,
            rule.rollback_mode,
        )
        for rule in record.rules
    )
    return Policy(rules, PolicyLimits(**record.limits), record.hands_off)


def _obstacle(
    incident: IncidentFacts,
    rule: Rule,
    params: Mapping[str, Any],
    policy: Policy,
    history: Sequence[PastAction],
    capabilities: Collection[str],
    now_unix_ns: int,
) -> str | None:
    """Why the policy may not act now; None if it may."""
    limits = policy.limits
    recent = [past for past in history if now_unix_ns - past.at_unix_ns < HOUR_NS]
    cool_down_ns = int(limits.cool_down_s * 1e9)
    if policy.hands_off:
        return "hands off is switched on"
    if incident.hung and incident.severity != Severity.CRITICAL:
        return "a hang that is not critical may yet be a step that ends"
    able = rule.action in capabilities
    if rule.action == Action.ROLLBACK:
        able = bool(capabilities) and possible(rule.rollback_mode, capabilities)
    if not able:
        return f"the job cannot be told to {rule.action}"
    if incident.confidence < limits.confidence_min:
        return f"confidence {incident.confidence:.2f} is below {limits.confidence_min:.2f}"
    if rule.action == Action.ROLLBACK and "checkpoint" not in params:
        return "there is no good checkpoint from before the onset"
    if any(now_unix_ns - past.at_unix_ns < cool_down_ns for past in recent):
        return f"an action was taken less than {limits.cool_down_s:g} s ago"
    if len(recent) >= limits.actions_per_hour:
        return f"the budget of {limits.actions_per_hour} actions an hour is spent"
    return None
