"""A role waits for a database that is away, but not for ever."""

import pytest

from rankwatch_service.store.errors import SchemaError, StoreBusyError
from rankwatch_service.store.migrate import START_S, once_it_answers
from tests.support.clock import FakeClock


class Database:
    """Refuses so many tries before it answers."""

    def __init__(self, refusals: float) -> None:
        self.refusals = refusals
        self.tries = 0

    def __call__(self) -> str:
        self.tries += 1
        if self.tries <= self.refusals:
            raise StoreBusyError("refused")
        return "ready"


def test_a_role_tries_again_until_its_database_answers():
    clock, database = FakeClock(), Database(3)
    began_s = clock.monotonic_s()
    assert once_it_answers(database, clock) == "ready"
    assert database.tries == 4
    assert clock.monotonic_s() - began_s == pytest.approx(3.0)


def test_a_role_gives_up_after_its_time():
    clock = FakeClock()
    began_s = clock.monotonic_s()
    with pytest.raises(StoreBusyError, match="refused"):
        once_it_answers(Database(float("inf")), clock)
    assert clock.monotonic_s() - began_s == pytest.approx(START_S)


def test_what_waiting_cannot_repair_is_raised_at_once():
    clock = FakeClock()
    began_s = clock.monotonic_s()

    def begin() -> None:
        raise SchemaError("made by a newer version")

    with pytest.raises(SchemaError):
        once_it_answers(begin, clock)
    assert clock.monotonic_s() == began_s
