"""One read for all requests that wait for it, and never one that began before the request."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rankwatch_service.api.background.single_flight import SingleFlight

WAITING = 8


class Key:
    """Counts how often it is looked up: twice by each request that has come."""

    def __init__(self) -> None:
        self.looked_up = 0

    def __hash__(self) -> int:
        self.looked_up += 1
        return 1


def test_requests_that_come_during_a_read_share_the_next_one():
    shared, key, reads = SingleFlight(), Key(), []
    begun, may_end = threading.Event(), threading.Event()

    def read() -> int:
        reads.append(len(reads))
        begun.set()
        assert may_end.wait(10)
        return reads[-1]

    with ThreadPoolExecutor(WAITING + 1) as pool:
        first = pool.submit(shared.read, key, read)
        assert begun.wait(10)
        seen = key.looked_up
        later = [pool.submit(shared.read, key, read) for _ in range(WAITING)]
        while key.looked_up < seen + 2 * WAITING:
            time.sleep(0.001)
        may_end.set()
        assert [first.result(10), *(one.result(10) for one in later)] == [0] + [1] * WAITING
    assert reads == [0, 1]


def test_a_later_request_reads_anew_and_other_keys_read_for_themselves():
    shared, values = SingleFlight(), iter(range(3))
    found = [shared.read(key, lambda: next(values)) for key in ("all", "all", "gpt")]
    assert found == [0, 1, 2]


def test_an_error_is_raised_to_all_who_share_the_read_and_to_nobody_after():
    shared = SingleFlight()
    with pytest.raises(KeyError):
        shared.read("all", lambda: {}["x"])
    assert shared.read("all", lambda: 5) == 5
