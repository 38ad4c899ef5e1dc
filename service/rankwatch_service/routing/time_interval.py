"""Time intervals in which routes are muted or active, as Alertmanager defines them."""

from __future__ import annotations

from calendar import monthrange
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from zoneinfo import ZoneInfo

Span = tuple[int, int]
"""First and last value of a range, both included; times of a day in minutes, without the last."""


@dataclass(frozen=True, slots=True)
class TimeInterval:
    """Times that meet all conditions; an empty condition holds always."""

    times: tuple[Span, ...] = ()
    """Minutes of the day, 0 to 1440, without the last."""
    weekdays: tuple[Span, ...] = ()
    """0 is Sunday."""
    days_of_month: tuple[Span, ...] = ()
    """From 1, or from -1 backwards, which is the last day of the month."""
    months: tuple[Span, ...] = ()
    years: tuple[Span, ...] = ()
    location: str = "UTC"
    """Time zone of the IANA database."""

    def contains(self, unix_s: float) -> bool:
        """Whether this moment lies in the interval."""
        at = datetime.fromtimestamp(unix_s, ZoneInfo(self.location))
        minute = at.hour * 60 + at.minute
        last_day = monthrange(at.year, at.month)[1]
        return (
            (not self.times or any(start <= minute < end for start, end in self.times))
            and _within(self.weekdays, at.isoweekday() % 7)
            and _within(self.months, at.month)
            and _within(self.years, at.year)
            and _within([_days(span, last_day) for span in self.days_of_month], at.day)
        )


def _within(spans: Iterable[Span], value: int) -> bool:
    listed = list(spans)
    return not listed or any(first <= value <= last for first, last in listed)


def _days(span: Span, last_day: int) -> Span:
    """A range of days of a month of this length; what lies outside of the month is cut off."""
    first, last = (day if day > 0 else last_day + day + 1 for day in span)
    return max(first, 1), min(last, last_day)
