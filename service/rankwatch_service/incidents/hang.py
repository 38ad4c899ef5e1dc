"""What the ranks of a hang answer when they are asked, as evidence of its incident, and what to do first. Pure.

Who stands where does not depend on the order in which the answers arrive.

A hang asks all ranks at once. An incident is told of at most once in a tick, and where many ranks have answered only
every `TELL_EVERY_S`, so that the answers of thousands of ranks, of which some come late, are a few transitions.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

from rankwatch import wire
from rankwatch_detectors.base import Kind, Occurrence
from rankwatch_detectors.progress.arrival import STOPPED
from rankwatch_detectors.scope import WHOLE_JOB
from rankwatch_service.incidents.causes import NOT_THE_NETWORK, without_ruled_out
from rankwatch_service.incidents.model import SENTENCE, STACKS, Incident, Part, TransitionKind, Update

HOSTS_NAMED: Final = 3

PIDS: Final = "pids"
"""Field of the evidence of a hang, a slow or a lost rank: by host, process ids of the named ranks."""

RANKS_ON_HOST: Final = "ranks_on_host"
"""Field of the evidence of trouble of one host: how many ranks of the job it has."""

PIDS_MAX: Final = 16
"""Ranks whose process ids the evidence has: a person continues the few first by hand, and all of a host by a script."""


def seconds_of(evidence: Mapping[str, Any], name: str = "critical_after_s") -> float | None:
    """A duration in the evidence of a hang, such as that after which it becomes critical by itself; None: not known."""
    value = evidence.get(name)
    return float(value) if isinstance(value, int | float) and 0 <= value < math.inf else None


def hang_steps(steps: Sequence[str], evidence: Mapping[str, Any], hosts: Sequence[str]) -> list[str]:
    """What to look at in one hang.

    Args:
        steps: those of the kind: to read a stack, and to look at the network.
        evidence: of the incident.
        hosts: of the ranks that it names.
    """
    read, network = steps
    pids = evidence.get(PIDS) or {}
    if stopped_by_signal(evidence):
        who = "Find out who or what stopped it, for example a debugger, a scheduler or a person."
        return [_go_on(pids, hosts, _missing(evidence)), who]
    groups = _with_stack(evidence)
    if not groups and (silent := _silent(evidence, hosts)):
        return [silent]
    first = (
        _stands(read, groups, _missing(evidence))
        if groups
        else _look(pids, hosts, _missing(evidence), asked=SENTENCE in evidence)
    )
    apart = bool(_missing(evidence)) or len(groups) > 1 or NOT_THE_NETWORK in evidence
    return [first] if apart else [first, network]


def stopped_by_signal(evidence: Mapping[str, Any]) -> bool:
    """Whether a signal stopped the process of a rank that a hang names, so that another one lets it go on."""
    missing = evidence.get("missing") or [evidence]
    # A process that a debugger holds (t), or that is dead (Z), does not go on by a signal.
    states = {one.get("os_state", "T") for one in missing if isinstance(one, Mapping)}
    return evidence.get("decided_by") == STOPPED and "T" in states


def _missing(evidence: Mapping[str, Any]) -> list[int]:
    """The ranks that a hang names."""
    return [one["rank"] for one in evidence.get("missing") or () if isinstance(one, Mapping) and "rank" in one]


def _stands(read: str, groups: Sequence[Mapping[str, Any]], missing: Sequence[int]) -> str:
    """Where the named rank stands, by its stack; without one, where the fewest ranks do.

    Args:
        read: the step, where no place is known.
        groups: those with a stack, the smallest first.
        missing: the ranks that the hang names.
    """
    named = ((rank, group) for rank in missing for group in groups if _within(rank, str(group.get("ranks", ""))))
    rank, group = next(named, (None, groups[0]))
    where = group.get("where")
    if not where:
        return read
    if rank is None and len(groups) == 1:
        return f"All ranks that answered stand in {where}: see there what they wait for (the stack is in the evidence)."
    few = str(group.get("ranks", ""))
    who, stand = (f"Rank {rank if rank is not None else few}", "stands")
    if rank is None and not few.isdigit():
        who, stand = f"Ranks {few}", "stand"
    return f"{who} {stand} in {where}: see there why (the stack is in the evidence)."


def _within(rank: int, ranges: str) -> bool:
    """Whether a rank is in ranges as `rank_ranges` writes them."""
    for one in ranges.partition(" ")[0].split(","):
        first, _, last = one.partition("-")
        if first.isdigit() and int(first) <= rank <= int(last or first):
            return True
    return False


def _silent(evidence: Mapping[str, Any], hosts: Sequence[str]) -> str:
    """What to do where nothing has been heard of the named ranks lately; empty if something has."""
    missing = [one for one in evidence.get("missing") or () if isinstance(one, Mapping)]
    if not missing or not hosts or not all("silent_s" in one for one in missing):
        return ""
    where = ", ".join(hosts[:HOSTS_NAMED])
    last = f"it last reported {min(one['silent_s'] for one in missing):.0f} s before this was found"
    return f"First `ping` {where}: {last}."


def _process(rank: int | None) -> str:
    """How to find the id of a rank's process on its host."""
    return f"`grep -lz '^RANK={'R' if rank is None else rank}$' /proc/*/environ` prints its process id"


def _look(pids: Mapping[str, Sequence[int]], hosts: Sequence[str], ranks: Sequence[int], *, asked: bool) -> str:
    """How to see where the first of the named processes stands, as its stack has not come.

    Args:
        pids: their ids by host; empty: not known.
        hosts: of the ranks that the hang names.
        ranks: that the hang names.
        asked: it is known that no stack comes.
    """
    where = next(iter(pids or hosts), "its host")
    who = f"rank {ranks[0]}" if ranks else "a rank that waits"
    why = "No rank has answered with its stack. " * asked
    if pids:
        return f"{why}See where {who} stands: `py-spy dump --pid {pids[where][0]}` on {where}."
    find = _process(ranks[0] if ranks else None)
    return f"{why}See where {who} stands: `py-spy dump --pid` with its process id on {where} ({find})."


def _go_on(pids: Mapping[str, Sequence[int]], hosts: Sequence[str], ranks: Sequence[int]) -> str:
    """How to let stopped processes go on.

    Args:
        pids: their ids by host; empty: not known.
        hosts: of the ranks that the hang names.
        ranks: that it names.
    """
    if not pids:
        where = f"{', '.join(hosts[:HOSTS_NAMED])}" if hosts else "its host"
        find = _process(ranks[0] if ranks else None)
        return f"Continue the stopped process: `kill -CONT` with its process id on {where} ({find})."
    named = [f"`kill -CONT {' '.join(map(str, ids))}` on {host}" for host, ids in pids.items()]
    what = "process" if sum(map(len, pids.values())) == 1 else "processes"
    left = len(named) - HOSTS_NAMED
    more = f", and on {left} more {'host' if left == 1 else 'hosts'}" if left > 0 else ""
    return f"Continue the stopped {what}: {', '.join(named[:HOSTS_NAMED])}{more} (within its container, if it has one)."


def _with_stack(evidence: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The groups of ranks that gave a stack."""
    groups = evidence.get(STACKS) or ()
    return [group for group in groups if isinstance(group, Mapping) and group.get("stack")]


STACK_CHARS_MAX: Final = 16_384
"""Characters kept of each stack: about 200 frames."""

GROUPS_MAX: Final = 8
"""Groups that the evidence shows: the largest and the smallest, with 8 x 16 KB of stacks at most, and as much of
native frames."""

TEXTS_MAX: Final = 64
"""Places of a hang of which a stack is kept until all ranks have answered: 64 x 16 KB = 1 MB at most,
and as much of native frames."""

RANKS_CHARS_MAX: Final = 512
"""Characters of the list of a group's ranks: about 80 ranges of a job with 16,384 ranks."""

OUTLIERS_MAX: Final = 3
"""Groups besides the largest that the sentence names."""

LEFT_OUT: Final = "stacks_left_out"
"""Field of the evidence that says how many groups are not shown; absent if all are."""
SHOWN: Final = (SENTENCE, STACKS, LEFT_OUT)
"""All fields of the evidence that groups have."""

KEPT: Final = ("stack", "place", "where", "reason", "os_state", "wchan", "cpu_ticks", "phase", "phase_age_s", "doing")
"""Fields of an answer that are kept."""

OUTPUT: Final = "output"
"""Field of the evidence of a hang or a lost rank: what the named rank has printed last, or of its end."""
OUTPUT_LINES_MAX: Final = 8
OUTPUT_CHARS_MAX: Final = 300

_ADDRESS: Final = re.compile(r"0x[0-9a-f]+")


class StackGroups:
    """Where the ranks of one hang stand. Memory: some bytes for each rank that has answered, and `TEXTS_MAX` stacks."""

    def __init__(self) -> None:
        self._place_of: dict[int, str] = {}
        self._dumps: dict[str, dict[str, Any]] = {}
        """The dump of the lowest of its ranks that has sent the text, and which rank it is (`rank`), by place."""

    def __len__(self) -> int:
        """Ranks that have answered."""
        return len(self._place_of)

    def add(self, rank: int, dump: Mapping[str, Any]) -> bool:
        """Add a rank's answer; False if it has answered before."""
        if rank in self._place_of:
            return False
        place = self._place_of[rank] = _place(dump)
        known = self._dumps.get(place)
        if known is None and len(self._dumps) >= TEXTS_MAX:
            return True
        if known is None or (not dump.get("stack"), rank) < (not known.get("stack"), known["rank"]):
            reported = {name: dump[name] for name in KEPT if name in dump}
            kept = {
                name: value[:STACK_CHARS_MAX] if isinstance(value, str) else value for name, value in reported.items()
            }
            native = {"native": known["native"]} if known is not None and "native" in known else {}
            self._dumps[place] = kept | native | {"rank": rank, "lines": _lines(dump.get("lines"))}
        return True

    def add_native(self, rank: int, stack: str) -> bool:
        """Add the native frames of a rank whose answer has come; False if those of its place, or no text, are kept."""
        dump = self._dumps.get(self._place_of.get(rank, ""))
        if dump is None or "native" in dump or not stack:
            return False
        dump["native"] = stack[:STACK_CHARS_MAX]
        return True

    def evidence(self, asked: int) -> dict[str, Any]:
        """The fields of `SHOWN`: the groups, the smallest first, and where all ranks stand in a sentence.

        Args:
            asked: of how many ranks an answer is expected.
        """
        by_place: dict[str, list[int]] = defaultdict(list)
        for rank in sorted(self._place_of):
            by_place[self._place_of[rank]].append(rank)
        largest = max(by_place.items(), key=lambda one: (len(one[1]), -one[1][0]))
        others = (one for one in by_place.items() if one != largest)
        # What few ranks do is what distinguishes them.
        groups = [*sorted(others, key=lambda one: (len(one[1]), one[1][0])), largest]
        kept = [(place, ranks) for place, ranks in groups if place in self._dumps]
        shown = kept if len(kept) <= GROUPS_MAX else [*kept[: GROUPS_MAX - 1], kept[-1]]
        fields = {
            SENTENCE: self._sentence(groups, asked),
            STACKS: [self._group(place, ranks) for place, ranks in shown],
        }
        if hidden := len(groups) - len(shown):
            count = len(self._place_of) - sum(len(ranks) for _, ranks in shown)
            fields[LEFT_OUT] = f"{_count(count, 'rank')} at {_count(hidden, 'further place')}"
        return fields

    def lines_of(self, ranks: Sequence[int]) -> list[str]:
        """What the first of these ranks that has sent any has printed last."""
        dumps = (dump for dump in self._dumps.values() if dump["rank"] in ranks)
        return next((dump["lines"] for dump in dumps if dump["lines"]), [])

    def outside_of_collectives(self, ranks: Sequence[int]) -> str:
        """Why none of these ranks waits for a network, in a sentence; empty if their answers do not prove that."""
        dumps = [self._dumps.get(self._place_of.get(rank, ""), {}) for rank in ranks]
        if not dumps or any(not dump.get("where") or not _waits_for_itself(dump) for dump in dumps):
            return ""
        verb = "stands" if len(ranks) == 1 else "stand"
        return f"{_named(sorted(ranks))} {verb} in {dumps[0]['where']}, in Python code outside of any collective"

    def _group(self, place: str, ranks: Sequence[int]) -> dict[str, Any]:
        hidden = ("place", "native", "lines")
        dump = {name: value for name, value in self._dumps[place].items() if name not in hidden}
        if native := self._dumps[place].get("native"):
            dump["stack"] = f"{dump.get('stack') or ''}\n\nWith native frames (py-spy):\n\n{native}".lstrip()
        return {"ranks": rank_ranges(ranks), "count": len(ranks), **dump}

    def _sentence(self, groups: Sequence[tuple[str, list[int]]], asked: int) -> str:
        *others, (most, ranks) = groups
        answered = len(self._place_of)
        who = f"{len(ranks)} of {answered} ranks" if others else f"All {answered} ranks" if answered > 1 else "The rank"
        reported = [f"{who} {self._where(most, 'stands ' if answered == 1 else 'stand ', 'at one place')}"]
        reported += [f"{_named(ranks)} {self._where(place, '', 'elsewhere')}" for place, ranks in others[:OUTLIERS_MAX]]
        if rest := others[OUTLIERS_MAX:]:
            reported.append(
                f"{_count(sum(len(ranks) for _, ranks in rest), 'rank')} at {_count(len(rest), 'other place')}"
            )
        if answered < asked:
            reported.append(f"no answer of {_count(asked - answered, 'rank')}")
        return "; ".join(reported) + "."

    def _where(self, place: str, verb: str, otherwise: str) -> str:
        dump = self._dumps.get(place, {})
        where, reason = str(dump.get("where") or ""), str(dump.get("reason") or "")
        return f"{verb}in {where}" if where else f"gave no stack: {reason}" if reason else verb + otherwise

    def state(self) -> dict[str, Any]:
        """For a snapshot, as JSON types."""
        return {"place_of": [[rank, place] for rank, place in self._place_of.items()], "dumps": self._dumps}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> StackGroups:
        """The groups of which `state` returned this."""
        groups = cls()
        groups._place_of = dict(state["place_of"])
        groups._dumps = {place: dict(dump) for place, dump in state["dumps"].items()}
        return groups


def _waits_for_itself(dump: Mapping[str, Any]) -> bool:
    return dump.get("phase") != wire.COLLECTIVE and dump.get("doing") in (wire.OWN, wire.DATA)


def rank_ranges(ranks: Sequence[int]) -> str:
    """Ascending ranks as ranges, such as 0-2,4; at most `RANKS_CHARS_MAX` characters, and how many are not listed."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    text, listed = "", 0
    for first, last in ranges:
        more = f"{',' if text else ''}{first}" + (f"-{last}" if last > first else "")
        if len(text) + len(more) > RANKS_CHARS_MAX:
            return f"{text} and {len(ranks) - listed:,} more"
        text += more
        listed += last - first + 1
    return text


def _named(ranks: Sequence[int]) -> str:
    """Ascending ranks as a sentence names them."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {rank_ranges(ranks)}"


def _place(dump: Mapping[str, Any]) -> str:
    """Equal for ranks that stand at the same place; without a place, for equal texts."""
    reported = dump.get("place") or f"{_ADDRESS.sub('', str(dump.get('stack') or ''))} {dump.get('reason')}"
    return sha256(str(reported).encode(errors="replace")).hexdigest()[:16]


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


ANSWERS: Final = ("stack_dump", "native_stack")
"""Events with which agents answer."""

ASKED: Final = (*SHOWN, NOT_THE_NETWORK)
"""Fields of the evidence that are set here."""


OWN_PACE_MAX: Final = 8
"""Ranks whose stacks are requested where ranks do not wait for each other."""

MANY: Final = 64
"""Answers that are judged anew within milliseconds."""
TELL_EVERY_S: Final = 10.0

NO_ANSWER_S: Final = 60.0
"""After so long the evidence says that no rank has answered: agents answer within seconds."""
NO_ANSWER: Final = "No rank has answered with its stack."


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
        self._sent_s: dict[str, float] = {}
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
        self._sent_s = {id_: sent_s for id_, sent_s in self._sent_s.items() if id_ in opened}
        changed = [id_ for id_ in self._changed if id_ in opened]
        due = [id_ for id_ in changed if now_s - self._sent_s.get(id_, -TELL_EVERY_S) >= TELL_EVERY_S]
        self._changed = [id_ for id_ in changed if id_ not in due]
        self._sent_s |= {id_: now_s for id_ in due if len(self._stacks[id_]) > MANY}
        self.received = [self._received(opened[id_], world_size) for id_ in due]
        reported = [self._reported(opened[id_], world_size) for id_ in due]
        return reported + [_unanswered(one) for one in opened.values() if self._is_unanswered(one, now_s)]

    def _is_unanswered(self, incident: Incident, now_s: float) -> bool:
        asked = incident.action_key(STACKS) in incident.actions and any(part.is_open for part in _hung(incident))
        late = now_s - incident.opened_time_s >= NO_ANSWER_S
        return asked and late and incident.id not in self._stacks and SENTENCE not in incident.evidence

    def _received(self, incident: Incident, world_size: int) -> StacksReceived:
        asked = next((ranks for part in _hung(incident) if (ranks := asked_ranks(part))), [])
        return StacksReceived(incident.command_id(STACKS), len(self._stacks[incident.id]), len(asked) or world_size)

    def _reported(self, incident: Incident, world_size: int) -> Update:
        everybody = any(part.scope == WHOLE_JOB for part in _hung(incident))
        groups = self._stacks[incident.id]
        shown: dict[str, Any] = groups.evidence(world_size if everybody else 0)
        if incident.kind is Kind.HANG and (why := groups.outside_of_collectives(incident.ranks)):
            shown[NOT_THE_NETWORK] = why
        if incident.kind is Kind.HANG and (lines := groups.lines_of(incident.ranks)):
            shown[OUTPUT] = lines
        rest = {name: value for name, value in incident.evidence.items() if name not in ASKED}
        incident.evidence = without_ruled_out(rest | shown)
        return Update(incident, TransitionKind.EVIDENCE, str(shown.get(SENTENCE, "")))

    def state(self) -> dict[str, Any]:
        """For a snapshot, as JSON types."""
        return {
            "stacks": {id_: one.state() for id_, one in self._stacks.items()},
            "changed": list(self._changed),
            "sent_s": dict(self._sent_s),
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> HangEvidence:
        """The answers of which `state` returned this."""
        evidence = cls()
        evidence._stacks = {id_: StackGroups.restored(one) for id_, one in state["stacks"].items()}
        evidence._changed = list(state["changed"])
        evidence._sent_s = dict(state["sent_s"])
        return evidence


def _unanswered(incident: Incident) -> Update:
    incident.evidence = {**incident.evidence, SENTENCE: NO_ANSWER}
    return Update(incident, TransitionKind.EVIDENCE, NO_ANSWER)


def _hung(incident: Incident) -> list[Part]:
    return [part for part in incident.parts if part.kind is Kind.HANG]


def _lines(reported: object) -> list[str]:
    return [str(line)[:OUTPUT_CHARS_MAX] for line in reported[-OUTPUT_LINES_MAX:]] if isinstance(reported, list) else []


def _asking(answer: Occurrence, incidents: Sequence[Incident]) -> Incident | None:
    hangs = [incident for incident in incidents if any(part.attempt == answer.attempt for part in _hung(incident))]
    order = answer.fields.get("order")
    named = (incident for incident in hangs if order == incident.command_id(STACKS))
    return next(named, hangs[0] if hangs else None)
