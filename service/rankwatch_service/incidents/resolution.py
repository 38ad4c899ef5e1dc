"""When a part is over: training went on without it, or it ended by itself and did not return. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from rankwatch_detectors.base import Finding
from rankwatch_service.incidents.kinds import KINDS
from rankwatch_service.incidents.model import Incident, Part

PROGRESS_FRAMES: Final = 3
"""Steps that a later attempt must finish before parts of an earlier one are closed."""

LOOK_FRAMES: Final = 64
"""Steps of a new launch before slow hardware counts as repaired or replaced: detectors need half as many to find it
again."""

REPEAT_FRAMES: Final = 1_000
"""Steps of a later attempt after which a part that ended the job is closed even if its step was not reached again: a
job that goes back further does so intentionally."""

QUIET_S: Final = 120.0
"""How long a part that ended by itself must stay away before its incident resolves. A stall at every hundredth step of
one second comes back sooner, and nobody is waiting for the resolution."""

FLAPPING_QUIET_S: Final = 900.0
"""The same for a part that has come back before. Within this time, a resolved incident is also reopened rather than
replaced: one incident is easier to work on than four an hour."""


ENDED_WITH_JOB: Final = "ended_with_job"
"""In the evidence of a resolved incident: the trouble lasted until the job ended."""


def ended_with_its_attempt(part: Part, frames: int, step: int) -> bool:
    """Whether the running attempt, which has finished `frames` steps up to `step`, shows that the part is over."""
    if KINDS[part.kind].is_lasting:
        return part.ended_with_attempt and frames >= LOOK_FRAMES
    if KINDS[part.kind].ends_job:
        past = part.onset_step is None or step >= part.onset_step or frames >= REPEAT_FRAMES
        return part.ended_with_attempt and past
    return part.ended_with_attempt


def end_by_itself(part: Part, step: int | None, now_s: float) -> None:
    """Close a part that its detector no longer sees."""
    part.is_open, part.ended_s, part.ended_step = False, now_s, step


def ended_after(finding: Finding) -> str:
    """The sentence that a summary gets when its trouble has ended by itself: how long it lasted."""
    lasted_s = finding.detected_time_s - finding.onset_time_s
    minutes, seconds = divmod(round(lasted_s), 60)
    lasted = f"{lasted_s:.1f} s" if lasted_s < 10 else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
    return f" It has ended by itself after {lasted}."


def ended_by_start(incident: Incident, attempt: str, first_step: int) -> str:
    """The sentence that a summary gets when a later attempt, whose first finished step this is, ended its trouble."""
    same_launch = incident.attempt.rpartition(".")[0] == attempt.rpartition(".")[0]
    return f" The job was {'rolled back to' if same_launch else 'relaunched from'} step {first_step}."


def end_for_good(incident: Incident) -> None:
    """Close all parts for good: what begins later is another incident."""
    for part in incident.parts:
        part.is_open, part.ended_s = False, None


def end_with_job(incident: Incident) -> None:
    """Close all parts for good, as the job has ended. What was not over by then is marked: nobody has repaired it."""
    if any(part.is_open for part in incident.parts):
        incident.evidence = {**incident.evidence, ENDED_WITH_JOB: True}
        incident.summary += " The job has ended."
    end_for_good(incident)


def go_on_again(part: Part) -> None:
    """Reopen a part that had ended by itself."""
    part.is_open, part.ended_s, part.ended_step = True, None, None
    part.flaps += 1


def last_to_end(incident: Incident) -> Part | None:
    """The part that ended by itself last."""
    ended = [part for part in incident.parts if part.ended_s is not None]
    return max(ended, key=lambda part: part.ended_s or 0.0, default=None)


def quiet_s(incident: Incident) -> float:
    """How long flapping parts of this incident must stay away before it resolves."""
    return FLAPPING_QUIET_S if any(part.flaps for part in incident.parts) else QUIET_S


def may_resolve(incident: Incident, now_s: float) -> bool:
    """Whether all parts are closed, and those that may come back have stayed away long enough."""
    if any(part.is_open for part in incident.parts):
        return False
    watched = [part.ended_s for part in incident.parts if KINDS[part.kind].flaps and part.ended_s is not None]
    return not watched or now_s - max(watched) >= quiet_s(incident)


def come_back(finding: Finding, incidents: Iterable[Incident]) -> tuple[Incident, Part] | None:
    """The ended part that this finding reopens; of a resolved incident only its first mover can be reopened."""
    if not KINDS[finding.kind].flaps:
        return None
    for incident in incidents:
        for part in incident.parts if incident.state != "resolved" else incident.parts[:1]:
            same = (part.attempt, part.kind, part.scope) == (finding.attempt, finding.kind, finding.scope)
            lately = part.ended_s is not None and finding.detected_time_s - part.ended_s <= FLAPPING_QUIET_S
            if same and lately:
                return incident, part
    return None
