"""The recorder file: its layout, what is written into it, and what is read from it meanwhile and after a kill."""

import math
import os
import random
import signal
import subprocess
import sys
import time
import warnings
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwatch import layout, wire
from rankwatch.folders import directories, others_reach
from rankwatch.layout import Answer, Cell, Directive
from rankwatch.reader import Note, Poll, RingReader, StepEntry, ValuesEntry
from rankwatch.recorder import Recorder
from tests.support.ranks.recorders import UNIX_NS, a_recorder, everything_in, write_step

AREA = 1_024


def a_cell() -> tuple[bytearray, Cell]:
    memory = bytearray(AREA)
    return memory, Cell(memoryview(memory), 0, AREA)


def test_regions_do_not_overlap_and_the_file_is_two_megabytes():
    assert layout.FILE_BYTES == 2 * 1024 * 1024
    assert layout.PROGRESS_OFFSET + 8 * layout.PROGRESS_WORDS <= layout.ANSWER_OFFSET
    names_bytes = layout.NAMES_MAX * layout.NAME_ROW_BYTES
    assert layout.METRICS_OFFSET + names_bytes <= layout.PHASES_OFFSET
    assert layout.PHASES_OFFSET + names_bytes <= layout.IDENTITY_OFFSET < layout.RING_OFFSET
    assert layout.RING_OFFSET + layout.RING_ENTRIES * layout.ENTRY_BYTES == layout.FILE_BYTES
    assert layout.RING_ENTRIES >= 4_096


def test_parts_of_an_entry_do_not_overlap():
    assert layout.ENTRY.size <= layout.PHASE_INDEX_OFFSET
    assert layout.PHASE_INDEX_OFFSET + layout.PHASES_PER_STEP_MAX <= layout.PHASE_TIMES_OFFSET
    assert layout.PHASE_TIMES_OFFSET + 4 * layout.PHASES_PER_STEP_MAX <= layout.VALUES_OFFSET
    assert layout.VALUES_OFFSET + 8 * layout.PAGE_VALUES == layout.ENTRY_BYTES
    assert layout.NOTE_OFFSET + layout.NOTE_PART_BYTES == layout.ENTRY_BYTES


def test_a_cell_gives_back_the_newest_content_and_counts_writes():
    _, cell = a_cell()
    assert cell.read() is None
    for number in range(1, 6):
        cell.write(b"x" * number)
        assert cell.read() == (number, b"x" * number)


@given(st.integers(0, AREA - 1), st.integers(1, 255))
def test_whatever_byte_of_the_newest_copy_is_torn_the_older_one_is_read_and_never_a_mixture(at, flip):
    memory, cell = a_cell()
    cell.write(b"older" * 20)
    cell.write(b"newer" * 20)
    if at >= 8:  # the first word says which is newest, and is written by one store
        memory[at] ^= flip
    assert cell.read() in [(1, b"older" * 20), (2, b"newer" * 20)]


def test_a_write_that_was_cut_off_leaves_the_content_before_it():
    memory, cell = a_cell()
    cell.write(b"first")
    cell.write(b"second")
    before = bytes(memory)
    cell.write(b"third")
    after = bytes(memory)
    for cut in range(8, AREA):  # all but the word, which is stored last
        memory[:] = before[:8] + after[8:cut] + before[cut:]
        assert cell.read() == (2, b"second")


def test_content_that_does_not_fit_is_refused_and_the_old_one_stays():
    _, cell = a_cell()
    cell.write(b"a" * cell.capacity_bytes)
    with pytest.raises(ValueError, match="do not fit"):
        cell.write(b"b" * (cell.capacity_bytes + 1))
    assert cell.read() == (1, b"a" * cell.capacity_bytes)


def test_directives_and_answers_survive_their_cells_and_new_fields_of_a_newer_agent_are_left_out():
    directive = Directive("o1", "l.0", "do", "rollback", 7, 120.0, "memory:l.0:5", "/ü/x", 5, 1)
    assert layout.decode_directive(layout.encode_directive(directive)) == directive
    answer = Answer("o1", "done", 5, 1, -(2**63), "memory:l.0:5")
    assert layout.decode_answer(layout.encode_answer(answer)) == answer
    newer = b'{"order":"o","attempt":"a","phase":"hold","tomorrow":1}'
    assert layout.decode_directive(newer) == Directive("o", "a", "hold")


@pytest.mark.parametrize("payload", [b"", b"[]", b"{", b"\xff\xfe", b"1"])
def test_what_is_no_directive_is_a_value_error(payload):
    with pytest.raises(ValueError):
        layout.decode_directive(payload)


@pytest.mark.parametrize("letter", ["e", "é", "😀", "\n", '"', "\udc80"])
def test_the_longest_answer_fits_its_cell(letter):
    cell = layout.answer_cell(memoryview(bytearray(layout.FILE_BYTES)))
    cell.write(layout.encode_answer(Answer("o" * 64, "released", 2**47, 65_535, -(2**63), letter * 5_000)))
    answer = layout.decode_answer(cell.read()[1])
    assert (answer.answer, len(answer.detail)) == ("released", layout.DETAIL_CHARACTERS_MAX)


def test_jobs_whose_names_look_alike_get_different_files():
    stems = {layout.file_stem(name) for name in ("a/b", "a_b", "a b", "a" * 300, "a" * 301, "")}
    assert len(stems) == 6
    assert all("/" not in stem and len(stem) < 64 for stem in stems)


IDENTITY = {"job": "gpt", "launch": "l", "rank": 0}


def create(*places: object) -> Recorder:
    return Recorder.create(IDENTITY, [str(place) for place in places], monotonic_ns=5, unix_ns=UNIX_NS)


def test_the_file_is_private_reserved_in_full_and_names_its_rank(tmp_path):
    recorder = create(tmp_path / "new" / "place")
    found = os.stat(recorder.path)
    assert found.st_mode & 0o777 == 0o600
    assert found.st_size == layout.FILE_BYTES
    assert found.st_blocks * 512 >= layout.FILE_BYTES  # no holes: a store into a hole of a full tmpfs is SIGBUS
    assert os.stat(tmp_path / "new" / "place").st_mode & 0o077 == 0


def test_the_header_tells_process_times_and_identity(tmp_path):
    recorder = create(tmp_path)
    recorder.declare({"can": ["pause"]})
    reader = RingReader(recorder.path)
    header = reader.header
    assert (header.pid, header.uid) == (os.getpid(), os.getuid())
    assert (header.start_monotonic_ns, header.start_unix_ns) == (5, UNIX_NS)
    assert header.start_ticks > 0
    assert dict(header.identity) == {**IDENTITY, "can": ["pause"]}
    assert reader.identity_number == header.identity_number == 2
    reader.close()


def test_each_process_makes_a_file_of_its_own(tmp_path):
    first = Recorder.create(IDENTITY, [str(tmp_path)], monotonic_ns=5, unix_ns=UNIX_NS)
    second = Recorder.create(IDENTITY, [str(tmp_path)], monotonic_ns=6, unix_ns=UNIX_NS)
    assert first.path != second.path
    with pytest.warns(RuntimeWarning, match="File exists"):  # never opened again, never truncated
        assert Recorder.create(IDENTITY, [str(tmp_path)], monotonic_ns=6, unix_ns=UNIX_NS).path is None


def test_a_place_that_is_no_directory_is_passed_over(tmp_path):
    (tmp_path / "file").write_text("")
    recorder = create(tmp_path / "file" / "below", tmp_path / "good")
    assert os.path.dirname(recorder.path) == str(tmp_path / "good")


def test_where_no_place_takes_it_the_recorder_is_off_with_one_warning_and_everything_still_works(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="records nothing") as reported:
        recorder = create(tmp_path / "file" / "a", tmp_path / "file" / "b")
    assert len(reported) == 1
    assert recorder.path is None
    for step in range(10):
        recorder.floats[recorder.metric("loss")] = 1.0
        write_step(recorder, step, mask=1)
    recorder.note("note", {"text": "x" * 500}, 0, 0, 0)
    recorder.close()


def test_warnings_as_errors_do_not_end_training(tmp_path):
    (tmp_path / "file").write_text("")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert create(tmp_path / "file" / "a").path is None


def test_a_refused_reservation_leaves_no_file_behind(tmp_path, monkeypatch):
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        assert create(tmp_path / "full").path is None
    assert os.listdir(tmp_path / "full") == []


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (lambda place, other: place.mkdir() or place.chmod(0o777), "others can write there"),
        (lambda place, other: place.symlink_to(other), "it is a link"),
    ],
)
def test_a_directory_that_another_user_prepared_is_not_used(tmp_path, prepare, why):
    other, place = tmp_path / "other", tmp_path / "prepared"
    other.mkdir(mode=0o700)
    prepare(place, other)
    with pytest.warns(RuntimeWarning, match=why):
        recorder = create(place, tmp_path / "good")
    assert os.path.dirname(recorder.path) == str(tmp_path / "good")
    assert os.listdir(place) == []


def test_a_directory_of_another_user_is_none_of_ours(tmp_path):
    assert others_reach(str(tmp_path), os.getuid()) == ""
    assert others_reach(str(tmp_path), os.getuid() + 1) == f"it belongs to user {os.getuid()}"


def test_places_are_the_users_the_shared_memory_and_the_temporary_directory():
    assert directories({"RANKWATCH_DIR": "/d", "TMPDIR": "/t"}, 7) == ["/d", "/dev/shm/rankwatch-7", "/t/rankwatch-7"]
    assert directories({}, 7) == ["/dev/shm/rankwatch-7", "/tmp/rankwatch-7"]


def test_values_are_what_was_put_and_absent_is_not_zero(tmp_path):
    recorder = a_recorder(tmp_path)
    for index, value in enumerate([1.5, math.nan, -math.inf, 5e-324, -0.0]):
        recorder.floats[recorder.metric(f"m{index}")] = value
    recorder.metric("absent")
    recorder.integers[recorder.metric("fingerprint", exact=True)] = -(2**63) + 1
    write_step(recorder, 0, mask=0b1011111)
    (entry,) = everything_in(recorder)
    assert isinstance(entry, StepEntry)
    assert [entry.values[f"m{index}"] for index in (0, 2, 3)] == [1.5, -math.inf, 5e-324]
    assert math.isnan(entry.values["m1"])
    assert math.copysign(1, entry.values["m4"]) == -1
    assert entry.values["fingerprint"] == -(2**63) + 1
    assert "absent" not in entry.values


def test_more_than_sixteen_values_go_on_in_values_entries(tmp_path):
    recorder = a_recorder(tmp_path)
    mask = 0
    for number in range(40):
        index = recorder.metric(f"m{number}")
        recorder.floats[index] = float(number)
        mask |= 1 << index
    write_step(recorder, 5, mask=mask)
    first, *others = everything_in(recorder)
    assert isinstance(first, StepEntry)
    assert all(isinstance(entry, ValuesEntry) and entry.step == 5 for entry in others)
    together = dict(first.values)
    for entry in others:
        together |= entry.values
    assert together == {f"m{number}": float(number) for number in range(40)}


def test_late_values_do_not_disturb_the_step_that_is_being_made(tmp_path):
    recorder = a_recorder(tmp_path)
    for number in range(20):
        recorder.floats[recorder.metric(f"m{number}")] = 1.0
    exact = recorder.metric("nonfinite", exact=True)
    recorder.write_values(3, 1, 9_000, {0: 2.0, 17: 3.0, -1: 4.0}, {exact: 9, -1: 1})
    write_step(recorder, 4, mask=0b11)
    page_0, page_1, step = everything_in(recorder)
    assert (page_0.step, page_0.k, dict(page_0.values)) == (3, 1, {"m0": 2.0})
    assert dict(page_1.values) == {"m17": 3.0, "nonfinite": 9}
    assert dict(step.values) == {"m0": 1.0, "m1": 1.0}


def test_the_65th_name_is_dropped_and_counted(tmp_path):
    recorder = a_recorder(tmp_path)
    for number in range(layout.NAMES_MAX):
        assert recorder.metric(f"m{number}") == number
        assert recorder.phase(f"p{number}") == number
    assert recorder.metric("one more") == recorder.phase("one more") == -1
    assert recorder.metric("m0") == 0
    assert recorder.dropped == {"metric_names": 1, "phase_names": 1}


@pytest.mark.parametrize("name", ["", "x" * 65, "ü" * 33])
def test_a_name_that_does_not_fit_its_row_is_dropped_and_counted(tmp_path, name):
    recorder = a_recorder(tmp_path)
    assert recorder.metric(name) == -1
    assert recorder.dropped == {"metric_names": 1}


def test_a_name_of_64_bytes_and_one_with_half_a_surrogate_are_recorded(tmp_path):
    recorder = a_recorder(tmp_path)
    for index, name in enumerate(["ü" * 32, "a\udc80b"]):
        recorder.floats[recorder.metric(name)] = float(index)
    write_step(recorder, 0, mask=0b11)
    (entry,) = everything_in(recorder)
    assert dict(entry.values) == {"ü" * 32: 0.0, "a?b": 1.0}


def test_notes_come_back_whole_and_long_ones_are_cut_or_counted(tmp_path):
    recorder = a_recorder(tmp_path)
    recorder.note("exception", {"type": "E", "message": "ü" * 200}, 4, 1, 1_000)
    recorder.note("exception", {"message": "m" * 10_000}, 5, 1, 1_000)
    recorder.note("note", {f"text{number}": "x" * 400 for number in range(9)}, 6, 1, 1_000)
    whole, cut = everything_in(recorder)
    assert isinstance(whole, Note)
    assert (whole.kind, whole.step, whole.k) == ("exception", 4, 1)
    assert dict(whole.fields) == {"type": "E", "message": "ü" * 200}
    assert dict(cut.fields) == {"message": "m" * 400}
    assert recorder.dropped == {"notes": 1}


def test_a_path_in_a_note_that_is_not_utf_8_can_be_sent(tmp_path):
    recorder = a_recorder(tmp_path)
    fields = {"location": "/data/\udcff.pt", "also": ["\udc80"], "message": "\U0001f4be"}
    recorder.note("checkpoint_failed", fields, 4, 0, 1_000)
    (note,) = everything_in(recorder)
    assert note.fields == {"location": "/data/?.pt", "also": ["?"], "message": "\U0001f4be"}
    event = wire.Event(note.kind, 1, 0, note.step, dict(note.fields))
    batch = wire.Batch(wire.SCHEMA_VERSION, "gpt", "l.0", "node-1", "boot", 1, 1, events=(event,))
    assert wire.decode_batch(wire.encode(batch)) == batch


def test_parameter_names_beyond_the_block_are_cut_and_counted(tmp_path):
    recorder = a_recorder(tmp_path)
    names = [os.urandom(32).hex() for _ in range(2_000)]
    recorder.declare({"parameters": names, "replicated": True})
    reader = RingReader(recorder.path)
    kept = reader.header.identity["parameters"]
    reader.close()
    assert kept == names[: len(kept)]
    assert 100 < len(kept) < 2_000
    assert recorder.dropped["parameters"] == 2_000 - len(kept)


def test_closing_twice_or_a_recorder_that_is_off_is_harmless(tmp_path):
    recorder = a_recorder(tmp_path)
    recorder.close()
    recorder.close()
    write_step(recorder, 0)
    Recorder.off().close()


LOCK_QUESTION = """
import sys
from rankwatch.reader import RingReader
reader = RingReader(sys.argv[1])
print(reader.owner_alive())
reader.close()
"""


def test_the_lock_tells_another_process_that_the_rank_lives_until_it_closes(tmp_path):
    recorder = a_recorder(tmp_path)
    path = recorder.path

    def alive() -> str:
        asked = [sys.executable, "-c", LOCK_QUESTION, path]
        return subprocess.run(asked, check=True, capture_output=True, text=True, timeout=60).stdout.strip()

    assert alive() == "True"
    assert alive() == "True"  # asking takes nothing away
    recorder.close()
    assert alive() == "False"


N = layout.RING_ENTRIES


@pytest.fixture
def recorder(tmp_path):
    return a_recorder(tmp_path)


@pytest.fixture
def reader(recorder):
    reader = RingReader(recorder.path, writable=True)
    yield reader
    reader.close()


def write(recorder, first: int, count: int) -> None:
    for step in range(first, first + count):
        write_step(recorder, step)


def slot(sequence: int) -> int:
    return layout.RING_OFFSET + (sequence - 1) % N * layout.ENTRY_BYTES


def steps(poll) -> list[int]:
    return [entry.step for entry in poll.entries]


def test_entries_come_once_in_order_in_parts_and_to_the_next_reader_from_the_position_of_the_first(recorder, reader):
    assert reader.poll().entries == []
    write(recorder, 0, 3)
    assert steps(reader.poll()) == [0, 1, 2]
    assert reader.poll().entries == []
    write(recorder, 3, 5)
    assert steps(reader.poll(2)) == [3, 4]
    other = RingReader(recorder.path, position=reader.position)
    assert steps(other.poll()) == steps(reader.poll()) == [5, 6, 7]
    other.close()


def test_a_whole_ring_is_kept_and_what_was_overwritten_is_counted(recorder, reader):
    write(recorder, 0, N)
    assert len(reader.poll().entries) == N
    write(recorder, N, N + 5)
    poll = reader.poll()
    assert poll.lost == {"ring": 5}
    assert steps(poll) == list(range(N + 5, 2 * N + 5))


@pytest.mark.parametrize("at", [0, 4, 8, 9, 16, 60, 130, 255])
def test_whichever_byte_is_torn_the_entry_is_counted_and_the_others_are_read(recorder, reader, at):
    write(recorder, 0, 5)
    recorder._view[slot(3) + at] ^= 0x80
    poll = reader.poll()
    assert steps(poll) == [0, 1, 3, 4]
    assert sum(poll.lost.values()) == 1


def test_an_entry_that_is_half_written_is_waited_for(recorder, reader):
    write(recorder, 7, 1)
    whole = bytes(recorder._view[slot(1) : slot(2)])
    recorder._view[slot(1) + 20 : slot(2)] = bytes(236)
    recorder.words[layout.HEAD] = 0
    assert reader.poll() == Poll([], {})
    recorder._view[slot(1) : slot(2)] = whole
    assert steps(reader.poll()) == [7]  # also before the head word follows: it may be the last entry before a crash


def test_an_entry_of_an_unknown_type_is_counted(recorder, reader):
    write(recorder, 0, 3)
    at = slot(2)
    entry = bytearray(recorder._view[at : at + layout.ENTRY_BYTES])
    entry[4] = 77
    entry[:4] = zlib.crc32(bytes(entry[4:])).to_bytes(4, "little")
    recorder._view[at : at + layout.ENTRY_BYTES] = entry
    poll = reader.poll()
    assert steps(poll) == [0, 2]
    assert poll.lost == {"unknown": 1}


def test_a_note_whose_beginning_was_overwritten_does_not_come(recorder, reader):
    recorder.note("note", {"text": "x" * 300}, 0, 0, 1_000)
    recorder.note("note", {"text": "second"}, 0, 0, 1_000)
    recorder._view[slot(1) + 60] ^= 1
    poll = reader.poll()
    assert [entry.fields for entry in poll.entries] == [{"text": "second"}]
    assert poll.lost == {"torn": 1}


def test_names_that_come_later_are_found(recorder, reader):
    for number in range(3):
        recorder.floats[recorder.metric(f"m{number}")] = 1.0
        write_step(recorder, number, mask=1 << number)
        (entry,) = reader.poll().entries
        assert dict(entry.values) == {f"m{number}": 1.0}


def test_progress_tells_step_phase_state_and_answer(recorder, reader):
    assert reader.progress().step == -1
    assert (reader.progress().phase, reader.progress().state) == ("", "running")
    recorder.words[layout.POSITION] = 2 << 48 | 7
    recorder.words[layout.STEP_ENTERED] = 5_000
    recorder.words[layout.PHASE] = recorder.phase("forward")
    recorder.words[layout.PHASE_ENTERED] = 6_000
    recorder.words[layout.COLLECTIVES] = 9
    recorder.words[layout.STATE] = layout.HELD
    recorder.answer.write(layout.encode_answer(Answer("o", "held", 7, 2)))
    progress = reader.progress()
    assert (progress.step, progress.k, progress.phase, progress.state) == (6, 2, "forward", "held")
    assert (progress.step_entered_ns, progress.phase_entered_ns, progress.collective_seq) == (5_000, 6_000, 9)
    assert progress.answer == Answer("o", "held", 7, 2)


def test_between_phases_a_phase_is_as_old_as_its_step_or_as_the_end_of_the_one_before(recorder, reader):
    words, forward = recorder.words, recorder.phase("forward")
    ages = [(layout.NO_PHASE, 1_000, 5_000), (layout.NO_PHASE, 6_000, 5_000), (forward, 1_000, 5_000)]
    since = []
    for words[layout.PHASE], words[layout.PHASE_ENTERED], words[layout.STEP_ENTERED] in ages:
        since.append(reader.progress().phase_since_ns)
    assert since == [5_000, 6_000, 1_000]


def test_the_directive_slot_tells_what_stands_in_it_until_it_is_cleared(recorder, reader):
    assert reader.directives.read() is None
    directive = Directive("o", "l.0", "hold", "pause", 12)
    reader.directives.write(directive)
    other = RingReader(recorder.path)
    assert other.directives.read() == directive
    other.close()
    reader.directives.clear("o", "l.0")
    assert reader.directives.read() is None


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "empty"),
        (b"hello", "not a recorder file"),
        (bytes(layout.FILE_BYTES), "not a recorder file of version 2, or still being created"),
        (layout.MAGIC + b"\x09" + bytes(layout.FILE_BYTES - 9), "version"),
        (layout.MAGIC + b"\x02" + bytes(layout.FILE_BYTES - 9), "unknown sizes"),
    ],
)
def test_what_is_no_recorder_file_is_a_clear_error_and_leaks_no_descriptor(tmp_path, content, complaint):
    path = tmp_path / "x.ring"
    path.write_bytes(content)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ValueError, match=complaint):
        RingReader(str(path))
    assert os.listdir("/proc/self/fd") == before


WRITER = """
import sys, time
from rankwatch.recorder import Recorder
recorder = Recorder.create({"job": "j", "launch": "l", "rank": 0}, [sys.argv[1]], monotonic_ns=5, unix_ns=5)
value = recorder.metric("value")
words, k = recorder.words, 0
print(recorder.path, flush=True)
step = 0
while True:
    recorder.floats[value] = float(step)
    recorder.declare({"step": step}) if step % 50 == 0 else None
    times = dict.fromkeys(("step_ns", "busy_ns", "busy_cpu_ns", "wait_ns"), step)
    recorder.write_step(
        step=step, k=0, kind=0, relative_step=step, end_ns=time.monotonic_ns(), phases_ns=[], mask=1, **times
    )
    step += 1
"""


@pytest.fixture
def writer(tmp_path):
    """A real process that writes as fast as it can, and the path of its file."""
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    yield process, process.stdout.readline().strip()
    process.kill()
    process.wait()
    process.stdout.close()


def read_until(reader: RingReader, count: int) -> tuple[list[StepEntry], dict[str, int]]:
    entries, lost = [], {}
    deadline = time.monotonic() + 30
    while len(entries) < count:
        assert time.monotonic() < deadline, f"{len(entries)} of {count} entries in 30 s"
        poll = reader.poll(500)
        entries += poll.entries
        for reason, number in poll.lost.items():
            lost[reason] = lost.get(reason, 0) + number
    return entries, lost


def test_beside_a_fast_writer_each_entry_is_read_whole_or_counted_as_lost(writer):
    _, path = writer
    reader = RingReader(path)
    entries, lost = read_until(reader, 3 * N)
    for entry in entries:
        # The step is told three times in an entry; a mixture of two entries would tell two steps.
        assert entry.step == entry.values["value"] == entry.sequence - 1
        assert entry.step_time_s == pytest.approx(entry.step * 1e-9, rel=1e-6)
    assert len(entries) + sum(lost.values()) == reader.position - 1
    assert set(lost) <= {"ring", "torn"}
    reader.close()


@pytest.mark.parametrize("trial", range(4))
def test_a_writer_killed_at_any_moment_leaves_a_file_that_reads_to_its_last_entry(writer, trial):
    process, path = writer
    reader = RingReader(path)
    assert reader.owner_alive()
    while not reader.head:
        pass
    time.sleep(random.Random(trial).uniform(0.001, 0.05))  # the moment of the kill, not a wait for something
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not reader.owner_alive()
    head = reader.head
    poll = reader.poll(2 * N)
    assert poll.entries[-1].sequence in (head, head + 1)
    assert set(poll.lost) <= {"ring"} or poll.lost.get("torn", 0) <= 1
    assert reader.header.identity["step"] <= poll.entries[-1].step + 1
    assert reader.progress().state == "running"
    reader.close()
