"""Lines of a format that is known, learned as regular expressions, which take a tenth of the time of finding out.

What a number of a line is for is found by changing it and reading the line once more: it is a step, a value, the
clock, or nothing. Words, and numbers that are part of a name or of the rank, stay as they are. So a template reads
what the reader of all lines would, and leaves to it whatever does not fit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from rankwatch.follow.fields import clock_s


class LineReading(NamedTuple):
    """What a line says by a format."""

    step: float | None = None
    total: float | None = None
    epoch: float | None = None
    time: float | None = None
    """As written."""
    clock_s: float | None = None
    values: dict[str, float] = {}  # noqa: RUF012 - a default, which nobody writes to
    is_row: bool = False
    """It reports a step; else its step is one that later lines belong to, and its values are of the newest one."""


Reader = Callable[[str], tuple[LineReading, str] | None]
"""The reading of a line, and the label of its rank; None if it has none."""

TEMPLATES_MAX: Final = 8
"""Templates of one log: its lines differ in how they are aligned, and in durations of hours."""
LEARNED_EVERY: Final = 128
"""Lines without a template for each further one that is learned, which takes as long as to read so many: 10 ms."""

_ROLES: Final = ("step", "total", "epoch", "time", "clock_s")
_CLOCK: Final = "\0clock"
"""Name of a clock's text; roles have such names too, which no value has."""
_GROUPED: Final = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|"
_PART: Final = r"""(?P<kept>\x1b\[[0-9;?]*[A-Za-z]|"[^"\\]*"\s*:|'[^'\\]*'\s*:)
      |(?P<clock>(?<![\w.:-])(?:\d{4}[-/]\d\d[-/]\d\d(?:[T_ ]|,\s?|\s-\s))?\d\d:\d\d:\d\d(?:[.,]\d{1,9})?)
      |(?P<span>(?<![\w.])\d+(?:\ days?,\ \d+)?(?::\d\d)+(?:\.\d+)?|(?<![\w.])(?:\d+[dhms]\s?){2,4}(?!\w))
      |(?P<bar>(?<=%)\|[^|]*\||\[[=>.\x20]{6,}\]|[\u2500-\u259f]+)
      |(?<![\w.@%-])(?P<number>[-+]?(?:GROUPED\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)"""
_NUMBERS: Final = {
    separates: re.compile(_PART.replace("GROUPED", "" if separates else _GROUPED), re.VERBOSE)
    for separates in (False, True)
}
"""By whether commas separate numbers; else they may group digits."""
_DIGITS: Final = "0-9.eE+-"
_LOOSE: Final = {
    "clock": r"[0-9T:_ ,./-]{8,40}",
    "span": r"[0-9:. dayshm,]{2,40}",
    "|": r"\|[^|]{0,400}\|",
    "[": r"\[[=>. ]{6,200}\]",
    "bar": r"[\u2500-\u259f]{1,400}",
}


class LineTemplate:
    """Lines that differ from one in their numbers alone."""

    def __init__(
        self, pattern: str, names: list[str], constants: Mapping[str, float], *, is_grouped: bool, is_row: bool
    ) -> None:
        self._match = re.compile(pattern).fullmatch
        self._is_timed = bool(names) and names[0] == _CLOCK
        """Its first number is a clock."""
        self._names = names[self._is_timed :]
        self._constants = constants
        self._is_grouped = is_grouped
        self._is_row = is_row

    def read(self, text: str) -> LineReading | None:
        """The reading of a line; None if it does not fit."""
        found = self._match(text)
        if found is None:
            return None
        groups, at = found.groups(), None
        if self._is_timed:
            at, groups = clock_s(groups[0]), groups[1:]
        try:
            numbers = map(float, [group.replace(",", "") for group in groups] if self._is_grouped else groups)
            values = {**self._constants, **dict(zip(self._names, numbers, strict=True))}
        except ValueError:
            return None
        step, total, epoch = values.pop("\0step", None), values.pop("\0total", None), values.pop("\0epoch", None)
        time, stamp = values.pop("\0time", None), values.pop("\0clock_s", at)
        return LineReading(step, total, epoch, time, stamp, values, self._is_row)


def template_of(text: str, read: Reader, *, commas_separate: bool) -> LineTemplate | None:
    """The template of a line; None if it has none.

    Args:
        text: the line.
        read: reads any line.
        commas_separate: numbers, as in a table; else they may group digits.
    """
    found = read(text)
    if found is None:
        return None
    base, label = found
    known = _numbers(base)
    parts, names, at, is_grouped = [], [], 0, False
    for token in _NUMBERS[commas_separate].finditer(text):
        kind, start, end = token.lastgroup, token.start(), token.end()
        if kind == "kept" or kind is None:
            continue
        other = read(f"{text[:start]}{_changed(token[0])}{text[end:]}")
        if other is None or other[1] != label or other[0].is_row != base.is_row:
            continue
        changed = _numbers(other[0])
        different = [name for name in known.keys() | changed.keys() if str(known.get(name)) != str(changed.get(name))]
        if not different:
            loose = _LOOSE.get(token[0][0]) or _LOOSE.get(kind) or _number(token[0], text[end : end + 1])
        elif len(different) == 1 and (value := known.get(different[0])) is not None:
            if kind == "number" and float(token[0].replace(",", "")) == value:
                loose = f"({_number(token[0], text[end : end + 1])})"
                names.append(different[0])
                is_grouped |= "," in token[0]
            elif kind == "clock" and different == ["\0clock_s"] and clock_s(token[0]) == value and not names:
                loose = f"({_LOOSE['clock']})"
                names.append(_CLOCK)
            else:
                continue
        else:
            continue
        parts += [_literal(text[at:start]), loose]
        at = end
    taken = {"\0clock_s" if name == _CLOCK else name for name in names}
    if not taken:
        return None
    constants = {name: value for name, value in known.items() if name not in taken}
    pattern = "".join([*parts, _literal(text[at:]), r"\s*"])
    return LineTemplate(pattern, names, constants, is_grouped=is_grouped, is_row=base.is_row)


def _numbers(reading: LineReading) -> dict[str, float]:
    """All numbers of a reading: values by name, others by their role, with a sign before it that no name has."""
    roles = {f"\0{role}": value for role in _ROLES if (value := getattr(reading, role)) is not None}
    return {**reading.values, **roles}


def _changed(token: str) -> str:
    """Another token of the same kind: its last digit is another; a drawing is turned around."""
    found = re.search(r"(\d)(\D*)\Z", token)
    return f"{token[: found.start()]}{'2' if found[1] == '1' else '1'}{found[2]}" if found is not None else token[::-1]


def _number(token: str, after: str) -> str:
    """A pattern of such numbers, which gives nothing back unless what comes after it could be part of it."""
    signs = _DIGITS.replace("0-9", "0-9,") if "," in token else _DIGITS
    return f"[{signs}]{{1,32}}{'' if after in ('.', 'e', 'E', '+', '-', ',') else '+'}"


def _literal(text: str) -> str:
    """A pattern of these words; how many blanks stand before a number, and how many more than one after it, is free."""
    words = text.rstrip(" ")
    before = " {2,}" if words.startswith("  ") else ""
    pattern = before + re.escape(words.lstrip(" ") if before else words)
    if not words:
        return "" if not text else " {2,}" if len(text) > 1 else " "
    return pattern + (" +" if len(words) < len(text) else "")
