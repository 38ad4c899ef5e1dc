"""Output of commands: tables for people, one JSON object per line for programs.

Names of jobs and comments may contain control codes; none of them reaches the terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from threading import Timer
from typing import Any, Final, TextIO

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
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

NO_VALUE: Final = "–"
BESIDE_MIN: Final = 48
"""Width from which sentences stand beside the other columns."""
CUT_MIN: Final = 8
"""Width to which another column is cut at most."""

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
    found = list(rows)
    if found:
        _print(new_table(headings, found))
    elif empty:
        note(empty)


def new_table(headings: Iterable[str], rows: Iterable[Iterable[Cell]]) -> RenderableType:
    """A table that fits the terminal; in a pipe each row is a line, and nothing is cut.

    At a terminal columns without any value are left out, and sentences, which are the last column, are wrapped beside
    the others or, where there is little room, below them. Only if the others alone are too wide they are cut with …;
    ids are whole everywhere, so that they can be copied.
    """
    lines = [[cell if isinstance(cell, Text) else Text(printable(cell)) for cell in row] for row in rows]
    columns = [
        (heading, [line[at] for line in lines])
        for at, heading in enumerate(headings)
        if not sys.stdout.isatty() or any(line[at].plain != NO_VALUE for line in lines)
    ]
    widths = [max(len(heading), *map(longest_line, cells)) if cells else 0 for heading, cells in columns]
    fixed = [any(cell.no_wrap for cell in cells) for _, cells in columns]
    if sys.stdout.isatty():
        room = Console().width - 2 * (len(columns) - 1)
        if _are_sentences(columns[-1][1]) and room - sum(widths[:-1]) < min(widths[-1], BESIDE_MIN):
            *columns, (_, sentences) = columns
            _fit(widths := widths[:-1], fixed, room + 2)
            return Group(*_stacked(columns, widths, sentences))
        _fit(widths, fixed, room)
    table = Table(box=None, pad_edge=False, header_style="bold dim")
    for at, (heading, cells) in enumerate(columns):
        wraps = at == len(columns) - 1 and _are_sentences(cells)
        table.add_column(heading, width=widths[at], no_wrap=not wraps, overflow="fold" if wraps else "ellipsis")
    for line in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(*line)
    return table


def _are_sentences(cells: Sequence[Text]) -> bool:
    return any(" " in cell.plain and not cell.no_wrap for cell in cells)


def _stacked(
    columns: Sequence[tuple[str, Sequence[Text]]], widths: Sequence[int], sentences: Sequence[Text]
) -> Iterator[RenderableType]:
    """Each row with its sentence below it."""

    def line(cells: Iterable[Text]) -> Text:
        fitted = [cell.copy() for cell in cells]
        for cell, width in zip(fitted, widths, strict=True):
            cell.truncate(width, overflow="ellipsis", pad=True)
        return Text("  ").join(fitted)

    yield line(Text(heading, style="bold dim") for heading, _ in columns)
    for *cells, sentence in zip(*(cells for _, cells in columns), sentences, strict=True):
        yield line(cells)
        yield Padding(sentence, (0, 0, 0, 2))


def longest_line(text: Text) -> int:
    """The widest line of a text, in places of the terminal."""
    return max(map(cell_len, text.plain.split("\n")))


def _fit(widths: list[int], fixed: Sequence[bool], room: int) -> None:
    """Make columns narrower until they fit: the last one first, since it wraps, then the widest one that is no id."""
    if len(fixed) == len(widths) and not fixed[-1]:
        widths[-1] = max(min(widths[-1], room - sum(widths[:-1])), min(widths[-1], BESIDE_MIN))
    while sum(widths) > room:
        widest = max((at for at in range(len(widths)) if not fixed[at]), key=widths.__getitem__, default=0)
        if fixed[widest] or widths[widest] <= CUT_MIN:
            return
        widths[widest] -= 1


def print_fields(fields: Iterable[tuple[str, Cell]]) -> None:
    """Print names and values in two columns; a field without a value is left out."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in fields:
        text = value if isinstance(value, Text) else Text(printable(value))
        if text.plain not in ("", NO_VALUE):
            table.add_row(name, text)
    _print(table)


def _print(table: RenderableType) -> None:
    """Print to stdout. In a pipe or a file, lines are not wrapped, and nothing is behind their last word."""
    if sys.stdout.isatty():
        Console().print(table)
        return
    console = Console(width=PIPE_COLUMNS)
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def note(message: str) -> None:
    """Print a message that is not data, to stderr."""
    # A path that is broken over lines cannot be copied.
    Console(stderr=True).print(Text(printable(message)), soft_wrap=True)


def plain(value: Any) -> Text:
    """Any value as text, without control codes and not parsed as markup."""
    if value is None or value == "" or value == []:
        return Text(NO_VALUE, style="dim")
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
    return identifier(f"{datetime.fromtimestamp(unix_ns // 1_000_000_000, UTC):%Y-%m-%d %H:%M:%S}Z")


def clock(unix_ns: int | None) -> Text:
    """A time for a column: at a terminal, without the date where that is today's."""
    from rankwatch_service.clock import SystemClock

    text = moment(unix_ns)
    today = moment(SystemClock().unix_ns()).plain[: len("2026-01-01 ")]
    return identifier(text.plain.removeprefix(today)) if sys.stdout.isatty() else text


def age(unix_ns: int) -> str:
    """How long ago a time was: `4 min 3 s`."""
    from rankwatch_service.clock import SystemClock
    from rankwatch_service.incidents.answers import duration

    return duration((SystemClock().unix_ns() - unix_ns) / 1e9)


PROGRESS_AFTER_S: Final = 2.0
"""What takes less time needs no bar."""


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[int, str], None]]:
    """Show on stderr how far something is that takes its time, if that is a terminal; it is gone at the end.

    Args:
        what: what is done.
        total: of whatever is counted, where it is known; the time left is shown then.

    Yields:
        what is told how much is done, and a few words beside the bar.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[beside]}", markup=False),
        TimeElapsedColumn() if total is None else TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task(what, total=total, beside="")
    late = Timer(PROGRESS_AFTER_S, bar.start)
    late.daemon = True
    late.start()
    try:
        yield lambda done, beside: bar.update(task, completed=done, beside=beside)
    finally:
        late.cancel()
        late.join()
        bar.stop()


def megabytes(count: int) -> str:
    """A number of bytes."""
    return f"{count / 1e6:,.1f} MB"


def done(said: str, result: Mapping[str, Any], as_json: bool) -> None:
    """Print what a command has done: a sentence on stderr, or an object on stdout."""
    if as_json:
        print_json([result])
    else:
        note(said)


def show(things: Iterable[dict[str, Any]], as_json: bool, columns: Columns, empty: str) -> None:
    """Print a list as JSON or as a table with these columns."""
    if as_json:
        print_json(things)
    else:
        print_table(columns, ([cell(thing) for cell in columns.values()] for thing in things), empty)
