"""Whom a hang waits for, from the flight-recorder dumps of its ranks, as evidence of its incident. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rankwatch_service.flight_recorder.record import DumpError, RankDump, parsed
from rankwatch_service.flight_recorder.verdict import Mismatch, Waiting, WaitVerdict, judge
from rankwatch_service.incidents.hang.stack_groups import named, rank_ranges

DUMPS_MAX: Final = 1_024
"""Ranks of a job whose dumps are requested. With all its ranks, since one without a dump looks as if it had launched
nothing: 1,024 dumps of 2 KB are 2 MB, 16 MB at most."""

DUMP_CHARS_MAX: Final = 16_384
"""Characters of a rank's dump as its agent sends it; longer ones are not read."""

DUMP_MEMBERS_MAX: Final = 16 * DUMPS_MAX
"""Ranks of all groups of one dump together; one with more is not read."""

TOLD_MAX: Final = 3
"""Ranks that launched something else, each in the sentence with what it was."""

VERDICT: Final = "flight_recorder"
"""Field of the evidence that says in a sentence whom the ranks wait for; also the parameter that requests dumps."""


class FlightDumps:
    """What the ranks of one hang have launched. The verdict does not depend on the order in which dumps arrive."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}
        self._read: dict[int, RankDump] = {}

    def add(self, rank: int, fields: Mapping[str, Any]) -> bool:
        """Add a rank's dump; False if it has none, a second one, or one that cannot be read."""
        text = fields.get("dump")
        if rank in self._texts or len(self._texts) >= DUMPS_MAX or not isinstance(text, str):
            return False
        if not text or len(text) > DUMP_CHARS_MAX or (dump := _read(rank, text)) is None:
            return False
        self._texts[rank], self._read[rank] = text, dump
        return True

    def __len__(self) -> int:
        return len(self._texts)

    def evidence(self) -> dict[str, str]:
        """The field `VERDICT`; nothing without a dump."""
        dumps = [self._read[rank] for rank in sorted(self._read)]
        return {VERDICT: sentence(judge(dumps))} if dumps else {}

    def state(self) -> list[list[Any]]:
        """For a snapshot, as JSON types."""
        return [[rank, text] for rank, text in self._texts.items()]

    @classmethod
    def restored(cls, state: Sequence[Sequence[Any]]) -> FlightDumps:
        """The dumps of which `state` returned this."""
        dumps = cls()
        for rank, text in state:
            dumps.add(rank, {"dump": text})
        return dumps


def sentence(verdict: WaitVerdict) -> str:
    """A verdict for people: who waits in what for whom, and who launched something else."""
    told = [_waits(verdict.waiting[0], verdict)] if verdict.waiting else []
    told += [_differs(one) for one in verdict.mismatches[:1]]
    if verdict.without_dump:
        told.append(f"there is no dump of {named(verdict.without_dump)}")
    elif not told and verdict.awaited:
        told.append(f"a message of {named(verdict.awaited)} is waited for")
    text = "; ".join(told or ["no rank waits for another one"])
    return f"{text[0].upper()}{text[1:]}."


def _waits(first: Waiting, verdict: WaitVerdict) -> str:
    wait = "waits" if len(first.waiting) == 1 else "wait"
    what = f"{first.operation} {first.sequence} of {first.group}"
    text = f"{named(first.waiting)} {wait} in {what}, never launched by {named(first.missing)}"
    return text if verdict.awaited == first.missing else f"{text}; in the end for {named(verdict.awaited)}"


def _differs(one: Mismatch) -> str:
    others = [f"{named([rank])} {form}" for rank, form in list(one.others.items())[:TOLD_MAX]]
    more = [f"ranks {rank_ranges(sorted(one.others)[TOLD_MAX:])} something else"] if len(one.others) > TOLD_MAX else []
    return f"as collective {one.sequence} of {one.group} most launched {one.usual}, " + ", ".join([*others, *more])


def _read(rank: int, text: str) -> RankDump | None:
    try:
        return parsed("dump", rank, json.loads(text), DUMP_MEMBERS_MAX)
    except (DumpError, ValueError, AttributeError, RecursionError):
        return None
