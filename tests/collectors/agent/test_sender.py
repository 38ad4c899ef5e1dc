"""The sender's thread, with a service that is a function, and the spool that it writes in an outage."""

import errno
import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rankwatch import wire
from rankwatch.agent import sender as sender_module
from rankwatch.agent.batch_builder import EncodedBatch, Rows
from rankwatch.agent.clock import HostClock
from rankwatch.agent.sender import Sender, Spool, SpoolOrigin, left_spools, one_by_one
from rankwatch.outcome import Accepted, Later, Outcome, Refused
from tests.support.agent.service import until


def encoded_batch(number: int, rows: int = 10) -> EncodedBatch:
    records = Rows()
    for step in range(rows):
        records.add(step, 0, [("loss", 1.0)], {})
    events = (wire.Event("note", number),)
    batch = wire.Batch(1, "gpt", "l.0", "h", "b", number, 0, steps=records.table(), events=events)
    return EncodedBatch(wire.encode(batch), {"ring": number})


class Service:
    """Answers as it is told to; remembers what it took."""

    def __init__(self) -> None:
        self.answer: Callable[[int], Outcome] = lambda _seq: Accepted()
        self.taken: list[wire.Batch] = []
        self.asked = 0

    def __call__(self, body: bytes) -> Outcome:
        self.asked += 1
        batch = wire.decode_batch(body)
        outcome = self.answer(batch.seq)
        if isinstance(outcome, Accepted):
            self.taken.append(batch)
        return outcome

    def numbers(self) -> list[int]:
        return [batch.seq for batch in self.taken]


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "spool" / "gpt"


@pytest.fixture
def start(service: Service, folder: Path) -> Iterator[Callable[..., Sender]]:
    """Starts senders, with a spool in the folder unless said otherwise."""
    made: list[Sender] = []

    def start(open_spool: Callable[[], Spool] = lambda: Spool(folder)) -> Sender:
        made.append(Sender(one_by_one(service), open_spool, HostClock()))
        made[-1].start()
        return made[-1]

    yield start
    for sender in made:
        sender.close(0.1)


@pytest.fixture
def sender(start: Callable[..., Sender]) -> Sender:
    return start()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "BACKOFF_FIRST_S", 0.01)
    monkeypatch.setattr(sender_module, "BACKOFF_MAX_S", 0.05)


def test_during_an_outage_batches_are_acknowledged_by_the_spool_and_sent_in_order_afterwards(sender, service):
    service.answer = lambda _seq: Later("status 503")
    for number in range(20):
        sender.put(encoded_batch(number))
    until(lambda: sender.take_acknowledged().get("ring") == 19)
    assert sender.behind
    service.answer = lambda _seq: Accepted()
    until(lambda: len(service.taken) == 20)
    assert service.numbers() == list(range(20))
    until(lambda: sender.idle)


def test_batches_arrive_in_order_and_are_acknowledged_and_what_will_never_be_taken_is_counted_with_the_reason(
    sender, service
):
    service.answer = lambda seq: Refused("refused_422", "bad rank") if seq == 1 else Accepted()
    for number in range(20):
        sender.put(encoded_batch(number))
    until(lambda: sender.idle)
    assert service.numbers() == [0, *range(2, 20)]
    assert sender.take_losses() == {("gpt", "l.0", "refused_422"): 11}
    assert sender.take_acknowledged() == {"ring": 19}
    assert sender.take_acknowledged() == sender.take_losses() == {}
    assert not sender.behind


def test_a_service_that_says_when_to_come_back_is_not_asked_before(sender, service):
    service.answer = lambda _seq: Later("status 429", 30.0)
    sender.put(encoded_batch(0))
    until(lambda: sender.take_acknowledged().get("ring") == 0)
    assert service.asked == 1


def no_disk() -> Spool:
    raise OSError(errno.EROFS, "read-only file system")


def test_without_a_disk_memory_is_bounded_and_events_outlast_step_records(service, start, monkeypatch):
    monkeypatch.setattr(sender_module, "MEMORY_BYTES_MAX", 100_000)
    service.answer = lambda _seq: Later("connection refused")
    sender = start(no_disk)
    for number in range(200):
        sender.put(encoded_batch(number, rows=100))
        assert sender._fresh_bytes <= 100_000
    service.answer = lambda _seq: Accepted()
    until(lambda: sender.idle)
    lost = sender.take_losses()
    rows = sum(batch.steps.rows for batch in service.taken if batch.steps is not None)
    assert rows > 0
    assert service.numbers() == list(range(200))
    assert all(batch.events for batch in service.taken)
    assert lost == {("gpt", "l.0", "spool"): 200 * 100 - rows}
    assert sender.take_acknowledged() == {"ring": 199}


def test_only_what_a_person_must_mend_or_what_lasts_is_trouble(sender, service):
    service.answer = lambda _seq: Later("status 503")
    sender.put(encoded_batch(0))
    until(lambda: service.asked > 2)
    assert sender.trouble == ""
    service.answer = lambda _seq: Later("the token is not known", for_a_person=True)
    until(lambda: sender.trouble)
    assert "the token is not known" in sender.trouble
    service.answer = lambda _seq: Accepted()
    until(lambda: sender.trouble == "")


def test_each_reason_of_an_outage_is_logged_once(service, sender, caplog):
    reasons = ["no rank has said yet which host this is", "403: the token is for another job"]

    def logged() -> list[int]:
        return [sum(reason in record.getMessage() for record in caplog.records) for reason in reasons]

    service.answer = lambda _seq: Later(reasons[service.asked > 1], after_s=0.0)
    sender.put(encoded_batch(0))
    until(lambda: service.asked > 4)
    assert logged() == [1, 1]
    assert (sender.answered, sender.held) == (False, False)
    service.answer = lambda _seq: Accepted()
    until(lambda: sender.answered)
    service.answer = lambda _seq: Later(reasons[1], after_s=0.0, for_a_person=True)
    sender.put(encoded_batch(1))
    until(lambda: sender.held)
    assert logged() == [1, 2]


def test_a_disk_that_takes_nothing_and_telemetry_that_is_refused_are_trouble(service, start):
    service.answer = lambda _seq: Refused("refused_422", "no such metric")
    sender = start(no_disk)
    sender.put(encoded_batch(0))
    until(lambda: "refused_422 no such metric" in sender.trouble)
    assert "the spool cannot be written" in sender.trouble


def test_without_a_disk_even_events_have_a_bound(service, start, monkeypatch):
    monkeypatch.setattr(sender_module, "MEMORY_BYTES_MAX", 20_000)
    service.answer = lambda _seq: Later("connection refused")
    sender = start(no_disk)
    for number in range(500):
        sender.put(encoded_batch(number))
        assert sender._fresh_bytes <= 20_000
    service.answer = lambda _seq: Accepted()
    until(lambda: sender.idle)
    arrived = sum(len(b.events) + (b.steps.rows if b.steps is not None else 0) for b in service.taken)
    assert service.numbers()[-1] == 499
    assert sum(sender.take_losses().values()) == 500 * 11 - arrived
    assert sender.take_acknowledged() == {"ring": 499}


def test_closing_spools_what_could_not_be_sent_and_the_next_sender_sends_it(service, folder, start):
    service.answer = lambda _seq: Later("connection refused")
    first = start()
    for number in range(5):
        first.put(encoded_batch(number))
    first.close(0.05)
    assert first.take_acknowledged() == {"ring": 4}
    service.answer = lambda _seq: Accepted()
    second = start()
    second.put(encoded_batch(5))
    until(lambda: len(service.taken) == 6)
    second.close(1.0)
    assert service.numbers() == list(range(6))
    assert not folder.exists()


def test_putting_does_not_wait_for_a_service_that_does_not_answer(service, sender):
    answering = threading.Event()

    def silent(_seq: int) -> Outcome:
        answering.wait(60)
        return Accepted()

    service.answer = silent
    for number in range(100):
        sender.put(encoded_batch(number))
    assert not sender.idle
    answering.set()
    until(lambda: sender.idle)
    assert service.numbers() == list(range(100))


def test_while_a_long_spool_is_sent_newer_batches_join_its_end_instead_of_filling_memory(sender, service, monkeypatch):
    monkeypatch.setattr(sender_module, "MEMORY_EASY_BYTES", 2_000)
    service.answer = lambda _seq: Later("connection refused")
    for number in range(10):
        sender.put(encoded_batch(number))
    until(lambda: sender.take_acknowledged().get("ring") == 9)
    going_on = threading.Event()

    def slow(seq: int) -> Outcome:
        if seq == 3:
            going_on.wait(60)
        return Accepted()

    service.answer = slow
    until(lambda: len(service.taken) == 3)
    for number in range(10, 60):
        sender.put(encoded_batch(number))
    going_on.set()
    # Settled by the spool: the service has not taken them when the first of them is.
    until(lambda: sender.take_acknowledged().get("ring") == 59)
    until(lambda: len(service.taken) == 60)
    assert service.numbers() == list(range(60))


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
        yield wire.decode_batch(bodies[0])
        spool.pop()


@pytest.fixture
def spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spool:
    monkeypatch.setattr(sender_module, "SEGMENT_BYTES", 4_000)
    return Spool(tmp_path / "s")


def test_messages_come_out_in_the_order_in_which_they_went_in_though_in_and_out_alternate(tmp_path, spool):
    seen = []
    for number in range(30):
        spool.append(message(2 * number))
        spool.append(message(2 * number + 1))
        seen.append(wire.decode_batch(spool.peek()[0]).seq)
        spool.pop()
    seen += [batch.seq for batch in drain(spool)]
    assert seen == list(range(60))
    assert not spool
    spool.close()
    assert not (tmp_path / "s").exists()


def test_a_later_agent_finds_what_an_earlier_one_left(tmp_path, spool):
    for number in range(20):
        spool.append(message(number))
    assert spool.peek()
    spool.pop()
    second = Spool(tmp_path / "s")
    second.append(message(20))
    # The segment that was being sent may come again, from its beginning.
    assert [batch.seq for batch in drain(second)] == list(range(21))
    assert second.losses == {}


def test_what_another_user_seems_to_have_left_is_not_read(tmp_path, monkeypatch):
    origin = SpoolOrigin("/dev/shm/rankwatch", "gpt", "http://127.0.0.1:8000")
    Spool(tmp_path / "s", origin=origin).append(message(0))
    assert left_spools(tmp_path) == [origin]
    monkeypatch.setattr("os.getuid", lambda: (tmp_path / "s").stat().st_uid + 1)
    assert left_spools(tmp_path) == []


@pytest.mark.parametrize("cut", [1, 7, 8, 100])
def test_a_frame_that_was_cut_off_is_passed_over(tmp_path, spool, cut):
    for number in range(3):
        spool.append(message(number))
    newest = max((tmp_path / "s").iterdir())
    with newest.open("r+b") as file:
        file.truncate(newest.stat().st_size - cut)
    again = Spool(tmp_path / "s")
    again.append(message(3))
    assert [batch.seq for batch in drain(again)] == [0, 1, 3]
    assert again.losses == {}


def test_a_frame_with_a_wrong_checksum_is_counted(tmp_path, spool):
    spool.append(message(0))
    path = next((tmp_path / "s").iterdir())
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    again = Spool(tmp_path / "s")
    assert not again.peek()
    assert again.losses == {("", "", "spool_torn"): 1}


def test_at_its_bound_the_oldest_step_records_go_and_events_and_progress_stay(tmp_path, spool):
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


def test_when_even_events_do_not_fit_the_oldest_go_and_everything_is_counted(tmp_path, spool):
    spool = Spool(tmp_path / "s", bytes_max=10_000)
    for number in range(400):
        spool.append(message(number))
        assert spool.bytes <= 10_000 + 4_000
    kept = list(drain(spool))
    assert [batch.seq for batch in kept] == list(range(400 - len(kept), 400))
    rows = sum(batch.steps.rows for batch in kept if batch.steps is not None)
    others = 2 * (400 - len(kept))  # the event and the progress block of each
    assert spool.losses == {("gpt", "l.0", "spool"): 400 * 50 - rows + others}


def test_a_full_disk_leaves_the_spool_as_it_was(tmp_path, spool, monkeypatch):
    """A write that takes only half of the bytes, as at the end of a disk, is undone."""
    spool.append(message(0))

    class Half(io.FileIO):
        def write(self, content: bytes) -> int:
            return super().write(content[: len(content) // 2])

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, *_args, **_kwargs: Half(path, "ab"))
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
