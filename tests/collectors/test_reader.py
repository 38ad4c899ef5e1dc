import os
import random
import signal
import subprocess
import sys
import time
import zlib

import pytest

from rankwatch import layout
from rankwatch.layout import Answer, Directive
from rankwatch.reader import Poll, RingReader, StepEntry
from tests.support.ranks.recorders import a_recorder

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
        recorder.write_step(
            step=step,
            k=0,
            kind=0,
            relative_step=step + 1,
            end_ns=2_000,
            step_ns=40,
            busy_ns=30,
            busy_cpu_ns=20,
            wait_ns=10,
            phases_ns=[],
            mask=0,
        )


def slot(sequence: int) -> int:
    return layout.RING_OFFSET + (sequence - 1) % N * layout.ENTRY_BYTES


def steps(poll) -> list[int]:
    return [entry.step for entry in poll.entries]


def test_entries_come_once_in_order_as_they_are_written(recorder, reader):
    assert reader.poll().entries == []
    write(recorder, 0, 3)
    assert steps(reader.poll()) == [0, 1, 2]
    assert reader.poll().entries == []
    write(recorder, 3, 1)
    assert steps(reader.poll()) == [3]


def test_a_limit_leaves_the_rest_for_the_next_poll(recorder, reader):
    write(recorder, 0, 5)
    assert steps(reader.poll(2)) == [0, 1]
    assert steps(reader.poll()) == [2, 3, 4]


def test_a_reader_goes_on_from_a_position_that_another_one_kept(recorder, reader):
    write(recorder, 0, 5)
    reader.poll(3)
    other = RingReader(recorder.path, position=reader.position)
    assert steps(other.poll()) == [3, 4]
    other.close()


def test_a_whole_ring_is_kept_and_what_was_overwritten_is_counted(recorder, reader):
    write(recorder, 0, N)
    assert len(reader.poll().entries) == N
    write(recorder, N, N + 5)
    poll = reader.poll()
    assert poll.lost == {"ring": 5}
    assert steps(poll) == list(range(N + 5, 2 * N + 5))


def test_a_torn_entry_is_counted_and_the_others_are_read(recorder, reader):
    write(recorder, 0, 5)
    recorder._view[slot(3) + 130] ^= 1
    poll = reader.poll()
    assert steps(poll) == [0, 1, 3, 4]
    assert poll.lost == {"torn": 1}


@pytest.mark.parametrize("at", [0, 4, 8, 9, 16, 60, 255])
def test_whichever_byte_is_torn_the_entry_is_not_taken(recorder, reader, at):
    write(recorder, 0, 1)
    recorder._view[slot(1) + at] ^= 0x80
    poll = reader.poll()
    assert poll.entries == []
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
        recorder.write_step(
            step=number,
            k=0,
            kind=0,
            relative_step=1,
            end_ns=2_000,
            step_ns=4,
            busy_ns=3,
            busy_cpu_ns=2,
            wait_ns=1,
            phases_ns=[],
            mask=1 << number,
        )
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


def test_a_directive_that_is_too_long_is_refused_and_the_old_one_stays(reader):
    directive = Directive("o", "l.0", "hold", "pause", 12)
    reader.directives.write(directive)
    with pytest.raises(ValueError, match="do not fit"):
        reader.directives.write(directive._replace(location="x" * 5_000))
    assert reader.directives.read() == directive


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "empty"),
        (b"hello", "not a recorder file"),
        (bytes(layout.FILE_BYTES), "not a recorder file of version 1, or still being created"),
        (layout.MAGIC + b"\x09" + bytes(layout.FILE_BYTES - 9), "version"),
        (layout.MAGIC + b"\x01" + bytes(layout.FILE_BYTES - 9), "unknown sizes"),
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
    if len(sys.argv) > 2 and step % int(sys.argv[2]) == 0:
        time.sleep(0.001)
    step += 1
"""


@pytest.fixture
def writer(tmp_path):
    """A real process that writes as fast as it can, or with a pause of 1 ms every so many steps."""
    started = []

    def start(*arguments: str) -> tuple[subprocess.Popen, str]:
        command = [sys.executable, "-c", WRITER, str(tmp_path), *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process, process.stdout.readline().strip()

    yield start
    for process in started:
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
    _, path = writer()
    reader = RingReader(path)
    entries, lost = read_until(reader, 3 * N)
    for entry in entries:
        # The step is told three times in an entry; a mixture of two entries would tell two steps.
        assert entry.step == entry.values["value"] == entry.sequence - 1
        assert entry.step_time_s == pytest.approx(entry.step * 1e-9, rel=1e-6)
    assert len(entries) + sum(lost.values()) == reader.position - 1
    assert set(lost) <= {"ring", "torn"}
    reader.close()


def test_beside_a_writer_at_training_speed_nothing_is_lost(writer):
    _, path = writer("5")
    reader = RingReader(path)
    entries, lost = read_until(reader, 2_000)
    assert lost == {}
    assert [entry.step for entry in entries] == list(range(len(entries)))
    reader.close()


@pytest.mark.parametrize("trial", range(8))
def test_a_writer_killed_at_any_moment_leaves_a_file_that_reads_to_its_last_entry(writer, trial):
    process, path = writer()
    reader = RingReader(path)
    assert reader.owner_alive()
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
