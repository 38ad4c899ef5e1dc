"""Prints what ranks recorded for a trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import typer

from rankwatch_service.cli import output
from rankwatch_service.cli.errors import Status

_UNITS: Final = ("B", "kB", "MB", "GB", "TB")


def show_traces(command: Mapping[str, Any], as_json: bool) -> None:
    """Print the traces of a command as tables, or as one line of JSON for each rank.

    Raises:
        typer.Exit: no rank has recorded anything.
    """
    if as_json:
        output.print_json(command["traces"])
    else:
        for trace in command["traces"]:
            if trace["summary"]:
                _show(trace["rank"], trace["summary"])
        result = f": {command['result']}" if command["result"] else ""
        output.note(f"trace {command['job']}: {command['state']}{result} ({output.short_id(command['id'])})")
    if not any(trace["summary"] for trace in command["traces"]):
        raise typer.Exit(Status.FINDINGS)


def _show(rank: int, summary: Mapping[str, Any]) -> None:
    steps, times_s = len(summary["step_times_s"]), summary["step_times_s"]
    last = summary["step"] + steps - 1
    output.print_fields(
        [
            ("rank", output.plain(rank)),
            ("steps", output.plain(f"{summary['step']} to {last}" if steps > 1 else summary["step"])),
            ("step time", output.plain(" ".join(map(_time, times_s)))),
            ("device idle", output.plain(None if summary["idle_ratio"] is None else f"{summary['idle_ratio']:.1%}")),
        ]
    )
    whole_s = sum(times_s) or 1.0
    _table(
        ("kind", "time", "of the steps"),
        [(kind, _time(time_s), f"{time_s / whole_s:.1%}") for kind, time_s in summary["kinds"].items()],
    )
    _table(
        ("group", "collective", "calls", "bytes", "time"),
        [
            (one["group"], one["name"], one["count"], _size(one["bytes"]), _time(one["time_s"]))
            for one in summary["collectives"]
        ],
    )
    _table(
        ("device", "stream", "kernels", "busy"),
        [(one["device"], one["stream"], one["count"], _time(one["time_s"])) for one in summary["streams"]],
    )
    _table(
        ("kernel" if summary["on_device"] else "operation", "kind", "calls", "own time"),
        [(one["name"], one["kind"], one["count"], _time(one["time_s"])) for one in summary["top"]],
    )


def _table(headings: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    if rows:
        print()
        output.print_table(headings, [map(output.plain, row) for row in rows], "")


def _time(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.3f} ms"


def _size(count: float) -> str:
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.4g} {_UNITS[unit]}"
