"""What jobs, attempts, hosts and boots can be called, what is an e-mail address, and how a text stays on its line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from glob import escape
from typing import Final

ALL_JOBS: Final = "*"
"""Means every job: the key of control records for all jobs. No job can have this name."""

OF_DEVICES: Final = {"gpu": "/devices", "port": "/ports", "host": "/hosts"}
"""The end of the name of their series, by kind of device. No job's name contains a slash."""

NAME_CHARS_MAX: Final = 200
"""Longest job, attempt, host and boot name: a DNS name has at most 253, a URL wants less."""

_ADDRESS: Final = re.compile(
    r"[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]{1,64}@[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252}[A-Za-z0-9])?", re.ASCII
)


def is_name(text: str) -> bool:
    """Whether a job, attempt, host or boot can be called this.

    Names appear in URLs, on pages, in terminals and in file names. So they are printable, which excludes zero-width
    characters and those that change the direction of writing, have no spaces at their ends and no slash, and are
    neither `.` nor `..`.
    """
    return (
        0 < len(text) <= NAME_CHARS_MAX
        and text.isprintable()
        and text == text.strip()
        and "/" not in text
        and text not in (".", "..")
    )


def plain_host(host: str) -> str:
    """The name of a host as its agents report it, without the suffix that distinguishes it from others within a job.

    >>> plain_host("node-1/3fa9c1d2")
    'node-1'
    """
    return host.partition("/")[0]


def series_of_devices(job: str, kind: str) -> str:
    """The name under which the series of a job's devices of a kind are kept."""
    return job + OF_DEVICES[kind]


def series_of(job: str) -> tuple[str, ...]:
    """The names of all series of a job: of its ranks, and of its devices."""
    return (job, *(job + end for end in OF_DEVICES.values()))


def launch_of(attempt: str) -> str:
    """The LAUNCH of LAUNCH.k."""
    return attempt.rpartition(".")[0]


def number_of(attempt: str) -> int:
    """The k of LAUNCH.k: how often its processes have been rolled back."""
    return int(attempt.rpartition(".")[2])


def is_address(text: str) -> bool:
    """Whether a text is one e-mail address, in ASCII."""
    return bool(_ADDRESS.fullmatch(text))


def one_line(text: str) -> str:
    r"""The text without line breaks and other characters that cannot be printed.

    >>> one_line("a\nb")
    'a b'
    """
    return "".join(char if char.isprintable() else " " for char in text)


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


SHORT_DIGITS: Final = 10
"""With 10,000 ids, two have equal short ids in one of 20,000 services; the service then asks for more digits."""

TYPED_MIN: Final = 6
"""Fewer digits are considered a typing error."""


def short(full_id: str) -> str:
    """The short form of an id.

    >>> short("inc_3f9a2c1bd17744aa20c1d2e3")
    '3f9a2c1bd1'
    """
    return full_id.partition("_")[2][:SHORT_DIGITS] or full_id


def typed(given: str, prefix: str) -> str:
    """The beginning of an id that a person typed, with or without its prefix or a number sign.

    >>> typed("#3f9a2c", "inc_"), typed("inc_3f9a2c", "inc_")
    ('inc_3f9a2c', 'inc_3f9a2c')
    """
    return prefix + given.strip().lstrip("#").removeprefix(prefix)
