import pytest

from rankwatch_service.store import audit_trail
from rankwatch_service.store.engine import read, write


@pytest.fixture
def engine(engine):
    for n in range(5):
        with write(engine) as connection:
            audit_trail.append(connection, n, "me", "did", f"thing {n}", "ok", fields={"n": n})
    return engine


def verified(engine):
    with read(engine) as connection:
        return audit_trail.verify(connection)


def test_a_trail_that_nobody_touched_is_whole(engine):
    assert verified(engine) is None


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ("UPDATE audit SET actor = 'you' WHERE id = 3", 3),
        ("UPDATE audit SET fields = '{\"n\":9}' WHERE id = 2", 2),
        ("DELETE FROM audit WHERE id = 4", 5),
        ("DELETE FROM audit WHERE id = 1", 2),
    ],
)
def test_a_changed_or_removed_row_is_found(engine, change, broken):
    with write(engine) as connection:
        connection.exec_driver_sql(change)
    assert verified(engine) == broken


def test_rows_beside_each_other_in_one_transaction_are_chained(engine):
    with write(engine) as connection:
        for n in range(3):
            audit_trail.append(connection, n, "me", "did", str(n), "ok")
    assert verified(engine) is None
