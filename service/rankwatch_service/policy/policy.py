"""Decides what is done about an incident without a person. Pure: a replay makes the same decisions of the same facts.

The first rule that matches decides: notify people (`notify`), propose an action (`suggest`), or carry it out (`act`).
If no rule matches, people are notified. An action that fails one of these checks becomes a suggestion with the reason:
the hands-off switch, the job's capabilities, the minimum confidence, a checkpoint to go back to, for each job a
cool-down and a budget, and the precision of the kind of incident. For a job with many ranks, a person must approve the
command; what a person requests for such a job may need the approval of a second one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final

from rankwatch_detectors.base import Kind, Severity
from rankwatch_service.incidents.kinds import KINDS, LIKELY
from rankwatch_service.incidents.lost_time import HOUR_NS
from rankwatch_service.policy.actions import COSTLY, Action
from rankwatch_service.policy.checkpoint_ledger import SPEED, SURVIVES_HOSTS, SURVIVES_PROCESSES, CheckpointTier, Ledger
from rankwatch_service.policy.control_records import PolicyRuleRecord, PolicySet
from rankwatch_service.policy.precision import JUDGED_MIN, UNREVIEWED, Precision
from rankwatch_service.policy.rollback import Way, possible, resumed_from, way_back, why_from_scratch


class Mode(StrEnum):
    """What a rule does about an incident."""

    NOTIFY = "notify"
    SUGGEST = "suggest"
    ACT = "act"


ONLY_SUGGESTS: Final = "the rule only suggests"
NOT_CRITICAL_YET: Final = "the hang is not critical yet: the step may still finish"
"""Reasons why a rule does not act; the second passes by itself, and is the last that is looked for."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of the policy. An empty kind, severity, job or project matches all."""

    id: str
    mode: Mode
    kind: str = ""
    severity: str = ""
    job: str = ""
    confidence_min: float = 0.0
    action: str = ""
    rollback_mode: str = ""
    """For rollback: full or relaunch; "": full, else relaunch."""
    project: str = ""

    def matches(self, incident: IncidentFacts) -> bool:
        """Whether the rule applies to an incident."""
        return (
            self.kind in ("", incident.kind)
            and self.severity in ("", incident.severity)
            and self.job in ("", incident.job)
            and self.project in ("", incident.project)
            and incident.confidence >= self.confidence_min
        )


@dataclass(frozen=True, slots=True)
class PolicyLimits:
    """Limits on actions without a person."""

    actions_per_hour: int = 4
    """For each job: four rollbacks in an hour show that rolling back does not help."""
    cool_down_s: float = 60.0
    """For each job: an action needs time to show its effect before the next."""
    confidence_min: float = 0.9
    """The least confidence of an incident on which the policy acts; what is only possible (`LIKELY`) it leaves be."""
    approval_ranks: int = 64
    """For a job with more ranks, a person must approve: the cost of an action grows with the ranks. With
    `Policy.two_people`, also what another person requested."""
    precision_min: float = 0.0
    """The least known precision of a kind of incident on which the policy acts; 0: it acts without any feedback."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules, the limits and the hands-off switch, as people have set them."""

    rules: tuple[Rule, ...] = ()
    limits: PolicyLimits = field(default_factory=PolicyLimits)
    hands_off: bool = False
    """No action is taken, whatever the rules say."""
    two_people: bool = False
    """What a person requests and costs much needs the approval of another person, see `needs_second_person`."""
    unsigned_until_unix_ns: int | None = None
    """When unsigned telemetry, as of agents that cannot enrol, is refused in all jobs; None: there is no date."""

    def needs_second_person(self, action: str, world_size: int) -> bool:
        """Whether an action that a person requests for a job of so many ranks (0: unknown) needs another's approval."""
        many = world_size > self.limits.approval_ranks or world_size == 0
        return self.two_people and action in COSTLY and many

    def is_weakened_by(self, wanted: Policy) -> bool:
        """Whether another policy in its place would ask for fewer approvals by a second person."""
        fewer = wanted.limits.approval_ranks > self.limits.approval_ranks
        return self.two_people and (fewer or not wanted.two_people)


@dataclass(frozen=True, slots=True)
class IncidentFacts:
    """What the policy knows about an incident."""

    id: str
    job: str
    kind: str
    severity: str
    confidence: float
    onset_step: int | None
    ranks: tuple[int, ...]
    world_size: int
    project: str = ""
    """Project of the job; empty: none."""
    hung: bool = False
    """Ranks may never reach the next step boundary."""
    processes_lost: bool = False
    hosts_lost: bool = False


@dataclass(frozen=True, slots=True)
class PastAction:
    """An earlier action of the policy on the same job."""

    action: str
    at_unix_ns: int


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do. `action` is empty if the mode is `notify`; only `act` becomes a command."""

    mode: Mode
    reason: str
    rule: str = ""
    action: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    """For rollback: {"checkpoint": id}, with "mode" if the rule names one. For relaunch: {"culprits": [ranks]}."""
    approval_required: bool = False
    withheld: bool = False
    """The rule acts once the precision of the kind is known to be high enough, which is all that it waits for."""


def decide(
    incident: IncidentFacts,
    policy: Policy,
    history: Sequence[PastAction],
    capabilities: Collection[str],
    ledger: Ledger,
    now_unix_ns: int,
    precision: Precision = UNREVIEWED,
) -> Decision:
    """Decide about an incident that has just opened or become more severe.

    Args:
        incident: its facts.
        policy: the policy in force.
        history: actions that the policy took on this job, in any order.
        capabilities: what every rank of the attempt reports that it can do.
        ledger: the job's checkpoints; entries from the onset on must already be suspect.
        now_unix_ns: stream time, from the newest tick.
        precision: of the incident's kind.
    """
    rule = next((rule for rule in policy.rules if rule.matches(incident)), None)
    if rule is None:
        return Decision(Mode.NOTIFY, "no rule matches")
    if rule.mode is Mode.NOTIFY:
        return Decision(Mode.NOTIFY, "the rule only notifies", rule.id)
    params: dict[str, Any] = {}
    if rule.action == Action.ROLLBACK and (way := rollback_way(incident, ledger, capabilities, rule.rollback_mode)):
        # The mode is passed on only if the rule names one, since a named mode is never replaced by another.
        params = {"checkpoint": way.entry.id} | ({"mode": rule.rollback_mode} if rule.rollback_mode else {})
    if rule.action == Action.RELAUNCH:
        params = {"culprits": list(incident.ranks)}
    suggestion = Decision(Mode.SUGGEST, ONLY_SUGGESTS, rule.id, rule.action, params)
    if rule.mode is Mode.SUGGEST:
        return suggestion
    if (obstacle := _obstacle(incident, rule, params, policy, history, capabilities, ledger, now_unix_ns)) is not None:
        return Decision(Mode.SUGGEST, obstacle, rule.id, rule.action, params)
    least = policy.limits.precision_min
    if not precision.reaches(least):
        reason = _unmet(incident.kind, precision, least)
        return Decision(Mode.SUGGEST, reason, rule.id, rule.action, params, withheld=True)
    approval = incident.world_size > policy.limits.approval_ranks
    return Decision(Mode.ACT, f"rule {rule.id}", rule.id, rule.action, params, approval)


def rollback_way(incident: IncidentFacts, ledger: Ledger, capabilities: Collection[str], mode: str = "") -> Way | None:
    """How to go back to before the onset, from a checkpoint in a tier that survived the failure; None if impossible."""
    tiers: tuple[CheckpointTier, ...] = SPEED
    if incident.hosts_lost:
        tiers = SURVIVES_HOSTS
    elif incident.processes_lost or incident.hung:
        # A job that hangs obeys no rollback: only a relaunch is left, which ends its processes.
        tiers = SURVIVES_PROCESSES
    # A checkpoint of the onset's own step is excluded: some loops save before the step is trained, others after it.
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
                rule.project,
            )
            for rule in policy.rules
        ),
        asdict(policy.limits),
        policy.two_people,
        policy.unsigned_until_unix_ns,
    )


def policy_of(record: PolicySet) -> Policy:
    """The policy in a control record."""
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
            rule.project,
        )
        for rule in record.rules
    )
    switches = (record.hands_off, record.two_people, record.unsigned_until_unix_ns)
    return Policy(rules, PolicyLimits(**record.limits), *switches)


def _unmet(kind: str, precision: Precision, least: float) -> str:
    """Why a precision is too low for an action."""
    if precision.is_known:
        share = f"{precision.useful} of {precision.judged} incidents were useful"
        return f"the precision of {kind} is below {least:.0%}: {share}"
    return f"the precision of {kind} is not known: {precision.judged} of {JUDGED_MIN} incidents are judged"


def _obstacle(
    incident: IncidentFacts,
    rule: Rule,
    params: Mapping[str, Any],
    policy: Policy,
    history: Sequence[PastAction],
    capabilities: Collection[str],
    ledger: Ledger,
    now_unix_ns: int,
) -> str | None:
    """Why the policy may not act now; None if it may."""
    limits = policy.limits
    recent = [past for past in history if now_unix_ns - past.at_unix_ns < HOUR_NS]
    cool_down_ns = int(limits.cool_down_s * 1e9)
    if not rule.kind and KINDS[Kind(incident.kind)].needs_own_rule:
        return f"only a rule for {incident.kind} acts on it"
    if policy.hands_off:
        return "the hands-off switch is on"
    able = rule.action in capabilities
    if rule.action == Action.ROLLBACK:
        # `possible` is also true while nothing is known of the ranks; the policy acts only on what they reported.
        able = bool(capabilities) and possible(rule.rollback_mode, capabilities)
    if not able:
        return f"the job does not support {rule.action}"
    if incident.severity == Severity.INFO != rule.severity and not incident.hung:
        return "it is only information so far"
    if incident.confidence < max(limits.confidence_min, LIKELY):
        return f"confidence {incident.confidence:.2f} is below {max(limits.confidence_min, LIKELY):.2f}"
    if rule.action == Action.ROLLBACK and "checkpoint" not in params:
        return "there is no good checkpoint from before the onset"
    if rule.action == Action.RELAUNCH and resumed_from(ledger.entries) is None:
        return f"training would begin from scratch: {why_from_scratch(ledger.entries)}"
    if any(now_unix_ns - past.at_unix_ns < cool_down_ns for past in recent):
        return f"the policy acted on this job less than {limits.cool_down_s:g} s ago"
    if len(recent) >= limits.actions_per_hour:
        return f"the budget of {limits.actions_per_hour} actions an hour is used up"
    return NOT_CRITICAL_YET if incident.hung and incident.severity != Severity.CRITICAL else None


def demotion(kind: str, precision: Precision, policy: Policy) -> str:
    """What to do about a kind of low precision, for people; empty if its precision is not low."""
    if not precision.is_low:
        return ""
    acting = [rule for rule in policy.rules if rule.mode is Mode.ACT and rule.kind in ("", kind)]
    if not acting:
        return "no rule acts on it: leave it out of the receivers that page people"
    ids = ", ".join(rule.id for rule in acting)
    if all(rule.kind for rule in acting):
        return f"set the mode of {ids} to suggest"
    return f"put a rule for {kind} with mode suggest before {ids}"
