"""The text of a message: three lines that a person can act on without opening anything else. Pure."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from rankwatch_detectors.base import Kind, Severity
from rankwatch_service.incidents.answers import (
    GO_BACK,
    NOTHING_CHANGED,
    cause_words,
    changed,
    confidence_words,
    duration,
    first_steps,
    impact,
    normal,
)
from rankwatch_service.incidents.hang import rank_ranges
from rankwatch_service.incidents.kinds import ENDED_BY_ITSELF, ENDED_WITH_JOB, KINDS, has_norm_alone
from rankwatch_service.incidents.lost_time import HOUR_NS, cost_unit
from rankwatch_service.incidents.model import LISTED_MAX, IncidentVersion
from rankwatch_service.names import one_line
from rankwatch_service.policy.command import CommandRequest
from rankwatch_service.policy.policy import POLICY_ACTIONS, Action, Mode
from rankwatch_service.short_ids import short

LINE_CHARS_MAX: Final = 500
"""Longest line of the text. Three of them fit into one message of every receiver that limits its length."""

PLACES_MAX: Final = 4
"""Ranks or hosts that the text names; it says how many there are besides."""

DEVICE_CHARS_MAX: Final = 16
"""Characters of the UUID of a device: "GPU-" and enough of the rest to find it in `nvidia-smi -L`."""

_FIGURES: Final = (
    ("busy_s", "peers_busy_s", "s", "peers"),
    ("stage_busy_s", "others_busy_s", "s", "other stages"),
    ("since_s", "usual_s", "s", "usually"),
    ("seconds", "usual_s", "s", "usually"),
    ("age_s", "usual_step_s", "s", "a step usually"),
    ("value", "usual", "", "usually"),
    ("value", "best", "", "best"),
    ("value", "threshold", "", "threshold"),
    ("value", "level", "", "usually"),
)
"""Pairs of fields of the evidence: how it is, how it should be, their unit, name of the latter."""

NUMBER: Final = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")

HOST: Final = re.compile(r"\b(on|of|without) (?:the|that|its) host\b")
"""How first steps call the host of the ranks, which is named where it is one."""

SAVES: Final = (Kind.CHECKPOINT_FAILED, Kind.CHECKPOINT_OVERDUE)
"""Kinds in which a checkpoint can be saved only after the first step."""

PASSES: Final = (Kind.HANG, Kind.STRAGGLER)
"""Kinds that may pass while somebody takes the first step."""

SHARE_MIN: Final = 0.005
"""Least share of the job's hours that the text states: below it, a per cent says nothing."""

COST_MIN: Final = 0.01
"""Least cost that the text states, in hours of one GPU."""


def command_to_type(incident: IncidentVersion) -> str:
    """The command line that does what is suggested about an incident; the one that shows it, where that is nothing, or
    costs more than the incident, or the policy orders it itself.
    """
    if incident.state == "resolved" or not _is_worth_it(incident) or _ordered(incident):
        return f"rankwatch incidents show {short(incident.id)}"
    return f"rankwatch {incident.suggestion['action']} {shlex.quote(one_line(incident.job))}"


def _is_worth_it(incident: IncidentVersion) -> bool:
    """Whether an action is suggested, and costs less than what it is suggested for."""
    action, rate = incident.suggestion.get("action"), incident.impact_gpu_hours_per_hour
    if action == Action.PAUSE:
        return rate > 0 and (incident.suggestion.get("cost_gpu_hours") or 0.0) <= rate
    if action in (Action.ROLLBACK, Action.RELAUNCH):
        return rate > 0 or KINDS[incident.kind].stands_still or incident.kind is Kind.LOSS_DIVERGENCE
    return action in POLICY_ACTIONS


def _ordered(incident: IncidentVersion) -> Mapping[str, Any]:
    """What the policy orders by itself, and its reason: {action, reason}; empty: nothing."""
    policy: Mapping[str, Any] = incident.suggestion.get("policy") or {}
    return policy if policy.get("mode") == Mode.ACT and policy.get("action") else {}


def incident_text(incident: IncidentVersion, world_size: int, accelerated: bool = True, held_before: int = 0) -> str:
    """Three lines: what, where, since when and how bad; how sure it is, what it comes from, and what is normal and what
    changed shortly before, where that is known and not said yet; what to do first, and then. Of a resolved incident:
    what and where; how long it lasted, and whether the job ended before it was over; the command that shows it.

    Args:
        incident: as it is now.
        world_size: ranks of the job; 0: unknown.
        accelerated: an hour of a rank is one of a GPU.
        held_before: messages like it that the limit held back before.
    """
    head = str(incident.severity).upper()
    if incident.state == "resolved":
        head = "ENDED" if _ended_with_job(incident) else "RESOLVED"
    where = _where(incident, world_size)
    what = f"{head} in job {incident.job}: {one_line(incident.summary).removesuffix('.')}{where}"
    held = f". {held_before} more like this {'was' if held_before == 1 else 'were'} not sent before" * bool(held_before)
    if incident.state == "resolved":
        lasted = _lasted(incident) + _cost(incident, world_size, accelerated) + held
        return _lines(what, lasted, f"Details: {command_to_type(incident)}")
    what += f". {_since(incident)}"
    what += f". Impact: {impact(incident.kind, incident.severity, incident.evidence)}"
    what += _cost(incident, world_size, accelerated)
    usual = f"Confidence that it is real: {confidence_words(incident.confidence)}"
    if figures := _figures(incident.evidence, incident.summary):
        usual += f". Normal: {normal(incident.kind, incident.evidence)} ({figures})"
    if incident.cause:
        usual += f". Likely cause: {cause_words(incident.cause)}"
    before = changed(incident.changes_before, incident.onset_unix_ns)
    usual += f". Changed before it: {before}" * (not before.startswith(NOTHING_CHANGED)) + held
    return _lines(what, usual, _what_now(incident, world_size, accelerated))


def what_to_do(incident: IncidentVersion, accelerated: bool = True) -> list[str]:
    """The first steps about an incident, of a job that computes on devices or does not."""
    steps = first_steps(
        incident.kind,
        incident.severity,
        incident.evidence,
        incident.hosts,
        cause=incident.cause,
        state=incident.state,
        has_checkpoint=incident.checkpoint is not None,
        accelerated=accelerated,
    )
    if len(incident.hosts) != 1:
        return steps
    return [HOST.sub(lambda found: f"{found[1]} {incident.hosts[0]}", step) for step in steps]


def command_text(request: CommandRequest) -> str:
    """Three lines: which command, on what and who asked; until when it waits; what to do.

    Args:
        request: a command that needs an approval.
    """
    what = f"{request.action} of all {request.world_size or ''} ranks".replace("  ", " ")
    reason = one_line(request.reason) or "no reason"
    asked = f"APPROVAL NEEDED in job {request.job}: {what}, asked by {request.requested_by}: {reason}"
    id_ = short(request.id)
    minutes = round((request.expires_unix_ns - request.requested_unix_ns) / 60e9)
    waits = f"Nothing happens until another person approves it; it expires after {minutes} min"
    return _lines(asked, waits, f"Decide: rankwatch commands approve {id_}, or: rankwatch commands refuse {id_}")


def trial_text(receiver: str, actor: str) -> str:
    """Three lines that say that nothing is wrong."""
    return _lines(
        f"TEST: rankwatch reaches the receiver {receiver}",
        f"Nothing is wrong: {actor} sent this to try it",
        "First: nothing. A message about an incident has three lines too: what and where, how sure, and what to do",
    )


def _lines(*lines: str) -> str:
    return "\n".join(
        line if len(line) <= LINE_CHARS_MAX else line[: LINE_CHARS_MAX - 1] + "…" for line in map(one_line, lines)
    )


def _where(incident: IncidentVersion, world_size: int) -> str:
    """A sentence with the ranks, hosts and the device that the summary does not name; empty if it names them all."""
    ranks, said = incident.ranks, incident.summary
    where = ""
    if not ranks and not incident.hosts:
        where = f"All ranks{(world_size and f' ({world_size})') or ''}"
    elif ranks and not _names_ranks(said, ranks):
        of_all = f" of {world_size}" if world_size else ""
        where = f"Rank {ranks[0]}{of_all}" if len(ranks) == 1 else f"{len(ranks)}{of_all} ranks ({_some(ranks)})"
    if hosts := tuple(one for one in incident.hosts if not re.search(rf"(?<![\w.-]){re.escape(one)}(?![\w-])", said)):
        where += f" on {_some(hosts)}" if where else f"Host{'s' * (len(hosts) > 1)} {_some(hosts)}"
    others = _others(incident)
    device = incident.devices[0][:DEVICE_CHARS_MAX] if len(incident.devices) == 1 and not others else ""
    if device and device not in said:
        where += f", device {device}" if where else f"Device {device}"
    return f". {where}" * bool(where) + others


def _names_ranks(said: str, ranks: tuple[int, ...]) -> bool:
    named = {_some(ranks), ", ".join(map(str, ranks)), rank_ranges(sorted(ranks))}
    return any(re.search(rf"\branks?:? \(?{re.escape(one)}(?![\w,-])", said, re.IGNORECASE) for one in named)


def _others(incident: IncidentVersion) -> str:
    """How many ranks have the same trouble as a consequence: of 127 lost hosts the first mover is one."""
    alike = [one for one in incident.consequences if one.kind is incident.kind]
    others = {rank for one in alike for rank in one.ranks} - set(incident.ranks)
    at_least = "at least " if len(incident.consequences) >= LISTED_MAX - 1 else ""
    return f", and {at_least}{len(others)} more {'rank' if len(others) == 1 else 'ranks'}" if others else ""


def _since(incident: IncidentVersion) -> str:
    """Since when, as far as the summary does not say it, and how long after it was found."""
    at = datetime.fromtimestamp(incident.onset_unix_ns / 1e9, UTC)
    since = "Began at" if incident.evidence.get(ENDED_BY_ITSELF) else "Open since"
    after_s = (incident.detected_unix_ns - incident.onset_unix_ns) / 1e9
    found = f"{duration(after_s)} later" if after_s >= 1 else "at once"
    if after_s < 1 and incident.detected_step not in (None, incident.onset_step):
        found = f"in step {incident.detected_step}"
    if f"{at:%H:%M:%S} UTC" in incident.summary:
        return f"Found {found}"
    step = "" if incident.onset_step is None else f"step {incident.onset_step}, "
    step *= re.search(rf"\bstep {incident.onset_step}\b", incident.summary) is None
    return f"{since} {step}{at:%Y-%m-%d %H:%M:%S} UTC, found {found}"


def _cost(incident: IncidentVersion, world_size: int, accelerated: bool) -> str:
    """How much of the job's work is lost while it lasts, and what that has come to; empty if nothing is known of it."""
    rate = max(incident.impact_gpu_hours_per_hour, 0.0)
    share = min(rate / world_size, 1.0) if world_size else 0.0
    so_far = rate * ((incident.resolved_unix_ns or incident.updated_unix_ns) - incident.onset_unix_ns) / HOUR_NS
    if incident.state == "resolved":
        return f". It has cost {_hours(so_far, accelerated)}" if so_far >= COST_MIN else ""
    if share < SHARE_MIN:
        return ""
    unit = "GPUs" if accelerated else "ranks"
    work = (
        f"all {world_size} {unit}"
        if share > 1 - SHARE_MIN
        else f"{rate:.2g} of {world_size} {unit} ({100 * share:.0f} %)"
    )
    came_to = f", {_hours(so_far, accelerated)} so far" if so_far >= COST_MIN else ""
    return f"; the work of {work} is lost{came_to}"


def _what_now(incident: IncidentVersion, world_size: int, accelerated: bool) -> str:
    """What to do: what the policy orders by itself, or the first step; then the command that is suggested, with why,
    the checkpoint that it goes back to and what it costs, unless that makes the line too long. Where the first step is
    to go back, or to save what is there, that command is it. At last the command that shows more.
    """
    steps, suggestion = what_to_do(incident, accelerated), incident.suggestion
    action = suggestion.get("action")
    why = ": ".join(filter(None, (suggestion.get("reason"), _checkpoint(suggestion.get("checkpoint") or ""))))
    shows = f"Details: rankwatch incidents show {short(incident.id)}"
    goes_back = incident.kind in GO_BACK and incident.severity is Severity.CRITICAL
    reasons = f" ({'; '.join(filter(None, (why, _price(suggestion, world_size, accelerated))))})"
    if ordered := _ordered(incident):
        same = ordered["action"] == action
        reasons = f" ({ordered['reason']}{'; ' * same}{reasons.strip(' ()') * same})"
        then = f"Then: {steps[1]}" if goes_back and same and len(steps) > 1 else f"First: {steps[0]}"
        first = f"The policy orders a {ordered['action']} by itself{reasons}. {then}"
    elif not _is_worth_it(incident):
        why = _wait_until(incident, accelerated) or (steps[-1] * (len(steps) > 1) if action in POLICY_ACTIONS else why)
        first = f"First: {steps[0]}{' ' if why else ''}{why[:1].upper()}{why[1:].removesuffix('.')}{'.' if why else ''}"
    else:
        command = f"{command_to_type(incident)}{reasons}."
        if goes_back and action == Action.ROLLBACK:
            first = f"First: {command} Then: {steps[1]}"
        elif action == Action.CHECKPOINT and incident.kind not in SAVES:
            first = f"First, while steps go on: {command} Then: {steps[0]}"
        else:
            stays = incident.kind in PASSES or action == Action.PAUSE
            first = f"First: {steps[0]} {'If it stays' if stays else 'Then'}: {command}"
    whole = f"{first} {shows}"
    return whole if len(whole) <= LINE_CHARS_MAX else whole.replace(reasons, "", 1)


def _checkpoint(id_: str) -> str:
    """A checkpoint as people call it: by its step."""
    step = id_.rpartition(":")[2]
    return f"that of step {step}" if step.isdigit() else id_


def _wait_until(incident: IncidentVersion, accelerated: bool) -> str:
    """Until when to wait, as the incident has cost as much as a relaunch by then; empty if none is possible, or the job
    stands still and is started again anyway.
    """
    others = incident.suggestion.get("alternatives") or ()
    cost = next((one.get("cost_gpu_hours") or 0.0 for one in others if one.get("action") == Action.RELAUNCH), 0.0)
    if cost <= 0 or incident.impact_gpu_hours_per_hour <= 0 or KINDS[incident.kind].stands_still:
        return ""
    without = f" without {incident.hosts[0]}" if len(incident.hosts) == 1 else ""
    relaunch = f"a relaunch{without} ({_hours(cost, accelerated)})"
    until_unix_ns = incident.onset_unix_ns + cost / incident.impact_gpu_hours_per_hour * HOUR_NS
    if until_unix_ns <= incident.updated_unix_ns:
        return f"it has cost more than {relaunch} by now"
    at = datetime.fromtimestamp(until_unix_ns / 1e9, UTC)
    day = f"{at:%Y-%m-%d} " * (until_unix_ns - incident.updated_unix_ns > 12 * HOUR_NS)
    return f"wait until {day}{at:%H:%M} UTC at the latest: by then it has cost as much as {relaunch}"


def _price(suggestion: Mapping[str, Any], world_size: int, accelerated: bool) -> str:
    """What the suggested action costs, also in time of the job; empty if that is not known."""
    cost = suggestion.get("cost_gpu_hours") or 0.0
    if cost <= 0:
        return ""
    if suggestion.get("action") == Action.PAUSE:
        return f"costs {_hours(cost, accelerated)} an hour"
    seconds = cost / world_size * 3_600 if world_size else 0.0
    costs = [f"about {duration(seconds)} of the job"] * (seconds >= 1) + [_hours(cost, accelerated)] * (
        cost >= COST_MIN
    )
    return f"costs {', '.join(costs) or 'next to nothing'}"


def _some(places: tuple[Any, ...]) -> str:
    more = len(places) - PLACES_MAX
    return ", ".join(map(str, places[:PLACES_MAX])) + (f" and {more} more" if more > 0 else "")


def _figures(evidence: Mapping[str, Any], said: str) -> str:
    """How it is and how it should be; empty if it is not known, or the summary has said it."""
    told = [float(number.replace(",", "")) for number in NUMBER.findall(said)]
    for now, usual, unit, name in _FIGURES:
        figures = [_figure(evidence.get(one), unit) for one in (usual, now)]
        if all(figures):
            known = [
                any(math.isclose(evidence[one], told_as * by, rel_tol=0.01) for told_as in told for by in (1, 1e-3))
                for one in (usual, now)
            ]
            return "" if all(known) else f"{name} {figures[0]}, here {figures[1]}"
    return ""


def _figure(value: Any, unit: str) -> str:
    """A number of the evidence, with its unit; empty if it is none, or a negative duration."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or (unit == "s" and value < 0):
        return ""
    if unit == "s" and value >= 100:
        return duration(value)
    return f"{value:,.0f} {unit}".rstrip() if 1_000 <= abs(value) < 1e9 else f"{value:.3g} {unit}".rstrip()


def _hours(hours: float, accelerated: bool) -> str:
    return f"{hours:,.0f} {cost_unit(accelerated)}" if hours >= 10 else f"{hours:.2g} {cost_unit(accelerated)}"


def _ended_with_job(incident: IncidentVersion) -> bool:
    return incident.evidence.get(ENDED_WITH_JOB) is True


def _lasted(incident: IncidentVersion) -> str:
    """How long a resolved incident lasted, and what that means where nothing but the end of the job ended it."""
    seconds = ((incident.resolved_unix_ns or incident.updated_unix_ns) - incident.onset_unix_ns) / 1e9
    steps = "" if incident.onset_step is None else f", since step {incident.onset_step}"
    if incident.resolved_step is not None and incident.onset_step is not None:
        # After a rollback it may be resolved at an earlier step than it began; it was last seen when it was detected.
        last = incident.resolved_step
        if last < incident.onset_step:
            last = max(incident.detected_step or 0, incident.onset_step)
        steps = f", from step {incident.onset_step} to {last}" if last > incident.onset_step else f", at step {last}"
    lasted = f"It lasted {duration(seconds)}{steps}"
    if not _ended_with_job(incident):
        return lasted
    since = "" if incident.onset_step is None else f" since {incident.onset_step}"
    spoils = KINDS[incident.kind].spoils_weights and not has_norm_alone(
        incident.kind, incident.severity, incident.evidence
    )
    ruined = f"; steps{since} may be ruined" if spoils else ""
    return f"{lasted}. The job ended before it was over{ruined}"
