"""How long an address waits after invalid tokens, and how little refusals leave behind."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, select

from rankwatch_service.access.refusals import ADDRESSES_MAX, LINES_MAX, TRIES_MAX, WINDOW_S, Refusal, Refusals
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import Audit
from tests.support.clock import FakeClock
from tests.support.store.database import new_database


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = new_database(tmp_path)
    yield engine
    engine.dispose()


def guess(refusals: Refusals, source: str, times: int) -> None:
    for _ in range(times):
        refusals.add(Refusal(401, source, ""), "/api/v1/jobs", invalid_token=True)


def test_an_address_waits_until_a_minute_after_its_first_try(engine: Engine) -> None:
    clock = FakeClock()
    refusals = Refusals(engine, clock, lambda _status: None)
    guess(refusals, "a", TRIES_MAX - 1)
    assert refusals.wait_s("a") == 0
    clock.advance(20.0)
    guess(refusals, "a", 1)
    assert (refusals.wait_s("a"), refusals.wait_s("b")) == (WINDOW_S - 20, 0)
    clock.advance(WINDOW_S - 20)
    assert refusals.wait_s("a") == 0
    guess(refusals, "a", 1)
    assert refusals.wait_s("a") == 0


def test_refusals_without_a_token_make_nobody_wait(engine: Engine) -> None:
    refusals = Refusals(engine, FakeClock(), lambda _status: None)
    for _ in range(TRIES_MAX + 1):
        refusals.add(Refusal(401, "a", ""), "/api/v1/jobs", invalid_token=False)
    assert refusals.wait_s("a") == 0


def test_a_flood_of_addresses_takes_bounded_memory_and_few_lines_and_every_refusal_is_counted(engine: Engine) -> None:
    counted: Counter[int] = Counter()
    refusals = Refusals(engine, FakeClock(), lambda status: counted.update([status]))
    for number in range(ADDRESSES_MAX + 100):
        guess(refusals, f"address {number}", 1)
    assert len(refusals._windows) == ADDRESSES_MAX
    refusals.store()
    with read(engine) as connection:
        lines = connection.execute(select(Audit.source, Audit.fields)).all()
    assert len(lines) == LINES_MAX + 1
    assert sum(fields["times"] for _, fields in lines) == counted[401] == ADDRESSES_MAX + 100
