"""Patterns of names of jobs: `*` stands for any text, `?` for one character, `[c]` for the character c itself. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from glob import escape
from typing import Final

_PART: Final = re.compile(r"\[(.)\]|(\*)|(\?)|(.)", re.DOTALL)


def parts(pattern: str) -> list[tuple[str, str, str, str]]:
    """The parts of a pattern: each is a character in brackets, a star, a question mark or another character."""
    found: list[tuple[str, str, str, str]] = _PART.findall(pattern)
    return found


def as_glob(pattern: str) -> str:
    """A pattern in which every bracket encloses one character, as fnmatch and GLOB read it."""
    return "".join(star or mark or escape(one or other) for one, star, mark, other in parts(pattern))


def matches(pattern: str, job: str) -> bool:
    """Whether the name of a job matches a pattern. Upper and lower case differ."""
    return fnmatchcase(job, as_glob(pattern))


def matches_any(patterns: Iterable[str], job: str) -> bool:
    """Whether the name of a job matches one of the patterns, or there are none."""
    listed = tuple(patterns)
    return not listed or any(matches(pattern, job) for pattern in listed)
