"""Faults written as text: `straggler:rank=17,factor=1.1,at=500`."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from rankwatch_service.simulate.job import Job
from rankwatch_service.simulate.script.catalogue import FAULTS, HARMLESS, FaultSpec


class ScriptError(ValueError):
    """A fault is written wrongly; the message says what is wrong and how it is written."""


def apply(text: str, job: Job) -> Job:
    """The same job with one more fault, written as `name` or `name:parameter=value,…`.

    Raises:
        ScriptError: the text is malformed, or this job cannot have the fault.
    """
    name, _, given = text.partition(":")
    spec = FAULTS.get(name) or HARMLESS.get(name)
    if spec is None:
        near = difflib.get_close_matches(name, [*FAULTS, *HARMLESS], 1)
        hint = f"did you mean {near[0]}?" if near else "`--list-faults` lists all"
        raise ScriptError(f"there is no {name!r}; {hint}")
    try:
        return spec.apply(job, **_values(spec, given, job))
    except ValueError as error:
        raise ScriptError(f"{text}: {error}; it is written {usage(name)}") from error


def usage(name: str) -> str:
    """How a fault is written, with its defaults: `hang:rank=…,at=…[,seconds=60]`."""
    spec = FAULTS.get(name) or HARMLESS[name]
    shown = ""
    for called, parameter in spec.parameters.items():
        if parameter.default is ...:
            shown += f",{called}=…"
        else:
            default = "…" if parameter.default in (None, "") else parameter.default
            shown += f"[,{called}={default:g}]" if isinstance(default, float) else f"[,{called}={default}]"
    if shown.startswith("["):
        return f"{name}[:{shown[2:]}"
    return f"{name}:{shown[1:]}"


def _values(spec: FaultSpec, given: str, job: Job) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for called, text in _pairs(given):
        if called not in spec.parameters:
            raise ValueError(f"there is no parameter {called!r}")
        if called in values:
            raise ValueError(f"{called} is given twice")
        try:
            values[called] = spec.parameters[called].read(text, job)
        except ValueError as error:
            unreadable = "could not convert" in str(error) or "invalid" in str(error)
            raise ValueError(f"{called}: {f'{text!r} is not a number' if unreadable else error}") from error
    missing = [name for name, one in spec.parameters.items() if name not in values and one.default is ...]
    if missing:
        raise ValueError(f"{', '.join(missing)} must be given")
    values = {name: values.get(name, one.default) for name, one in spec.parameters.items()}
    if values.get("until") is not None and values["until"] <= values["at"]:
        raise ValueError(f"until: must be after {values['at']}")
    if "to" in values and values["to"] > values["at"]:
        raise ValueError(f"to: must not be after {values['at']}")
    return values


def _pairs(given: str) -> Iterator[tuple[str, str]]:
    for part in given.split(",") if given else ():
        called, equals, text = part.partition("=")
        if not equals:
            raise ValueError(f"{part!r} is not name=value")
        yield called.strip(), text.strip()
