"""Prints why incidents were opened, and why not earlier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rankwatch_service.cli import output

TRAIL_SHOWN: Final = 16
"""Newest points printed of a trail; JSON has all."""


def show(explanations: Sequence[Mapping[str, Any]]) -> None:
    """Print explanations, as `GET /incidents/{id}/why` lists them."""
    if not explanations:
        output.note("no threshold decided: what was seen is a fault by itself, or an older version opened the incident")
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
            (
                output.plain(step),
                output.moment(at),
                output.plain(value),
                output.plain(limit),
                output.plain(lacks),
            )
            for step, at, value, limit, lacks in newest
        ),
        "",
    )
