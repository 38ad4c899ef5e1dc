"""Who writes next among the threads of one process."""

import threading

import pytest

from rankwatch_service.store.engine import WriteQueue
from tests.support.service.process import until

LONG_S = 60.0


class Writers:
    """Threads that write to one database, in the order in which they did."""

    def __init__(self) -> None:
        self.queue = WriteQueue()
        self.wrote: list[str] = []
        self.threads: list[threading.Thread] = []

    def come(self, name: str, *, first: bool = False) -> None:
        """A thread begins to wait for its place; it leaves it as soon as it has written."""

        def write() -> None:
            with self.queue.place(LONG_S, first=first):
                self.wrote.append(name)

        waiting = self.queue._first if first else self.queue._others
        before = len(waiting)
        self.threads.append(threading.Thread(target=write))
        self.threads[-1].start()
        until(f"{name} waits", lambda: len(waiting) == before + 1)

    def join(self) -> list[str]:
        for thread in self.threads:
            thread.join(LONG_S)
        return self.wrote


def test_telemetry_goes_first_but_never_twice_in_a_row_while_others_wait():
    writers = Writers()
    with writers.queue.place(LONG_S, first=False):
        for name in ("comment", "silence"):
            writers.come(name)
        for name in ("batch 1", "batch 2", "batch 3"):
            writers.come(name, first=True)
    assert writers.join() == ["batch 1", "comment", "batch 2", "silence", "batch 3"]


def test_who_writes_alone_waits_for_nobody():
    queue = WriteQueue()
    for first in (True, True, False, False):
        with queue.place(LONG_S, first=first) as left_s:
            assert left_s > LONG_S / 2


def test_who_has_waited_too_long_asks_the_database_itself_and_leaves_the_place_to_others():
    writers = Writers()
    with writers.queue.place(LONG_S, first=False):
        with writers.queue.place(0.01, first=True) as left_s:
            assert left_s == 0.0
        writers.come("next")
        assert writers.wrote == []
    assert writers.join() == ["next"]


def test_a_write_that_fails_gives_its_place_back():
    queue = WriteQueue()
    with pytest.raises(ZeroDivisionError), queue.place(LONG_S, first=False) as left_s:
        assert left_s / 0
    with queue.place(LONG_S, first=False) as left_s:
        assert left_s > 0
