"""`rankwatch flight-recorder`: which ranks a hang waits for, from the dumps of torch's flight recorder."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankwatch.terminal import json_line, printable
from rankwatch_service.cli.errors import CliError, Status

if TYPE_CHECKING:
    from rankwatch_service.flight_recorder import Waiting, WaitVerdict

FILES = Annotated[list[Path], typer.Argument(metavar="DUMP…", help="One for each rank, or one with all of them.")]
JSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SHOWN_MAX = 8
"""Collectives printed; JSON has all."""


def flight_recorder(files: FILES, as_json: JSON = False) -> None:
    """Show which ranks a hang waits for, from dumps of torch's flight recorder.

    Dumps are JSON, one file for each rank whose name ends in the rank, or one
    object of ranks; also compressed (.gz). Pickles are refused. Those of NCCL
    and of gloo can be read.

    [bold]Examples[/bold]

      rankwatch flight-recorder /tmp/nccl_trace_rank_*.json
      rankwatch flight-recorder ranks.json.gz --json

    Exit status: 0, nobody is waited for; 1, somebody is, or a file cannot be
    read; 2, wrong usage.
    """
    from rankwatch_service.flight_recorder import DumpError, evaluate_files

    try:
        verdict = evaluate_files(files)
    except DumpError as error:
        raise CliError(Status.FINDINGS, str(error)) from error
    if as_json:
        sys.stdout.write(json_line(asdict(verdict)))
    else:
        sys.stdout.write(printable("\n".join(_lines(verdict))) + "\n")
    if verdict.awaited or verdict.mismatches:
        raise typer.Exit(Status.FINDINGS)


def _lines(verdict: WaitVerdict) -> list[str]:
    awaited = f"waited for: {_ranks(verdict.awaited)}" if verdict.awaited else "nobody is waited for"
    lines = [awaited]
    alike: dict[tuple[str, tuple[int, ...]], list[Waiting]] = {}
    for one in verdict.waiting:
        alike.setdefault((one.group, one.missing), []).append(one)
    for first, *later in list(alike.values())[:SHOWN_MAX]:
        more = f" and {len(later)} later" if later else ""
        lines.append(f"{first.operation} {first.sequence}{more} of {first.group}: launched by {_ranks(first.waiting)}")
        lines.append(f"  not launched by {_ranks(first.missing)}")
    if len(alike) > SHOWN_MAX:
        lines.append(f"and {len(alike) - SHOWN_MAX} more groups in which somebody waits (--json has all)")
    for other in verdict.mismatches[:SHOWN_MAX]:
        lines.append(f"collective {other.sequence} of {other.group} differs: usually {other.usual}")
        lines += [f"  rank {rank}: {form}" for rank, form in list(other.others.items())[:SHOWN_MAX]]
    if verdict.without_dump:
        lines.append(f"without a dump, so taken for ranks that launched nothing: {_ranks(verdict.without_dump)}")
    return lines


def _ranks(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"
