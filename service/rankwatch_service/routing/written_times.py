"""Durations and time intervals as people write them in a file of routes; the syntax is that of Alertmanager."""

from __future__ import annotations

import re
from calendar import day_name, month_name
from collections.abc import Sequence
from typing import Annotated, Any, Final
from zoneinfo import ZoneInfo

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from rankwatch_service.routing.time_interval import Span, TimeInterval

_UNITS_S: Final = {"y": 31_536_000, "w": 604_800, "d": 86_400, "h": 3_600, "m": 60, "s": 1, "ms": 0.001}
_DURATION: Final = re.compile("".join(rf"(?:(\d+){unit})?" for unit in _UNITS_S))
_WEEKDAYS: Final = (day_name[6].lower(), *(name.lower() for name in day_name[:6]))
_MONTHS: Final = tuple(name.lower() for name in month_name)
_YEAR_MAX: Final = 9_999


def duration_s(text: Any) -> float:
    """Read a duration as Prometheus writes it, such as 30s, 5m or 1h30m, in seconds.

    Raises:
        ValueError: it is not one.
    """
    found = _DURATION.fullmatch(text) if isinstance(text, str) else None
    if text == "0":
        return 0.0
    if found is None or not text:
        raise ValueError(f"{text!r} is not a duration such as 30s, 5m or 1h30m")
    return float(sum(int(count or 0) * unit_s for count, unit_s in zip(found.groups(), _UNITS_S.values(), strict=True)))


Duration = Annotated[float, BeforeValidator(duration_s)]
PositiveDuration = Annotated[float, BeforeValidator(duration_s), Field(gt=0)]


class Written(BaseModel):
    """A table of the file: a key that it does not have is an error."""

    model_config = ConfigDict(extra="forbid")


class WrittenTimes(Written):
    """Times of a day."""

    start_time: str
    end_time: str


class WrittenTimeInterval(Written):
    """See `TimeInterval`."""

    times: tuple[WrittenTimes, ...] = ()
    weekdays: tuple[str, ...] = ()
    days_of_month: tuple[str, ...] = ()
    months: tuple[str, ...] = ()
    years: tuple[str, ...] = ()
    location: str = "UTC"

    def interval(self) -> TimeInterval:
        """As the routes need it.

        Raises:
            ValueError: a range or the time zone is wrong.
        """
        try:
            ZoneInfo(self.location)
        except (KeyError, OSError, ValueError) as error:
            raise ValueError(f"{self.location!r} is not a time zone such as Europe/Berlin") from error
        return TimeInterval(
            tuple(_time_span(one) for one in self.times),
            tuple(_named_span(text, _WEEKDAYS) for text in self.weekdays),
            tuple(_day_span(text) for text in self.days_of_month),
            tuple(_named_span(text, _MONTHS, first=1) for text in self.months),
            tuple(_checked(text, _numbers(text), 0, _YEAR_MAX) for text in self.years),
            self.location,
        )


def _time_span(written: WrittenTimes) -> Span:
    start, end = _minutes(written.start_time), _minutes(written.end_time)
    if start >= end:
        raise ValueError("start_time must be before end_time; one that spans midnight is two intervals")
    return start, end


def _minutes(text: str) -> int:
    found = re.fullmatch(r"(\d\d):(\d\d)", text)
    minutes = int(found[1]) * 60 + int(found[2]) if found and int(found[2]) < 60 else None
    if minutes is None or minutes > 24 * 60:
        raise ValueError(f"{text!r} is not a time from 00:00 to 24:00")
    return minutes


def _named_span(text: str, names: Sequence[str], first: int = 0) -> Span:
    """A range of names or their numbers, such as monday:friday or 1:5."""
    ends = [names.index(part) if part in names[first:] else part for part in text.lower().split(":")]
    try:
        span = int(ends[0]), int(ends[-1])
    except ValueError as error:
        raise ValueError(f"{text!r} is not a range such as {names[first + 1]} or {names[1]}:{names[5]}") from error
    return _checked(text, span, first, len(names) - 1)


def _day_span(text: str) -> Span:
    """A range of days, such as 1:5, or -3:-1 from the end of the month."""
    start, end = span = _numbers(text)
    if 0 in span or (start < 0 < end):
        raise ValueError(f"{text!r} is not a range of days: they count from 1, or from -1 backwards")
    # A range such as 1:-1 cannot be compared before the month is known.
    if start > 0 > end:
        _checked(text, (start, start), 1, 31)
        return _checked(text, (end, end), -31, -1) and span
    return _checked(text, span, -31, 31)


def _numbers(text: str) -> Span:
    found = re.fullmatch(r"(-?\d+)(?::(-?\d+))?", text)
    if found is None:
        raise ValueError(f"{text!r} is not a number or a range such as 1:5")
    return int(found[1]), int(found[2] or found[1])


def _checked(text: str, span: Span, least: int, most: int) -> Span:
    if not least <= span[0] <= span[1] <= most or len(text.split(":")) > 2:
        raise ValueError(f"{text!r} is not a range between {least} and {most}, lower end first")
    return span
