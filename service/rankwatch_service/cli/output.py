"""Output of commands: tables for people, one JSON object per line for programs.

Names of jobs and comments may contain control codes; none of them reaches the terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rankwatch.terminal import json_line, printable

SEVERITY_STYLES: Final[Mapping[str, str]] = {"critical": "bold red", "warning": "yellow", "info": "cyan"}

STATE_STYLES: Final[Mapping[str, str]] = {
    "running": "green",
    "stalled": "bold red",
    "log_not_understood": "bold red",
    "applied": "green",
    "good": "green",
    "resolved": "green",
    "paused": "yellow",
    "acknowledged": "yellow",
    "open": "bold red",
    "lost": "bold red",
    "valid": "green",
    "expired": "yellow",
    "revoked": "red",
    "failed": "red",
    "refused": "red",
    "suspect": "red",
}

PIPE_COLUMNS: Final = 2_000
"""Longer than any line of ours."""

Cell = Text | str
Columns = Mapping[str, Callable[[dict[str, Any]], Cell]]
"""What stands in the column, by heading."""


def print_json(things: Iterable[Mapping[str, Any]], out: TextIO | None = None) -> None:
    """Print each as one line of JSON, to stdout or a file."""
    out = out or sys.stdout
    for thing in things:
        out.write(json_line(thing))


def print_table(headings: Iterable[str], rows: Iterable[Iterable[Cell]], empty: str) -> None:
    """Print a table to stdout; if it has no rows, print `empty` to stderr."""
    table = new_table(headings, rows)
    if table.row_count:
        _console().print(table)
    else:
        note(empty)


def new_table(headings: Iterable[str], rows: Iterable[Iterable[Cell]]) -> Table:
    """A table whose ids are not broken over lines."""
    table = Table(box=None, pad_edge=False, header_style="bold dim")
    lines = [list(row) for row in rows]
    for at, heading in enumerate(headings):
        table.add_column(heading, overflow="fold", no_wrap=any(_is_identifier(line[at]) for line in lines))
    for line in lines:
        table.add_row(*(cell if isinstance(cell, Text) else Text(printable(cell)) for cell in line))
    return table


def print_fields(fields: Iterable[tuple[str, Cell]]) -> None:
    """Print names and values in two columns."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold dim")
    table.add_column(overflow="fold")
    for name, value in fields:
        table.add_row(name, value if isinstance(value, Text) else Text(printable(value)))
    _console().print(table)


def _is_identifier(cell: Cell) -> bool:
    return isinstance(cell, Text) and bool(cell.no_wrap)


def _console() -> Console:
    """Stdout. Lines are not wrapped in a pipe or a file."""
    return Console() if sys.stdout.isatty() else Console(width=PIPE_COLUMNS)


def note(message: str) -> None:
    """Print a message that is not data, to stderr."""
    # A path that is broken over lines cannot be copied.
    Console(stderr=True).print(Text(printable(message)), soft_wrap=True)


def plain(value: Any) -> Text:
    """Any value as text, without control codes and not parsed as markup."""
    if value is None or value == "" or value == []:
        return Text("–", style="dim")
    if isinstance(value, float):
        value = f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        value = " ".join(str(one) for one in value)
    return Text(printable(value))


def identifier(value: Any) -> Text:
    """An id; never wrapped, so that it can be copied."""
    text = plain(value)
    text.no_wrap = True
    return text


def block(value: str) -> Text:
    """A text of several lines, without control codes."""
    return Text("\n".join(plain(line).plain if line else "" for line in value.split("\n")))


def severity(value: str) -> Text:
    """A severity in its colour."""
    return Text(plain(value).plain, style=SEVERITY_STYLES.get(value, ""))


def state(value: str) -> Text:
    """A state in its colour."""
    return Text(plain(value).plain, style=STATE_STYLES.get(value, ""))


def incident_state(incident: Mapping[str, Any]) -> Text:
    """The state of an incident; "job ended" where its trouble lasted until then."""
    return state("job ended" if ended_with_job(incident) else incident["state"])


def ended_with_job(incident: Mapping[str, Any]) -> bool:
    """Whether the job ended before this incident was over."""
    return bool(incident["state"] == "resolved" and incident["evidence"].get("ended_with_job"))


def short_id(full_id: str) -> Text:
    """An id as people type it."""
    from rankwatch_service.names import short

    return identifier(short(full_id))


def command_state(command: Mapping[str, Any]) -> Text:
    """A command's state; for a rollback with its mode: `applied (full)`."""
    mode = f" ({command['mode']})" if command.get("mode") else ""
    return Text(plain(command["state"] + mode).plain, style=STATE_STYLES.get(command["state"], ""))


def moment(unix_ns: int | None, empty: str = "") -> Text:
    """A time as UTC, to the second; without one, what stands for that."""
    if unix_ns is None:
        return plain(empty)
    return Text(f"{datetime.fromtimestamp(unix_ns // 1_000_000_000, UTC):%Y-%m-%d %H:%M:%S}Z")


def show(things: Iterable[dict[str, Any]], as_json: bool, columns: Columns, empty: str) -> None:
    """Print a list as JSON or as a table with these columns."""
    if as_json:
        print_json(things)
    else:
        print_table(columns, ([cell(thing) for cell in columns.values()] for thing in things), empty)
