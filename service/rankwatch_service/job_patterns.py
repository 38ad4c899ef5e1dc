"""Patterns of job names: `*` stands for any text, `?` for one character, `[c]` for the character c itself. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from glob import escape
from typing import Final

PARTS: Final = re.compile(r"\[(.)\]|(\*)|(\?)|(.)", re.DOTALL)
"""(character in brackets, star, mark, other character) of each part of a pattern."""


def as_glob(pattern: str) -> str:
    """A pattern in which every bracket encloses one character, as fnmatch and GLOB read it."""
    return "".join(star or mark or escape(one or other) for one, star, mark, other in PARTS.findall(pattern))


def matches_any(patterns: Iterable[str], job: str) -> bool:
    """Whether a job's name matches one of the patterns, or there are none. Upper and lower case differ."""
    listed = tuple(patterns)
    return not listed or any(fnmatchcase(job, as_glob(pattern)) for pattern in listed)
