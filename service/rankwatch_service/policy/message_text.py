"""The text of a message: three lines that a person can act on without opening anything else. Pure."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Final

from rankwatch_detectors.words import listed
from rankwatch_service.incidents.answers import (
    NOTHING_CHANGED,
    cause_words,
    changed,
    confidence_words,
    duration,
    impact,
    may_be_skipped,
)
from rankwatch_service.incidents.hang import OUTPUT, rank_ranges
from rankwatch_service.incidents.kinds import ENDED_BY_ITSELF, ENDED_WITH_JOB, KINDS, has_norm_alone
from rankwatch_service.incidents.lost_time import HOUR_NS
from rankwatch_service.incidents.model import LISTED_MAX, IncidentVersion
from rankwatch_service.names import ALL_JOBS, one_line, short
from rankwatch_service.policy.actions import CommandRequest
from rankwatch_service.policy.what_now import COST_MIN, PLACES_MAX, hours, what_now

LINE_CHARS_MAX: Final = 560
LAST_LINE_CHARS_MAX: Final = 800
"""Longest lines of the text; the last one says what to do. All three fit into one message of every receiver that limits
its length.
"""

STEPS_MAX: Final = 2
"""Steps that the text contains."""

PRINTED_MAX: Final = 3
"""Lines of a rank's output that the text quotes."""

DEVICE_CHARS_MAX: Final = 16
"""Characters of the UUID of a device: "GPU-" and enough of the rest to find it in `nvidia-smi -L`."""

SHARE_MIN: Final = 0.005
"""Least share of the job's hours that the text states: below it, a per cent says nothing."""


def command_to_type(incident: IncidentVersion) -> str:
    """The command line of the first step; the one that shows the incident, where that has none."""
    return what_now(incident).command or f"rankwatch incidents show {short(incident.id)}"


def incident_text(incident: IncidentVersion, world_size: int, accelerated: bool = True) -> str:
    """Three lines: what, where, since when and how bad; how sure it is, what it comes from and what changed shortly
    before, where that is known; what happens by itself, what to do first, and then. Of a resolved incident: what and
    where; how long it lasted, and whether the job ended before it was over; the command that shows it.

    Args:
        incident: as it is now.
        world_size: ranks of the job; 0: unknown.
        accelerated: an hour of a rank is one of a GPU.
    """
    head = str(incident.severity).upper()
    if incident.state == "resolved":
        head = "ENDED" if _ended_with_job(incident) else "RESOLVED"
    where = _where(incident, world_size)
    what = f"{head} in job {incident.job}: {one_line(incident.summary).removesuffix('.')}{where}"
    if incident.state == "resolved":
        lasted = _lasted(incident) + _cost(incident, world_size, accelerated)
        return _lines(what, lasted, f"Details: {command_to_type(incident)}")
    what += f". {_since(incident)}"
    what += f". Impact: {impact(incident.kind, incident.severity, incident.evidence)}"
    uncertain = may_be_skipped(incident.kind, incident.severity, incident.evidence)
    what += _cost(incident, world_size, accelerated) * (not uncertain)
    usual = f"Confidence that it is real: {confidence_words(incident.confidence)}"
    usual += " (that the norm was not finite; whether it went into the weights is not known)" * uncertain
    if incident.cause and not KINDS[incident.kind].is_of_device:
        usual += f". Likely cause: {cause_words(incident.cause, incident.evidence)}"
    before = changed(incident.changes_before, incident.onset_unix_ns)
    usual += f". Changed before it: {before}" * (not before.startswith(NOTHING_CHANGED))
    usual += _printed(incident)
    return _lines(what, usual, _what_now(incident, world_size, accelerated))


def _printed(incident: IncidentVersion) -> str:
    """What the named rank has printed last, as a sentence; empty if it is not known."""
    lines = [str(line).strip() for line in incident.evidence.get(OUTPUT) or () if str(line).strip()]
    return f". Rank {incident.ranks[0]} printed: {' | '.join(lines[-PRINTED_MAX:])}" if lines and incident.ranks else ""


def with_held(text: str, held_before: int) -> str:
    """The text of an incident, which says in its second line how many messages like it were held back before."""
    what, sure, first = text.split("\n")
    were = "was" if held_before == 1 else "were"
    return _lines(what, f"{sure}. {held_before} more like this {were} not sent before", first)


def command_text(request: CommandRequest) -> str:
    """Three lines: which command, on what and who asked; until when it waits; what to do.

    Args:
        request: a command that needs an approval, or a change of who can approve that was made without one.
    """
    what = f"{request.action} of all {request.world_size or ''} ranks".replace("  ", " ")
    where = f"in job {request.job}"
    if request.job == ALL_JOBS:
        params = ", ".join(f"{name} {json.dumps(value)}" for name, value in request.params.items())
        what, where = f"{request.action} with {params}", "for all jobs"
    reason = one_line(request.reason) or "no reason"
    head = "APPROVAL NEEDED" if request.approval_required else "DONE WITHOUT APPROVAL"
    asked = f"{head} {where}: {what}, asked by {request.requested_by}: {reason}"
    id_ = short(request.id)
    if not request.approval_required:
        done = "It was done on the machine of the service, where nobody has to approve it"
        return _lines(
            asked, done, "If you did not expect it: rankwatch token list, and revoke what should not be there"
        )
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
    limits = [*[LINE_CHARS_MAX] * (len(lines) - 1), LAST_LINE_CHARS_MAX]
    cut = zip(map(one_line, lines), limits, strict=True)
    return "\n".join(line if len(line) <= limit else f"{line[: limit - 1]}…" for line, limit in cut)


def _where(incident: IncidentVersion, world_size: int) -> str:
    """A sentence with the ranks, hosts and the device that the summary does not name; empty if it names them all."""
    ranks, said = incident.ranks, incident.summary
    where = ""
    if not ranks and not incident.hosts:
        where = f"All ranks{(world_size and f' ({world_size})') or ''}"
    elif ranks and not _names_ranks(said, ranks):
        of_all = f" of {world_size}" if world_size else ""
        where = (
            f"Rank {ranks[0]}{of_all}"
            if len(ranks) == 1
            else f"{len(ranks)}{of_all} ranks ({listed(ranks, PLACES_MAX)})"
        )
    hosts = tuple(one for one in incident.hosts if not re.search(rf"(?<![\w.-]){re.escape(one)}(?![\w-])", said))
    if 1 < len(ranks) == len(hosts) == len(incident.devices) <= PLACES_MAX:
        places = zip(ranks, hosts, incident.devices, strict=True)
        return ". R" + ", r".join(f"ank {rank} on {host} ({one[:DEVICE_CHARS_MAX]})" for rank, host, one in places)
    if hosts:
        where += (
            f" on {listed(hosts, PLACES_MAX)}" if where else f"Host{'s' * (len(hosts) > 1)} {listed(hosts, PLACES_MAX)}"
        )
    others = _others(incident)
    device = incident.devices[0][:DEVICE_CHARS_MAX] if len(incident.devices) == 1 and not others else ""
    if device and device not in said:
        where += f", device {device}" if where else f"Device {device}"
    return f". {where}" * bool(where) + others


def _names_ranks(said: str, ranks: tuple[int, ...]) -> bool:
    named = {listed(ranks, PLACES_MAX), ", ".join(map(str, ranks)), rank_ranges(sorted(ranks))}
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
    step *= re.search(rf"\bstep (?:between )?{incident.onset_step}\b", incident.summary) is None
    return f"{since} {step}{at:%Y-%m-%d %H:%M:%S} UTC, found {found}"


def _cost(incident: IncidentVersion, world_size: int, accelerated: bool) -> str:
    """How much of the job's work is lost while it lasts, and what that has come to; empty if nothing is known of it."""
    rate = max(incident.impact_gpu_hours_per_hour, 0.0)
    share = min(rate / world_size, 1.0) if world_size else 0.0
    so_far = rate * ((incident.resolved_unix_ns or incident.updated_unix_ns) - incident.onset_unix_ns) / HOUR_NS
    if incident.state == "resolved":
        return f". It has cost {hours(so_far, accelerated)}" if so_far >= COST_MIN else ""
    if share < SHARE_MIN:
        return ""
    unit = "GPUs" if accelerated else "ranks"
    work = (
        f"all {world_size} {unit}"
        if share > 1 - SHARE_MIN
        else f"{rate:.2g} of {world_size} {unit} ({100 * share:.0f} %)"
    )
    came_to = f", {hours(so_far, accelerated)} so far" if so_far >= COST_MIN else ""
    return f"; the work of {work} is lost{came_to}"


def _what_now(incident: IncidentVersion, world_size: int, accelerated: bool) -> str:
    """What happens by itself, what to do, as many steps as the line holds, and the command that shows more."""
    now = what_now(incident, world_size, accelerated)
    shows = f" Details: rankwatch incidents show {short(incident.id)}"
    line = f"Automatic: {now.automatic}. You:" * bool(now.automatic)
    for number, step in enumerate(now.steps[:STEPS_MAX]):
        if number and len(line) + len(step) + len(shows) >= LAST_LINE_CHARS_MAX:
            break
        line += f" {step}"
    return line.lstrip() + shows


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
    corrupts = KINDS[incident.kind].corrupts_weights and not has_norm_alone(
        incident.kind, incident.severity, incident.evidence
    )
    ruined = f"; steps{since} may be ruined" if corrupts else ""
    return f"{lasted}. The job ended before it was over{ruined}"
