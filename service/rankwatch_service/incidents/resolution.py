"""When a trouble is over: because training went on without it, or because it ended by itself and stayed away. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from rankwatch_detectors.base import Finding
from rankwatch_service.incidents.kinds import KINDS
from rankwatch_service.incidents.model import Incident, Part

PROGRESS_FRAMES: Final = 3
"""Steps that a later attempt must finish before troubles of an earlier one count as over."""

LOOK_FRAMES: Final = 64
"""Steps of a new launch before hardware that was slow counts as mended or gone: detectors need half as many to see it
again from the first step on."""

REPEAT_FRAMES: Final = 1_000
"""Steps of a later attempt before what ended a job counts as over although its step has not come again: a job that went
back further than this was told to."""

QUIET_S: Final = 120.0
"""How long what ended by itself must stay away before its incident resolves: whatever stalls a job every hundred steps
of a second comes back sooner. Nobody waits for the news that all is well."""

FLAPPING_QUIET_S: Final = 900.0
"""The same for what has come back already, and how long one that was told as resolved is the same incident: who looks
into it wants one case, not four an hour."""


def ended_with_its_attempt(part: Part, frames: int, step: int) -> bool:
    """Whether the running attempt, of which `step` and so many frames are finished, shows that this does not go on."""
    if KINDS[part.kind].is_lasting:
        return part.ended_with_attempt and frames >= LOOK_FRAMES
    if KINDS[part.kind].ends_job:
        past = part.onset_step is None or step >= part.onset_step or frames >= REPEAT_FRAMES
        return part.ended_with_attempt and past
    return part.ended_with_attempt


def end_by_itself(part: Part, step: int | None, now_s: float) -> None:
    """Its detector sees it no more."""
    part.is_open, part.ended_s, part.ended_step = False, now_s, step


def end_for_good(incident: Incident) -> None:
    """All of it is over, and what begins from now on is something else."""
    for part in incident.parts:
        part.is_open, part.ended_s = False, None


def go_on_again(part: Part) -> None:
    """What had ended by itself has come back."""
    part.is_open, part.ended_s, part.ended_step = True, None, None
    part.flaps += 1


def last_to_end(incident: Incident) -> Part | None:
    """Of the parts that ended by themselves the last one."""
    ended = [part for part in incident.parts if part.ended_s is not None]
    return max(ended, key=lambda part: part.ended_s or 0.0, default=None)


def quiet_s(incident: Incident) -> float:
    """How long what may come back must stay away."""
    return FLAPPING_QUIET_S if any(part.flaps for part in incident.parts) else QUIET_S


def may_resolve(incident: Incident, now_s: float) -> bool:
    """Whether all of it has ended, and what may come back has stayed away for long enough."""
    if any(part.is_open for part in incident.parts):
        return False
    watched = [part.ended_s for part in incident.parts if KINDS[part.kind].flaps and part.ended_s is not None]
    return not watched or now_s - max(watched) >= quiet_s(incident)


def come_back(finding: Finding, incidents: Iterable[Incident]) -> tuple[Incident, Part] | None:
    """The part that this finding is once more; of an incident that was told as resolved only what it was opened for."""
    if not KINDS[finding.kind].flaps:
        return None
    for incident in incidents:
        for part in incident.parts if incident.state != "resolved" else incident.parts[:1]:
            same = (part.attempt, part.kind, part.scope) == (finding.attempt, finding.kind, finding.scope)
            lately = part.ended_s is not None and finding.detected_time_s - part.ended_s <= FLAPPING_QUIET_S
            if same and lately:
                return incident, part
    return None
