"""Reads dumps of torch's flight recorder, and finds the ranks that a hang waits for. Pickles are refused.

torch writes JSON by `torch._C._distributed_c10d._dump_nccl_trace_json()`, `_dump_fr_trace_json()` and the handler
`fr_trace_json` of its worker server. A rank that did not launch a collective that others of its group wait in may
itself wait: in another group, or for a message. So the wait is followed to the ranks that wait for nobody.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from rankwatch_service.foreign_files import ForeignReader, ReaderEndedError, answer

DEFAULT: Final = "0"
"""Name of the group of all ranks; gloo leaves it out where it lists the groups."""


class DumpError(ValueError):
    """A dump cannot be read; the message says which and why."""


@dataclass(frozen=True, slots=True)
class FlightEntry:
    """A collective, or a message between two ranks, as one rank has recorded it."""

    group: str
    """Name of the process group, the same on all its ranks."""
    group_text: str
    """What it is called in reports."""
    sequence: int
    """Number within the group; of collectives and of messages apart."""
    operation: str
    """Such as `nccl:all_reduce`, or `nccl:send 0->1` with ranks within the group."""
    is_message: bool
    form: tuple[Any, ...]
    """Operation, sizes and types: equal on all ranks of a symmetric collective."""
    is_done: bool
    created_ns: int


@dataclass(frozen=True, slots=True)
class RankDump:
    """What one rank has recorded."""

    rank: int
    members: Mapping[str, tuple[int, ...]]
    """Ranks of the process groups that this rank knows, by name."""
    entries: tuple[FlightEntry, ...]


def parsed(origin: object, rank: int, dump: Mapping[str, Any]) -> RankDump:
    """The dump of one rank, as torch writes it.

    Raises:
        DumpError: it is not; the message names its origin.
    """
    try:
        groups = dump.get("pg_config") or {}
        members = {
            str(group["name"]) or DEFAULT: tuple(map(int, json.loads(group["ranks"]))) for group in groups.values()
        }
        entries = [_entry(one) for one in dump.get("entries") or ()]
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise DumpError(f"{origin}: rank {rank}: not as torch writes it: {type(error).__name__}: {error}") from error
    return RankDump(rank, members, tuple(entries))


def _entry(one: Mapping[str, Any]) -> FlightEntry:
    name, text = (str(part) for part in one["process_group"])
    is_message = bool(one.get("is_p2p", False))
    operation = str(one["profiling_name"])
    sizes, types = (one.get(f"input_{what}") for what in ("sizes", "dtypes"))
    return FlightEntry(
        name,
        f"{text} ({name})" if text else name,
        int(one["p2p_seq_id" if is_message else "collective_seq_id"]),
        operation,
        is_message,
        (operation, json.dumps(sizes), json.dumps(types)),
        one.get("state") == "completed" or bool(one.get("retired")),
        int(one["time_created_ns"]),
    )


BYTES_MAX: Final = 256 * 1024 * 1024
"""Largest dump that is read, unpacked: 2,000 entries of a rank have a two-hundredth of that, without stacks."""
GZIP: Final = b"\x1f\x8b"

_PICKLE: Final = b"\x80"
_RANK: Final = re.compile(r"(\d{1,9})\D*$")
_RANK_DIGITS_MAX: Final = 9


def read_dumps(paths: Sequence[Path]) -> list[RankDump]:
    """The dumps in some files (also compressed by gzip), by rank.

    Raises:
        DumpError: a file is missing, is a pickle, is no dump, or two have the same rank.
    """
    dumps = Dumps()
    for path in paths:
        dumps.read(path)
    return dumps.by_rank()


class Dumps:
    """Dumps, one for each rank."""

    def __init__(self) -> None:
        self._found: dict[int, RankDump] = {}

    def read(self, path: Path) -> None:
        """Add those in a file; see `read_dumps`.

        Raises:
            DumpError: the file is missing, is a pickle, is no dump, or has a rank that another one has.
        """
        for rank, dump in _ranks_of(path, _loaded(path)):
            if rank in self._found:
                raise DumpError(f"{path}: there is another dump of rank {rank}")
            self._found[rank] = parsed(path, rank, dump)

    def by_rank(self) -> list[RankDump]:
        """All of them."""
        return [self._found[rank] for rank in sorted(self._found)]

    def answer(self, question: list[Any]) -> tuple[Any, Any]:
        """What a reader answers: to a path what is wrong with the dump in it; to "judge" the verdict, as JSON."""
        try:
            if question[0] == "read":
                self.read(Path(question[1]))
                return {}, b""
            return {}, msgspec.json.encode(evaluate(self.by_rank()))
        except DumpError as error:
            return {"wrong": str(error)}, b""


def evaluate_files(paths: Sequence[Path]) -> WaitVerdict:
    """Evaluate the dumps in some files; they are read in a child, within its limits.

    Raises:
        DumpError: see `read_dumps`; or the child has ended.
    """
    with ForeignReader(__name__) as reader:
        for path in paths:
            _asked(reader, path, "read", str(path.absolute()))
        body = _asked(reader, paths[-1], "evaluate")
    return msgspec.json.decode(body, type=WaitVerdict)


def _asked(reader: ForeignReader, path: Path, *question: str) -> bytes:
    try:
        reported, body = reader.ask(*question)
    except ReaderEndedError as error:
        raise DumpError(f"{path}: {error}") from error
    if "wrong" in reported:
        raise DumpError(reported["wrong"])
    return body


def _loaded(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            packed = file.read(2) == GZIP
        with gzip.open(path) if packed else path.open("rb") as content:
            raw = content.read(BYTES_MAX + 1)
    except OSError as error:
        raise DumpError(f"{path}: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise DumpError(f"{path}: cut off, or damaged: {error}") from error
    if len(raw) > BYTES_MAX:
        raise DumpError(f"{path}: larger than {BYTES_MAX // 2**20} MiB")
    if raw[:1] == _PICKLE:
        raise DumpError(f"{path}: a pickle, which may run code when it is read; write the dump as JSON")
    try:
        loaded = json.loads(raw)
    except ValueError as error:
        raise DumpError(f"{path}: not JSON: {error}") from error
    except RecursionError as error:
        raise DumpError(f"{path}: nested too deeply for a dump") from error
    if not isinstance(loaded, dict):
        raise DumpError(f"{path}: no object, so no dump of a flight recorder")
    return loaded


def _ranks_of(path: Path, loaded: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    if "entries" in loaded or "pg_config" in loaded:
        match = _RANK.search(path.name.split(".")[0]) or _RANK.search(path.name)
        if match is None:
            raise DumpError(f"{path}: the name of the file does not end in the rank")
        return [(int(match[1]), loaded)]
    if loaded and all(_is_rank(name) and isinstance(dump, dict) for name, dump in loaded.items()):
        return [(int(name), dump) for name, dump in loaded.items()]
    raise DumpError(f"{path}: neither a dump of a rank nor an object of ranks")


def _is_rank(name: str) -> bool:
    return name.isdecimal() and len(name) <= _RANK_DIGITS_MAX


_MESSAGE: Final = re.compile(r"(send|recv) (\d{1,9})(?:->|<-)(\d{1,9})\b")
_UNEVEN: Final = re.compile(r":(alltoall|all_to_all|allgather|all_gather|gather|scatter|broadcast|barrier)(_v|v)?$")
"""Collectives whose ranks may have different sizes; not their forms for one flat tensor (`_all_gather_base`)."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A collective that some ranks of its group have launched and others have not."""

    group: str
    sequence: int
    operation: str
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    created_ns: int
    """When the first rank launched it."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A collective that ranks have launched in different forms."""

    group: str
    sequence: int
    usual: str
    others: Mapping[int, str]
    """Another operation, size or type, by rank."""


@dataclass(frozen=True, slots=True)
class WaitVerdict:
    """The result of the dumps on a hang."""

    awaited: tuple[int, ...]
    """The ranks that the others wait for, and that wait for nobody themselves; empty: nobody waits."""
    waiting: tuple[Waiting, ...]
    """In the order in which they were launched."""
    mismatches: tuple[Mismatch, ...]
    without_dump: tuple[int, ...]
    """Ranks of the groups that gave no dump; they count as ranks that have launched nothing."""


def evaluate(dumps: Sequence[RankDump]) -> WaitVerdict:
    """Find out who the others wait for."""
    members = {name: ranks for dump in dumps for name, ranks in dump.members.items()}
    reported = {dump.rank for dump in dumps}
    launched: dict[tuple[str, int], dict[int, FlightEntry]] = defaultdict(dict)
    newest: dict[tuple[str, int], int] = {}
    for dump in dumps:
        for entry in dump.entries:
            if not entry.is_message:
                launched[entry.group, entry.sequence][dump.rank] = entry
                newest[entry.group, dump.rank] = max(newest.get((entry.group, dump.rank), -1), entry.sequence)
    waiting: list[Waiting] = []
    mismatches: list[Mismatch] = []
    waits_for: dict[int, set[int]] = defaultdict(set)
    for (group, sequence), entries in launched.items():
        if differs := _mismatch(entries, sequence):
            mismatches.append(differs)
        open_on = sorted(rank for rank, entry in entries.items() if not entry.is_done)
        # A rank whose newest number is higher has launched this one too: its ring holds it no more.
        missing = [
            rank for rank in members.get(group, ()) if rank not in entries and newest.get((group, rank), -1) < sequence
        ]
        if not (open_on and missing):
            continue
        first = min(entries.values(), key=lambda entry: entry.created_ns)
        waiting.append(
            Waiting(first.group_text, sequence, first.operation, tuple(open_on), tuple(missing), first.created_ns)
        )
        for rank in open_on:
            waits_for[rank].update(missing)
    _follow_messages(dumps, members, waits_for)
    everybody = {rank for ranks in members.values() for rank in ranks}
    waiting.sort(key=lambda one: one.created_ns)
    return WaitVerdict(
        _awaited(waits_for, waiting),
        tuple(waiting),
        tuple(sorted(mismatches, key=lambda one: (one.group, one.sequence))),
        tuple(sorted(everybody - reported)),
    )


def _awaited(waits_for: Mapping[int, set[int]], waiting: Sequence[Waiting]) -> tuple[int, ...]:
    awaited = {rank for ranks in waits_for.values() for rank in ranks}
    free = sorted(rank for rank in awaited if not waits_for.get(rank))
    # Where each of them waits for another one, the first collective that was left out began it.
    return tuple(free) if free or not waiting else waiting[0].missing


def _follow_messages(
    dumps: Sequence[RankDump], members: Mapping[str, tuple[int, ...]], waits_for: dict[int, set[int]]
) -> None:
    """Add the waits for messages whose other end has not been launched.

    Sends and receives between two ranks are counted, done or not. Where one ring reaches further back than the other,
    an open message may count although its other end was launched.
    """
    opened: Counter[tuple[str, str, int, int]] = Counter()
    launched: Counter[tuple[str, str, int, int]] = Counter()
    for dump in dumps:
        for entry in dump.entries:
            found = _MESSAGE.search(entry.operation) if entry.is_message else None
            ranks = members.get(entry.group, ())
            if found is None or max(int(found[2]), int(found[3])) >= len(ranks):
                continue
            end = entry.group, found[1], ranks[int(found[2])], ranks[int(found[3])]
            launched[end] += 1
            opened[end] += 0 if entry.is_done else 1
    for (group, way, own, other), count in opened.items():
        opposite = group, "recv" if way == "send" else "send", other, own
        if count and launched[group, way, own, other] > launched[opposite]:
            waits_for[own].add(other)


def _mismatch(entries: Mapping[int, FlightEntry], sequence: int) -> Mismatch | None:
    first = next(iter(entries.values()))
    names = Counter(entry.operation for entry in entries.values())
    uneven = len(names) == 1 and _UNEVEN.search(first.operation) is not None
    forms = {rank: (entry.operation,) if uneven else entry.form for rank, entry in entries.items()}
    counts = Counter(forms.values())
    if len(counts) == 1:
        return None
    usual = counts.most_common(1)[0][0]
    others = {rank: " ".join(map(str, form)) for rank, form in sorted(forms.items()) if form != usual}
    return Mismatch(first.group_text, sequence, " ".join(map(str, usual)), others)


if __name__ == "__main__":
    answer(Dumps().answer)
