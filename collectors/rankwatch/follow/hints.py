"""What a person says of a log: the names of its fields, or a pattern; remembered for each job."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROLES: Final = ("step", "loss", "time")
JOBS_MAX: Final = 200
"""Jobs that are remembered; the one that was named first is forgotten."""


@dataclass(frozen=True, slots=True)
class Hints:
    """What a person says of a log."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Those of `step`, `loss` and `time`."""
    pattern: re.Pattern[str] | None = None
    """Has a group for each number, by the name of the group."""

    @property
    def wanted(self) -> dict[str, str]:
        """The names of the fields."""
        groups = self.pattern.groupindex if self.pattern is not None else {}
        return {**{role: role for role in ROLES if role in groups}, **self.names}


def hints_of(given: Mapping[str, str | None]) -> Hints:
    """Hints of options: `step`, `loss`, `time` and `pattern`, of which any may be missing or empty.

    Raises:
        re.error: the pattern is no regular expression.
    """
    names = {role: name for role in ROLES if (name := given.get(role))}
    pattern = given.get("pattern")
    return Hints(names, re.compile(pattern) if pattern else None)


def remembered(path: Path, job: str, given: Mapping[str, str | None]) -> dict[str, str]:
    """The options of a job: those that are given, and these are remembered, else those of the last time.

    Args:
        path: of the file that remembers. One that cannot be read or written remembers nothing.
        job: by name.
        given: by name of the option; None or "": not given.
    """
    options = {name: text for name, text in given.items() if text}
    try:
        known = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        known = {}
    known = known if isinstance(known, dict) else {}
    if not options:
        last = known.get(job)
        last = last if isinstance(last, dict) else {}
        return {name: last[name] for name in given if isinstance(last.get(name), str)}
    known.pop(job, None)
    newest = dict([*known.items(), (job, options)][-JOBS_MAX:])
    fresh = path.with_name(f"{path.name}.new")
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh.write_text(json.dumps(newest))
        os.replace(fresh, path)
    return options
