import math
import os
import subprocess
import sys
import warnings

import pytest

from rankwatch import layout, wire
from rankwatch.folders import directories, others_reach
from rankwatch.reader import Note, RingReader, StepEntry, ValuesEntry
from rankwatch.recorder import Recorder
from tests.support.ranks.recorders import UNIX_NS, a_recorder, everything_in

IDENTITY = {"job": "gpt", "launch": "l", "rank": 0}


def create(*places: object) -> Recorder:
    return Recorder.create(IDENTITY, [str(place) for place in places], monotonic_ns=5, unix_ns=UNIX_NS)


def write(recorder: Recorder, step: int, mask: int = 0, k: int = 0) -> None:
    recorder.write_step(
        step=step,
        k=k,
        kind=0,
        relative_step=step + 1,
        end_ns=2_000,
        step_ns=40,
        busy_ns=30,
        busy_cpu_ns=20,
        wait_ns=10,
        phases_ns=[],
        mask=mask,
    )


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
    with pytest.warns(RuntimeWarning, match="records nothing") as told:
        recorder = create(tmp_path / "file" / "a", tmp_path / "file" / "b")
    assert len(told) == 1
    assert recorder.path is None
    for step in range(10):
        recorder.floats[recorder.metric("loss")] = 1.0
        write(recorder, step, mask=1)
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


@pytest.fixture
def mounted(tmp_path):
    """A real tmpfs with the given options."""
    places = []

    def mount(options: str) -> str:
        place = tmp_path / "mounted"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"{options},mode=0700", "tmpfs", place]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
        places.append(place)
        return str(place)

    yield mount
    for place in places:
        subprocess.run(["umount", "-l", place], check=True)


def test_a_full_tmpfs_is_passed_over(mounted, tmp_path):
    full = mounted("size=1m")
    recorder = create(full, tmp_path / "good")
    assert os.path.dirname(recorder.path) == str(tmp_path / "good")
    assert os.listdir(full) == []


def test_a_read_only_disk_switches_the_recorder_off(mounted):
    place = mounted("size=8m,ro")
    with pytest.warns(RuntimeWarning, match="Read-only"):
        assert create(place).path is None


def test_a_tmpfs_that_fills_up_later_does_not_hurt(mounted):
    place = mounted("size=3m")
    recorder = create(place)
    with open(os.path.join(place, "data loader"), "wb", buffering=0) as hog, pytest.raises(OSError, match="No space"):
        os.posix_fallocate(hog.fileno(), 0, 3 * 1024 * 1024)
    for step in range(2 * layout.RING_ENTRIES):
        write(recorder, step)
    assert recorder.words[layout.HEAD] == 2 * layout.RING_ENTRIES


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
    write(recorder, 0, mask=0b1011111)
    (entry,) = everything_in(recorder)
    assert isinstance(entry, StepEntry)
    assert [entry.values[f"m{index}"] for index in (0, 2, 3)] == [1.5, -math.inf, 5e-324]
    assert math.isnan(entry.values["m1"])
    assert math.copysign(1, entry.values["m4"]) == -1
    assert entry.values["fingerprint"] == -(2**63) + 1
    assert "absent" not in entry.values


def test_times_come_back_as_seconds(tmp_path):
    recorder = a_recorder(tmp_path, monotonic_ns=1_000)
    recorder.phase_index[:2] = bytes([recorder.phase("forward"), recorder.phase("backward")])
    recorder.write_step(
        step=7,
        k=2,
        kind=1,
        relative_step=3,
        end_ns=5_001_000,
        step_ns=4_000_000,
        busy_ns=3_000_000,
        busy_cpu_ns=2_000_000,
        wait_ns=1_000_000,
        phases_ns=[500_000, 1_500_000],
        mask=0,
    )
    (entry,) = everything_in(recorder)
    assert (entry.step, entry.k, entry.kind, entry.relative_step) == (7, 2, 1, 3)
    assert entry.time_unix_ns == UNIX_NS + 5_000_000
    seconds = (entry.step_time_s, entry.busy_s, entry.busy_cpu_s, entry.wait_s)
    assert seconds == pytest.approx((4e-3, 3e-3, 2e-3, 1e-3))
    assert entry.phases == pytest.approx({"forward": 5e-4, "backward": 1.5e-3})


def test_more_than_sixteen_values_go_on_in_values_entries(tmp_path):
    recorder = a_recorder(tmp_path)
    mask = 0
    for number in range(40):
        index = recorder.metric(f"m{number}")
        recorder.floats[index] = float(number)
        mask |= 1 << index
    write(recorder, 5, mask=mask)
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
    write(recorder, 4, mask=0b11)
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
    write(recorder, 0, mask=0b11)
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


def test_a_forked_child_records_nothing_and_the_parent_goes_on(tmp_path):
    recorder = a_recorder(tmp_path)
    write(recorder, 0)
    child = os.fork()
    if child == 0:  # what fails here shows as a status other than 0
        try:
            write(recorder, 99)
            recorder.words[layout.POSITION] = 77
            recorder.close()
            os._exit(0 if recorder.path is None else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    write(recorder, 1)
    assert [entry.step for entry in everything_in(recorder)] == [0, 1]
    assert recorder.words[layout.POSITION] == 0


def test_closing_twice_or_a_recorder_that_is_off_is_harmless(tmp_path):
    recorder = a_recorder(tmp_path)
    recorder.close()
    recorder.close()
    write(recorder, 0)
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
