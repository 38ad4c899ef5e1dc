"""Which files an incident archive has, and what is in them.

`page.html` is for people, `incident.json` and `commands.json` are for programs; `series/METRIC.csv` has the lines of
the job around the onset, `stacks/` what ranks of a hang were doing, `audit.jsonl` who did what.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from rankwatch_service.incident_archive.page import page
from rankwatch_service.series.query import Segment
from rankwatch_service.series.rollups import ValueMark

COLUMNS: Final = ("attempt", "step", "line", "low", "high", "mark")
"""Of a series: a line is p5, p50, p95 or max over all ranks, or rank:N; a point may cover several steps."""

_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]+|\.{2,}")

Files = dict[str, bytes]
"""By name within the archive."""


def contents(
    incident: Mapping[str, Any],
    commands: Sequence[Mapping[str, Any]],
    series: Mapping[str, Sequence[Segment]],
    audit: Sequence[Mapping[str, Any]] | None,
) -> Files:
    """The files of an incident.

    Args:
        incident: as REST shows it, with its explanations as `why`.
        commands: those that respond to it, as REST shows them.
        series: segments by metric.
        audit: lines of the audit trail; None: whoever asks may not see them.
    """
    files = {
        "page.html": page(incident, commands).encode(),
        "incident.json": _json(incident),
        "commands.json": _json(commands),
    }
    for metric, segments in series.items():
        files[_free(files, f"series/{_file_name(metric)}", ".csv")] = _csv(segments)
    for name, text in stacks(incident["evidence"]):
        files[_free(files, f"stacks/{_file_name(name)}", ".txt")] = text.encode()
    if audit is not None:
        files["audit.jsonl"] = "".join(f"{json.dumps(dict(line), ensure_ascii=False)}\n" for line in audit).encode()
    return files


def stacks(evidence: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(which ranks, text) of each group of ranks with equal stacks."""
    found = evidence.get("stacks") or []
    if isinstance(found, Mapping):  # by rank, as older versions told them
        found = [{"ranks": rank, **one} for rank, one in found.items()]
    return [(f"ranks-{one['ranks']}", str(one.get("stack") or one.get("reason") or "")) for one in found]


def _csv(segments: Iterable[Segment]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for segment in segments:
        for line in segment.lines:
            for step, low, high, mark in zip(segment.step.tolist(), line.low, line.high, line.mark, strict=True):
                if mark != ValueMark.ABSENT:
                    row = (segment.attempt, step, line.name, _value(low), _value(high), ValueMark(mark).name.lower())
                    writer.writerow(row)
    return text.getvalue().encode()


def _value(value: np.float32) -> str:
    """Empty if a point has no finite value: the mark says what it has."""
    return f"{float(value):.9g}" if np.isfinite(value) else ""


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def _file_name(name: str) -> str:
    """A name as files of every system can have it: never a path."""
    return _UNSAFE.sub("_", name).strip(".")[:80] or "_"


def _free(taken: Files, stem: str, suffix: str) -> str:
    """A name that no file has yet: two metrics may have the same file name."""
    name, number = f"{stem}{suffix}", 2
    while name in taken:
        name, number = f"{stem}-{number}{suffix}", number + 1
    return name
