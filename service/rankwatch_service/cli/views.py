"""Tables and texts of commands: the evidence of an incident, explanations, traces, and what a command asks before."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import typer
from rich.text import Text

from rankwatch_service.cli import output
from rankwatch_service.cli.client import job_path
from rankwatch_service.cli.errors import CliError, Status
from rankwatch_service.incidents.lost_time import cost_unit

if TYPE_CHECKING:
    from rankwatch_service.cli.client import CliClient

_NAMES: Final[Mapping[str, str]] = {
    "age_s": "without progress, as last reported",
    "alerts_firing": "alerts that fire",
    "how": "exit status is from",
    "log_likelihood_ratio": "log-likelihood ratio",
    "os_state": "process state",
    "peers_busy_s": "peers",
    "phase_excess_s": "over the peers by phase",
    "ranks_stand": "where the ranks stand",
    "rate": "relative speed",
    "ratio": "slowdown factor",
    "rows": "steps compared",
    "sigma": "usual spread",
    "stacks_left_out": "stacks not shown",
    "url": "query",
    "witness": "judged by",
}
"""Names of fields that need an explanation."""

_ABOVE: Final = frozenset({"cost_gpu_hours_per_hour"})
"""Fields whose figure stands among those of the incident."""

_VALUES: Final[Mapping[str, Mapping[str, str]]] = {
    "how": {"pidfd": "the kernel", "zombie": "the process table"},
    "os_state": {
        "R": "running",
        "S": "sleeping",
        "D": "waiting in the kernel",
        "T": "stopped by a signal",
        "t": "stopped by a debugger",
        "Z": "ended, not collected by its parent",
        "X": "ended",
        "I": "idle",
    },
}
"""Values that are codes, by field."""

_USUAL: Final[Mapping[str, tuple[str, ...]]] = {
    "age_s": ("deadline_s",),
    "since_s": ("usual_s",),
    "seconds": ("usual_s",),
    "stage_busy_s": ("others_busy_s",),
    "value": ("usual", "best", "threshold", "level"),
}
"""Fields that a field is compared with, besides those of its name with peers_, usual_ or baseline_ before it."""

_UNKNOWN: Final[tuple[Any, ...]] = (None, "", "?", "unknown", [], {})
"""Values without information: their fields are left out."""

_UNITS: Final[Mapping[str, str]] = {
    "_bytes_per_s": " bytes/s",
    "_bits_per_s": " bit/s",
    "_per_s": "/s",
    "_s": " s",
    "_bytes": " bytes",
    "_celsius": " °C",
    "_w": " W",
    "_hz": " Hz",
}
"""By the end of a name, the longer ends first."""


def evidence_rows(evidence: Mapping[str, Any]) -> Iterator[tuple[str, Text]]:
    """Names and values, in the order of the evidence; fields without a value are left out.

    Of stacks, each group of ranks is a row, and of lists of objects each object. A figure that is compared with another
    one has it in its row.
    """
    compared = {usual for name in evidence if (usual := _usual(name, evidence))}
    for name, value in evidence.items():
        if name in compared or name in _ABOVE or value in _UNKNOWN:
            continue
        if name == "stacks" and isinstance(value, list):
            for one in value:
                yield f"  stack of {one['ranks']}", _text(one.get("stack") or one.get("reason"))
        elif name == "output" and isinstance(value, list):
            yield "  output", output.block("\n".join(map(str, value)))
        elif isinstance(value, list) and all(isinstance(one, dict) for one in value):
            for one in value:
                yield f"  {_name(name)}", _text(_line(one))
        else:
            yield f"  {_name(name)}", _text(_told(name, value, evidence))


def _usual(name: str, evidence: Mapping[str, Any]) -> str | None:
    """The field that says how large the figure `name` usually is; None: there is none."""
    if not _is_figure(evidence[name]):
        return None
    wanted = (f"peers_{name}", f"usual_{name}", f"baseline_{name}", f"{name}_baseline", *_USUAL.get(name, ()))
    return next((usual for usual in wanted if _is_figure(evidence.get(usual))), None)


def _told(name: str, value: Any, evidence: Mapping[str, Any]) -> str:
    usual = _usual(name, evidence)
    if usual is None:
        return _line(value, name) if isinstance(value, dict) else _value(name, value)
    against = evidence[usual]
    times = f", {value / against:.3g} times that" if value > 0 and against > 0 else ""
    return f"{_value(name, value)}; {_name(usual)}: {_value(usual, against)}{times}"


def _line(fields: Mapping[str, Any], unit_of: str = "") -> str:
    """Fields as one line; those of another field in brackets. If `unit_of` has a unit, it is that of the numbers."""
    return ", ".join(
        f"{_name(name)} ({_line(value, name)})"
        if isinstance(value, dict)
        else f"{_name(name)} {_value(unit_of if _unit(unit_of) or unit_of == 'pids' else name, value)}"
        for name, value in fields.items()
        if value not in _UNKNOWN
    )


def _name(name: str) -> str:
    """What a field means, without its unit.

    >>> _name("busy_s"), _name("retransmissions_per_s"), _name("os_state")
    ('busy', 'retransmissions', 'process state')
    """
    return _NAMES.get(name, name.removesuffix(_unit(name)).replace("_", " "))


def _value(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return _VALUES.get(name, {}).get(value, value)
    if isinstance(value, list):
        return ", ".join(_value(name, one) for one in value)
    if not _is_figure(value):
        return str(value)
    shown = str(value) if name == "pids" else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    return shown + _UNITS.get(_unit(name), "")


def _unit(name: str) -> str:
    return next((end for end in _UNITS if name.endswith(end)), "")


def _is_figure(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _text(value: Any) -> Text:
    return output.block(value) if isinstance(value, str) and "\n" in value else output.plain(value)


TRAIL_SHOWN: Final = 16
"""Newest points printed of a history; JSON has all."""


def show_explanations(explanations: Sequence[Mapping[str, Any]]) -> None:
    """Print explanations, as `GET /incidents/{id}/why` lists them."""
    if not explanations:
        output.print_fields([("why", "no threshold decided: what was seen is a fault by itself")])
    for one in explanations:
        rows = dict(one["rows"])
        judged = rows.pop("judged", 0)
        left_out = _counted(rows)
        fields = [
            ("why", f"{one['kind']} of {one['scope']}: {one['why']}"),
            ("why not earlier", one["why_not_earlier"]),
            ("steps judged", judged),
            ("left out", left_out),
        ]
        output.print_fields((name, output.plain(text)) for name, text in fields)
        _earlier(one)
        _trail(one["points"])


def show_judged(found: Mapping[str, Any]) -> None:
    """Print what is judged of a job, as `GET /jobs/{job}/judged` returns it."""
    if found["at_unix_ns"] is None:
        output.note("not known: the job is idle, or began within the last minute")
        return
    output.print_fields([("as of", output.moment(found["at_unix_ns"]))])
    output.print_table(
        ("kind", "detector", "rows judged", "left out"),
        (
            (
                output.plain(one["kind"]),
                output.plain(one["detector"]),
                output.plain(one["rows"] if one["judged"] else f"none: {one['why_not']}"),
                output.plain(_counted(one["left_out"])),
            )
            for one in found["items"]
        ),
        "nothing is judged yet",
    )
    output.print_table(
        ("smallest fault reported today", "noise of a row", "by steps since its onset"),
        (
            (output.plain(fault["fault"]), output.plain(fault["noise"]), output.plain(_by_rows(fault)))
            for one in found["items"]
            for fault in one["smallest"]
        ),
        "",
    )
    output.print_table(
        ("kind", "judged by a rule"),
        ((output.plain(rule["kind"]), output.plain(rule["rule"])) for rule in found["rules"]),
        "",
    )


def _counted(reasons: Mapping[str, int]) -> str:
    return "; ".join(f"{reason} {count}" for reason, count in reasons.items())


def _by_rows(fault: Mapping[str, Any]) -> str:
    return ", ".join(f"{one['rows']}: {sized(one['size'], fault['unit']) or 'none'}" for one in fault["sizes"])


def sized(size: float | str | None, unit: str) -> str:
    """A size in its unit; empty if it is not known."""
    if size is None or isinstance(size, str):  # NaN, Inf and -Inf are words
        return size or ""
    return {"ratio": f"{size:.3f} times", "s": f"{size:.3g} s"}.get(unit, f"{size:.4g}")


def _earlier(explanation: Mapping[str, Any]) -> None:
    unit, earlier = explanation["unit"], explanation["earlier"]
    if earlier:
        output.print_table(
            ("steps after the onset", "it was", "it needed"),
            (
                (str(one["rows"]), sized(one["size"], unit) or "–", sized(one["needed"], unit) or "more steps")
                for one in earlier
            ),
            "",
        )


def _trail(points: Mapping[str, Sequence[Any]]) -> None:
    """The newest points of the statistic against its threshold."""
    names = ("step", "at_unix_ns", "value", "threshold", "missing")
    newest = list(zip(*(points[name] for name in names), strict=True))[-TRAIL_SHOWN:]
    output.print_table(
        ("step", "time", "statistic", "threshold", "lacks"),
        (
            (output.plain(step), output.moment(at), output.plain(value), output.plain(limit), output.plain(lacks))
            for step, at, value, limit, lacks in newest
        ),
        "",
    )


_TRACE_UNITS: Final = ("B", "kB", "MB", "GB", "TB")


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
    while count >= 1000 and unit < len(_TRACE_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.4g} {_TRACE_UNITS[unit]}"


BACK: Final = ("rollback", "relaunch")
"""Commands after which a job trains on from a checkpoint."""
CHECKPOINTS: Final = 200
"""How many of the newest checkpoints are looked at."""


def confirm(client: CliClient, job: str, body: Mapping[str, Any], *, asked: bool) -> None:
    """Ask for confirmation of a command, at a terminal only, and unless `asked` is false.

    Raises:
        CliError: the answer is no.
    """
    if not asked or not sys.stdin.isatty():
        return
    found = client.get(job_path(job))
    entries = list(client.items(f"{job_path(job)}/checkpoints", CHECKPOINTS)) if body["action"] in BACK else []
    output.note(cost(found, entries, body))
    if not typer.confirm("Continue?", err=True):
        raise CliError(Status.USAGE, "nothing was requested")


def cost(job: Mapping[str, Any], checkpoints: Sequence[Mapping[str, Any]], body: Mapping[str, Any]) -> str:
    """What a command costs, as one sentence.

    Args:
        job: as `/jobs/{job}` gives it.
        checkpoints: its checkpoints, newest first.
        body: the request of the command.
    """
    about = f"{body['action']} {job['name']}: {job['world_size']:,} ranks"
    if body["action"] not in BACK:
        return f"{about} end their training at step {_number(job['step'])} or just after it."
    target = None if body["params"].get("from_scratch") else _target(checkpoints, body["params"].get("checkpoint"))
    if target is None:
        return f"{about} begin again as the script says: no checkpoint is known to go back to."
    step = max((job["step"] or 0) - target["step"], 0)
    at_s = job["step_time_s"]
    hours = "" if not at_s else f", about {step * at_s * job['world_size'] / 3600:.3g} {cost_unit(job['accelerated'])}"
    return (
        f"{about} go from step {_number(job['step'])} back to step {target['step']:,}, saved "
        f"{output.moment(target['saved_unix_ns'])}: {step:,} steps are done again{hours}."
    )


def _target(checkpoints: Sequence[Mapping[str, Any]], chosen: str | None) -> Mapping[str, Any] | None:
    fit = (one for one in checkpoints if (one["id"] == chosen if chosen else one["verdict"] == "good"))
    return next(fit, None)


def _number(step: int | None) -> str:
    return "none" if step is None else f"{step:,}"
