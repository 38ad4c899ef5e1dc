from sqlalchemy import func, select

from rankwatch_service.log import dead_letters
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import DeadLetter


def test_dead_letters_are_bounded_in_number_and_size(engine, monkeypatch):
    monkeypatch.setattr(dead_letters, "ROWS_MAX", 3)
    with write(engine) as connection:
        for number in range(5):
            dead_letters.keep(connection, "api", "truncated", f"{number}", bytes(dead_letters.VALUE_BYTES_MAX + 1), 1)
    with read(engine) as connection:
        details = connection.scalars(select(DeadLetter.detail).order_by(DeadLetter.id)).all()
        longest = connection.scalar(select(func.max(func.length(DeadLetter.value))))
    assert details == ["2", "3", "4"]
    assert longest == dead_letters.VALUE_BYTES_MAX
