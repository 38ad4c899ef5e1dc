"""Evidence of an incident as rows: a readable name, and the value in words with its unit, beside what is usual."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from rich.text import Text

from rankwatch_service.cli import output

_NAMES: Final[Mapping[str, str]] = {
    "age_s": "without progress, as last reported",
    "alerts_firing": "alerts that fire",
    "cost_gpu_hours_per_hour": "cost, as its detector estimates",
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
"""Names of fields that do not say by themselves what they mean."""

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
"""Values that say nothing: their fields are left out."""

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
        if name in compared or value in _UNKNOWN:
            continue
        if name == "stacks" and isinstance(value, list):
            for one in value:
                yield f"  stack of {one['ranks']}", _text(one.get("stack") or one.get("reason"))
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
        else f"{_name(name)} {_value(unit_of if _unit(unit_of) else name, value)}"
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
    shown = f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    return shown + _UNITS.get(_unit(name), "")


def _unit(name: str) -> str:
    return next((end for end in _UNITS if name.endswith(end)), "")


def _is_figure(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _text(value: Any) -> Text:
    return output.block(value) if isinstance(value, str) and "\n" in value else output.plain(value)
