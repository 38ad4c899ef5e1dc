"""Time intervals: the ranges of Alertmanager's documentation, in time zones."""

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from rankwatch_service.routing.written_times import WrittenTimeInterval, duration_s


def contains(at: str, zone: str = "UTC", **written: object) -> bool:
    interval = WrittenTimeInterval.model_validate(written).interval()
    return interval.contains(datetime.fromisoformat(at).replace(tzinfo=ZoneInfo(zone)).timestamp())


@pytest.mark.parametrize(
    ("written", "inside", "outside"),
    [
        ({}, "2026-03-04 12:00", None),
        ({"times": [{"start_time": "09:00", "end_time": "17:00"}]}, "2026-03-04 09:00", "2026-03-04 17:00"),
        ({"times": [{"start_time": "22:00", "end_time": "24:00"}]}, "2026-03-04 23:59", "2026-03-04 00:00"),
        ({"weekdays": ["monday:friday"]}, "2026-03-06 12:00", "2026-03-07 12:00"),
        ({"weekdays": ["Saturday", "sunday"]}, "2026-03-08 12:00", "2026-03-09 12:00"),
        ({"weekdays": ["1:3"]}, "2026-03-04 12:00", "2026-03-05 12:00"),
        ({"days_of_month": ["1:5"]}, "2026-03-05 12:00", "2026-03-06 12:00"),
        ({"days_of_month": ["-3:-1"]}, "2026-02-26 12:00", "2026-02-25 12:00"),
        ({"days_of_month": ["-1"]}, "2024-02-29 12:00", "2024-02-28 12:00"),
        ({"days_of_month": ["30:31"]}, "2026-03-31 12:00", "2026-02-28 12:00"),
        ({"days_of_month": ["20:-5"]}, "2026-02-24 12:00", "2026-02-25 12:00"),
        ({"months": ["december", "march:may"]}, "2026-05-01 12:00", "2026-06-01 12:00"),
        ({"months": ["1:3"]}, "2026-03-31 12:00", "2026-04-01 12:00"),
        ({"years": ["2026", "2030:2031"]}, "2031-01-01 12:00", "2029-01-01 12:00"),
        ({"weekdays": ["monday"], "months": ["march"]}, "2026-03-02 12:00", "2026-04-06 12:00"),
    ],
)
def test_a_moment_is_inside_if_it_meets_every_condition(written, inside, outside):
    assert contains(inside, **written)
    assert outside is None or not contains(outside, **written)


def test_times_are_those_of_the_location_in_summer_and_winter():
    office = {"times": [{"start_time": "09:00", "end_time": "10:00"}], "location": "Europe/Berlin"}
    assert contains("2026-01-15 08:30", **office)
    assert contains("2026-07-15 07:30", **office)
    assert not contains("2026-07-15 08:30", **office)


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ({"times": [{"start_time": "9:00", "end_time": "17:00"}]}, "'9:00' is not a time"),
        ({"times": [{"start_time": "22:00", "end_time": "06:00"}]}, "midnight"),
        ({"weekdays": ["moonday"]}, "'moonday' is not a range"),
        ({"weekdays": ["friday:monday"]}, "lower end first"),
        ({"days_of_month": ["0"]}, "count from 1"),
        ({"days_of_month": ["-1:5"]}, "count from 1"),
        ({"days_of_month": ["1:32"]}, "between -31 and 31"),
        ({"months": ["0:3"]}, "between 1 and 12"),
        ({"months": [""]}, "is not a range"),
        ({"years": ["2026:2027:2028"]}, "not a number or a range"),
        ({"location": "Europe/Atlantis"}, "not a time zone"),
    ],
)
def test_a_malformed_range_is_refused_with_the_reason(written, told):
    with pytest.raises(ValueError, match=told):
        WrittenTimeInterval.model_validate(written).interval()


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("5m", 300), ("1h30m", 5_400), ("1d", 86_400), ("250ms", 0.25), ("0", 0)]
)
def test_a_duration_is_written_as_in_prometheus(text, seconds):
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "5 m", "1.5h", "m", "30m1h", 5])
def test_a_malformed_duration_is_refused(text):
    with pytest.raises(ValueError, match="duration such as"):
        duration_s(text)
