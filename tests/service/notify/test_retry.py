"""What happens after a try."""

import pytest

from rankwatch_service.notify.retry import RETRY_AFTER_MAX_S, RETRY_DELAYS_S, after_try, retry_after_s
from rankwatch_service.notify.sender import TryOutcome

NOW_NS = 1_760_000_000_000_000_000


def delay_s(outcome, tries=1, jitter=0.0):
    decision = after_try(outcome, tries, NOW_NS, jitter)
    assert decision.state == "waiting"
    return (decision.next_try_unix_ns - NOW_NS) / 1e9


@pytest.mark.parametrize("status", [200, 202, 204, 299])
def test_any_2xx_delivers(status):
    assert after_try(TryOutcome(status, "", 0.1), 1, NOW_NS, 0.0).state == "delivered"


@pytest.mark.parametrize("status", [None, 100, 301, 302, 400, 401, 404, 429, 500, 503])
def test_everything_else_is_tried_again(status):
    assert delay_s(TryOutcome(status, "no", 0.1)) == RETRY_DELAYS_S[0]


def test_410_gives_the_message_up_and_disables_the_receiver():
    decision = after_try(TryOutcome(410, "answered 410", 0.1), 1, NOW_NS, 0.0)
    assert (decision.state, decision.receiver_gone) == ("failed", True)


def test_delays_grow_as_scheduled_and_the_last_one_repeats():
    delays = [delay_s(TryOutcome(500, "no", 0.1), tries) for tries in range(1, len(RETRY_DELAYS_S) + 3)]
    assert delays == [*RETRY_DELAYS_S, RETRY_DELAYS_S[-1], RETRY_DELAYS_S[-1]]


def test_jitter_only_delays_and_by_a_tenth_at_most():
    assert delay_s(TryOutcome(500, "no", 0.1), 4, jitter=1.0) == pytest.approx(RETRY_DELAYS_S[3] * 1.1)


def test_a_longer_retry_after_is_honoured_and_a_shorter_one_does_not_hurry_us():
    assert delay_s(TryOutcome(429, "no", 0.1, retry_after_s=77.0)) == 77.0
    assert delay_s(TryOutcome(429, "no", 0.1, retry_after_s=1.0)) == RETRY_DELAYS_S[0]


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("30", 30.0),
        ("Thu, 09 Oct 2025 08:54:20 GMT", 60.0),
        ("Thu, 09 Oct 2025 08:00:00 GMT", 0.0),
        ("999999", RETRY_AFTER_MAX_S),
        ("soon", None),
        ("-5", None),
        ("1e999", None),
        ("", None),
    ],
)
def test_retry_after_is_read_in_seconds_or_as_a_date(header, seconds):
    assert retry_after_s(header, NOW_NS / 1e9) == seconds
