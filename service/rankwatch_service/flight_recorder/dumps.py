"""Reads dumps of torch's flight recorder as JSON: one file for each rank, or one with all. Pickles are refused.

torch writes JSON by `torch._C._distributed_c10d._dump_nccl_trace_json()`, `_dump_fr_trace_json()` and the handler
`fr_trace_json` of its worker server. It records collectives of NCCL, and of gloo.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rankwatch_service.flight_recorder.record import DumpError, RankDump, parsed

BYTES_MAX: Final = 256 * 1024 * 1024
"""Largest dump that is read, unpacked: 2,000 entries of a rank have a two-hundredth of that, without stacks."""
GZIP: Final = b"\x1f\x8b"

_PICKLE: Final = b"\x80"
_RANK: Final = re.compile(r"(\d+)\D*$")


def read_dumps(paths: Sequence[Path]) -> list[RankDump]:
    """The dumps in some files (also compressed by gzip), by rank.

    Raises:
        DumpError: a file is missing, is a pickle, is no dump, or two have the same rank.
    """
    found: dict[int, RankDump] = {}
    for path in paths:
        for rank, dump in _ranks_of(path, _loaded(path)):
            if rank in found:
                raise DumpError(f"{path}: there is another dump of rank {rank}")
            found[rank] = parsed(path, rank, dump)
    return [found[rank] for rank in sorted(found)]


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
    if not isinstance(loaded, dict):
        raise DumpError(f"{path}: no object, so no dump of a flight recorder")
    return loaded


def _ranks_of(path: Path, loaded: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    if "entries" in loaded or "pg_config" in loaded:
        match = _RANK.search(path.name.split(".")[0]) or _RANK.search(path.name)
        if match is None:
            raise DumpError(f"{path}: the name of the file does not end in the rank")
        return [(int(match[1]), loaded)]
    if loaded and all(name.isdecimal() and isinstance(dump, dict) for name, dump in loaded.items()):
        return [(int(name), dump) for name, dump in loaded.items()]
    raise DumpError(f"{path}: neither a dump of a rank nor an object of ranks")
