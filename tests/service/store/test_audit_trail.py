import json

import pytest
from sqlalchemy import delete, func, select, update

from rankwatch_service.store import audit_trail
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Audit


@pytest.fixture
def engine(engine):
    for n in range(5):
        with write(engine) as connection:
            audit_trail.append(connection, n, "me", "did", f"thing {n}", "ok", fields={"n": n})
    return engine


def verified(engine):
    flaw = audit_trail.verify(engine)
    return flaw and flaw.id


def exported(engine, since_unix_ns=0):
    return [json.dumps(row) for row in audit_trail.export(engine, since_unix_ns)]


def compared(lines, engine):
    flaw = audit_trail.verify_export(audit_trail.exported_rows(lines), engine)
    return flaw and flaw.id


def written_anew(engine, *actions):
    """Whoever may write to the database replaces the whole trail by one that fits together."""
    with write(engine) as connection:
        connection.execute(delete(Audit))
        for n, action in enumerate(actions):
            audit_trail.append(connection, n, "me", action, f"thing {n}", "ok", fields={"n": n})
        oldest = connection.scalar(select(func.min(Audit.id)))
        connection.execute(update(Audit).values(id=Audit.id - oldest - 100))
        connection.execute(update(Audit).values(id=Audit.id + 101))


def test_a_trail_that_nobody_touched_is_whole(engine):
    assert verified(engine) is None


def test_an_export_has_every_row_with_its_hashes_and_fits_the_database(engine, monkeypatch):
    monkeypatch.setattr(audit_trail, "PAGE_ROWS", 2)
    rows = [json.loads(line) for line in exported(engine)]
    assert [row["target"] for row in rows] == [f"thing {n}" for n in range(5)]
    assert rows[0]["previous_sha256"] == audit_trail.FIRST
    assert set(rows[0]) == set(Audit.__table__.columns.keys())
    assert compared(exported(engine), engine) is None
    assert compared(exported(engine), None) is None


@pytest.mark.parametrize("since_unix_ns", [0, 3])
def test_a_row_that_was_changed_in_the_database_is_found_by_an_older_export_of_any_part(engine, since_unix_ns):
    lines = exported(engine, since_unix_ns)
    with write(engine) as connection:
        connection.execute(update(Audit).where(Audit.target == "thing 3").values(actor="somebody else"))
    assert compared(lines, engine) == verified(engine)
    assert compared(exported(engine), None) == verified(engine)
    assert compared(lines, None) is None


def test_an_export_of_a_part_does_not_hide_what_was_changed_before_it(engine):
    lines = exported(engine, 3)
    with write(engine) as connection:
        connection.execute(update(Audit).where(Audit.target == "thing 1").values(actor="somebody else"))
    assert compared(lines, engine) == verified(engine)
    assert verified(engine) is not None


def test_an_export_since_a_time_leaves_no_row_out_after_its_first(engine):
    with write(engine) as connection:
        audit_trail.append(connection, 0, "me", "did", "of a clock that is late", "ok")
    lines = exported(engine, 3)
    assert [json.loads(line)["at_unix_ns"] for line in lines] == [3, 4, 0]
    assert compared(lines, engine) is None
    assert exported(engine, 5) == []


def test_an_export_shows_a_row_that_was_changed_in_it_or_is_missing_in_it(engine):
    lines = exported(engine)
    assert compared([line.replace("thing 2", "nothing") for line in lines], None) == 3
    assert compared([*lines[:2], *lines[3:]], None) == 4


@pytest.mark.parametrize("tampered", [("did", "did", "did not", "did", "did"), ("did", "did")])
def test_an_export_shows_a_chain_that_was_written_anew_or_cut_at_its_end(engine, tampered):
    lines = exported(engine)
    written_anew(engine, *tampered)
    assert verified(engine) is None, "the chain alone does not show it"
    assert compared(lines, engine) == 3


def test_rows_that_were_added_after_an_export_do_not_matter(engine):
    lines = exported(engine)
    with write(engine) as connection:
        audit_trail.append(connection, 9, "me", "did", "more", "ok")
    assert compared(lines, engine) is None


@pytest.mark.parametrize("line", ["", "[]", "no JSON", '{"id": 1}'])
def test_what_is_no_export_is_refused(engine, line):
    with pytest.raises(ValueError, match="line 2 is not a row of the audit trail"):
        compared([exported(engine)[0], line], None)
    with pytest.raises(ValueError, match="no row"):
        compared([], None)


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
