import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankwatch import wire
from rankwatch.agent import sender
from rankwatch.agent.draft import Rows
from rankwatch.agent.sender import Spool


def message(number: int, rows: int = 50) -> bytes:
    """A batch with step records, a progress block and an event."""
    records = Rows()
    for step in range(rows):
        records.add(number * rows + step, 0, [("loss", step / 7)], {})
    progress = (wire.Progress(0, number, "forward", 0.0, 0.0),)
    events = (wire.Event("note", number, fields={"text": str(number)}),)
    batch = wire.Batch(1, "gpt", "l.0", "h", "boot", number, 0, steps=records.table(), progress=progress, events=events)
    return wire.encode(batch)


def drain(spool: Spool) -> Iterator[wire.Batch]:
    while bodies := spool.peek():
        body = bodies[0]
        yield wire.decode_batch(body)
        spool.pop()


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "SEGMENT_BYTES", 4_000)


def test_messages_come_out_in_the_order_in_which_they_went_in(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s")
    for number in range(50):
        spool.append(message(number))
    assert spool
    assert [batch.seq for batch in drain(spool)] == list(range(50))
    assert not spool
    spool.close()
    assert not (tmp_path / "s").exists()


def test_in_and_out_may_alternate(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s")
    seen = []
    for number in range(30):
        spool.append(message(2 * number))
        spool.append(message(2 * number + 1))
        body = spool.peek()[0]
        assert body is not None
        seen.append(wire.decode_batch(body).seq)
        spool.pop()
    seen += [batch.seq for batch in drain(spool)]
    assert seen == list(range(60))


def test_a_later_agent_finds_what_an_earlier_one_left(tmp_path: Path) -> None:
    first = Spool(tmp_path / "s")
    for number in range(20):
        first.append(message(number))
    body = first.peek()[0]
    assert body is not None
    first.pop()
    second = Spool(tmp_path / "s")
    second.append(message(20))
    # The segment that was being sent may come again, from its beginning.
    assert [batch.seq for batch in drain(second)] == list(range(21))
    assert second.losses == {}


@pytest.mark.parametrize("cut", [1, 7, 8, 100])
def test_a_frame_that_was_cut_off_is_passed_over(tmp_path: Path, cut: int) -> None:
    spool = Spool(tmp_path / "s")
    for number in range(3):
        spool.append(message(number))
    newest = max((tmp_path / "s").iterdir())
    with newest.open("r+b") as file:
        file.truncate(newest.stat().st_size - cut)
    again = Spool(tmp_path / "s")
    again.append(message(3))
    assert [batch.seq for batch in drain(again)] == [0, 1, 3]
    assert again.losses == {}


def test_a_frame_with_a_wrong_checksum_is_counted(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s")
    spool.append(message(0))
    path = next((tmp_path / "s").iterdir())
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    again = Spool(tmp_path / "s")
    assert not again.peek()
    assert again.losses == {("", "", "spool_torn"): 1}


def test_at_its_bound_the_oldest_step_records_go_and_events_and_progress_stay(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", bytes_max=40_000)
    for number in range(100):
        spool.append(message(number))
        assert spool.bytes <= 40_000
        assert sum(path.stat().st_size for path in (tmp_path / "s").iterdir()) == spool.bytes
    kept = list(drain(spool))
    assert [batch.seq for batch in kept] == list(range(100))
    assert all(batch.events and batch.progress for batch in kept)
    full = [batch.seq for batch in kept if batch.steps is not None]
    assert full == list(range(100 - len(full), 100))
    assert spool.losses == {("gpt", "l.0", "spool"): 50 * (100 - len(full))}


def test_when_even_events_do_not_fit_the_oldest_go_and_everything_is_counted(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", bytes_max=10_000)
    for number in range(400):
        spool.append(message(number))
        assert spool.bytes <= 10_000 + 4_000
    kept = list(drain(spool))
    assert [batch.seq for batch in kept] == list(range(400 - len(kept), 400))
    rows = sum(batch.steps.rows for batch in kept if batch.steps is not None)
    others = 2 * (400 - len(kept))  # the event and the progress block of each
    assert spool.losses == {("gpt", "l.0", "spool"): 400 * 50 - rows + others}


def test_a_full_disk_leaves_the_spool_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that takes only half of the bytes, as at the end of a disk, is undone."""
    spool = Spool(tmp_path / "s")
    spool.append(message(0))
    whole = Path.open

    class Half:
        def __init__(self, path: Path) -> None:
            self._file = whole(path, "ab", buffering=0)

        def __enter__(self) -> "Half":
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()

        def fileno(self) -> int:
            return self._file.fileno()

        def write(self, content: bytes) -> int:
            return self._file.write(content[: len(content) // 2])

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, *_args, **_kwargs: Half(path))
        for number in (1, 2):
            with pytest.raises(OSError, match="full") as caught:
                spool.append(message(number))
            assert caught.value.errno == errno.ENOSPC
    spool.append(message(3))
    assert [batch.seq for batch in drain(spool)] == [0, 3]


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    # A file where the folder above it should be: that stops root too, whom permissions do not.
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        Spool(tmp_path / "file" / "s")
