"""What the ranks of a hang answer when they are asked, as evidence of its incident. Pure.

A hang asks all ranks at once. An incident is told of at most once in a tick, and where many ranks have answered only
every `TELL_EVERY_S`, so that the answers of thousands of ranks, of which some come late, are a few transitions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rankwatch_detectors.base import Kind, Occurrence
from rankwatch_detectors.scope import WHOLE_JOB
from rankwatch_service.incidents.causes.suspected_causes import NOT_THE_NETWORK, without_ruled_out
from rankwatch_service.incidents.hang.stack_groups import SENTENCE, SHOWN, STACKS, StackGroups
from rankwatch_service.incidents.model import Incident, Part
from rankwatch_service.incidents.transition import TransitionKind, Update

ANSWERS: Final = ("stack_dump", "native_stack")
"""Events with which agents answer."""

ASKED: Final = (*SHOWN, NOT_THE_NETWORK)
"""Fields of the evidence that are set here."""


OWN_PACE_MAX: Final = 8
"""Ranks whose stacks are requested where ranks do not wait for each other."""

MANY: Final = 64
"""Answers that are judged anew within milliseconds."""
TELL_EVERY_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class StacksReceived:
    """How far a command `stacks` has come."""

    command: str
    count: int
    """Ranks that have answered."""
    asked: int
    """Ranks that it is for."""


def asked_ranks(hung: Part) -> list[int]:
    """The ranks whose stacks a hang requests; empty: all of the job. A rank that hangs by itself disturbs no other."""
    return [] if hung.scope == WHOLE_JOB else list(hung.ranks[:OWN_PACE_MAX])


class HangEvidence:
    """The answers about the open incidents that have asked."""

    def __init__(self) -> None:
        self._stacks: dict[str, StackGroups] = {}
        self._changed: list[str] = []
        """Ids of incidents whose evidence lacks what has arrived."""
        self.received: list[StacksReceived] = []
        """What the newest call of `due` has set of stacks."""
        self._told_s: dict[str, float] = {}
        """When the evidence of an incident with many answers was set last."""

    def take(self, answer: Occurrence, incidents: Sequence[Incident]) -> None:
        """Add an answer to the open incident that asked, else to the open hang of its attempt."""
        incident = _asking(answer, incidents)
        if incident is None or answer.rank is None:
            return
        if answer.kind == "stack_dump":
            new = self._stacks.setdefault(incident.id, StackGroups()).add(answer.rank, answer.fields)
        else:
            groups = self._stacks.get(incident.id)
            new = groups is not None and groups.add_native(answer.rank, str(answer.fields.get("stack") or ""))
        if new:
            self._changed = [*(one for one in self._changed if one != incident.id), incident.id]

    def due(self, incidents: Iterable[Incident], world_size: int, now_s: float) -> list[Update]:
        """Set what has arrived in the evidence of these open incidents, as far as it is time. Notifies nobody."""
        opened = {incident.id: incident for incident in incidents}
        self._stacks = {id_: groups for id_, groups in self._stacks.items() if id_ in opened}
        self._told_s = {id_: told_s for id_, told_s in self._told_s.items() if id_ in opened}
        changed = [id_ for id_ in self._changed if id_ in opened]
        due = [id_ for id_ in changed if now_s - self._told_s.get(id_, -TELL_EVERY_S) >= TELL_EVERY_S]
        self._changed = [id_ for id_ in changed if id_ not in due]
        self._told_s |= {id_: now_s for id_ in due if len(self._stacks[id_]) > MANY}
        self.received = [self._received(opened[id_], world_size) for id_ in due]
        return [self._told(opened[id_], world_size) for id_ in due]

    def _received(self, incident: Incident, world_size: int) -> StacksReceived:
        asked = next((ranks for part in _hung(incident) if (ranks := asked_ranks(part))), [])
        return StacksReceived(incident.command_id(STACKS), len(self._stacks[incident.id]), len(asked) or world_size)

    def _told(self, incident: Incident, world_size: int) -> Update:
        everybody = any(part.scope == WHOLE_JOB for part in _hung(incident))
        groups = self._stacks[incident.id]
        shown: dict[str, Any] = groups.evidence(world_size if everybody else 0)
        if incident.kind is Kind.HANG and (why := groups.outside_of_collectives(incident.ranks)):
            shown[NOT_THE_NETWORK] = why
        rest = {name: value for name, value in incident.evidence.items() if name not in ASKED}
        incident.evidence = without_ruled_out(rest | shown)
        return Update(incident, TransitionKind.EVIDENCE, str(shown.get(SENTENCE, "")))

    def state(self) -> dict[str, Any]:
        """For a snapshot, as JSON types."""
        return {
            "stacks": {id_: one.state() for id_, one in self._stacks.items()},
            "changed": list(self._changed),
            "told_s": dict(self._told_s),
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> HangEvidence:
        """The answers of which `state` returned this."""
        evidence = cls()
        evidence._stacks = {id_: StackGroups.restored(one) for id_, one in state["stacks"].items()}
        evidence._changed = list(state["changed"])
        evidence._told_s = dict(state["told_s"])
        return evidence


def _hung(incident: Incident) -> list[Part]:
    return [part for part in incident.parts if part.kind is Kind.HANG]


def _asking(answer: Occurrence, incidents: Sequence[Incident]) -> Incident | None:
    hangs = [incident for incident in incidents if any(part.attempt == answer.attempt for part in _hung(incident))]
    order = answer.fields.get("order")
    named = (incident for incident in hangs if order == incident.command_id(STACKS))
    return next(named, hangs[0] if hangs else None)
