"""How processes end, seen by somebody who is not their parent; recorder files of a directory; the agent's lock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankwatch import layout, wire
from rankwatch.agent import __main__ as command_line
from rankwatch.agent import supervisor
from rankwatch.agent.__main__ import main, recorders_of, spool_folder
from rankwatch.agent.batch_builder import exit_event
from rankwatch.agent.processes import ExitWatch, ProcessExit, RankProcess, catches, read_stat, take_lock, wait_channel
from rankwatch.agent.ranks import FULLY_SENT, LocalRanks, jobs_in
from rankwatch.reader import Note
from rankwatch.spawn import lock_is_held
from tests.support.agent.service import until
from tests.support.ranks.recorders import UNIX_NS, Rank, a_recorder, local_rank
from tests.support.ranks.recording_rank import RecordingRank

PARENT = """
import os, sys, time
pid = os.fork()
if pid == 0:
    sys.stdin.readline()
    os._exit(7)
print(pid, flush=True)
if "reap" in sys.argv:
    os.waitpid(pid, 0)
time.sleep(60)
"""


class Grandchild:
    """A process whose parent is not us, and which ends with status 7 when told to."""

    def __init__(self, *words: str) -> None:
        self.parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = int(self.parent.stdout.readline())

    def end(self) -> None:
        self.parent.stdin.write("\n")
        self.parent.stdin.flush()

    def close(self) -> None:
        self.parent.kill()
        self.parent.communicate()


@pytest.fixture(params=["zombie", "reap"])
def grandchild(request: pytest.FixtureRequest) -> Iterator[Grandchild]:
    grandchild = Grandchild(request.param)
    yield grandchild
    grandchild.close()


def held(pid: int) -> RankProcess:
    stat = read_stat(pid)
    return RankProcess(pid, stat.start_ticks)


def ended(process: RankProcess) -> ProcessExit:
    watch = ExitWatch()
    watch.add(process)
    assert list(watch.wait(60)) == [process.fd]
    until(process.exit_status)
    found = process.exit_status()
    watch.forget(process)
    watch.close()
    return found


def test_an_exit_status_is_read_though_we_are_not_the_parent(grandchild: Grandchild) -> None:
    process = held(grandchild.pid)
    assert process.exit_status() is None
    assert not process.exiting()
    grandchild.end()
    found = ended(process)
    assert (found.code, found.signal) == (7, None)
    assert found.how in ("zombie", "pidfd")
    assert process.exiting()
    process.close()


def test_a_signal_is_reported_as_such(grandchild: Grandchild) -> None:
    process = held(grandchild.pid)
    assert process.send(signal.SIGSEGV)
    found = ended(process)
    assert (found.code, found.signal) == (None, signal.SIGSEGV)
    process.close()


def test_another_process_with_the_same_pid_is_not_taken_for_ours() -> None:
    with pytest.raises(ProcessLookupError):
        RankProcess(os.getpid(), 1)
    with pytest.raises(ProcessLookupError):
        RankProcess(2**22 - 1, 1)


def test_several_exits_are_reported_in_the_order_in_which_they_happened() -> None:
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(8)]
    processes = [held(child.pid) for child in children]
    watch = ExitWatch()
    for process in processes:
        watch.add(process)
    order = [5, 2, 7, 0, 1, 6, 3, 4]
    for index in order:
        children[index].kill()
        children[index].wait()
    assert list(watch.wait(0)) == [processes[index].fd for index in order]
    for process in processes:
        assert not process.send(signal.SIGTERM), "it was waited for"
        watch.forget(process)
        process.close()
    assert list(watch.wait(0)) == []
    watch.close()


def test_a_name_with_blanks_and_parentheses_does_not_confuse_the_reading(tmp_path: Path) -> None:
    fields = ["S", *(str(number) for number in range(4, 53))]
    (tmp_path / "17").mkdir()
    (tmp_path / "17" / "stat").write_text(f"17 (a) b (c) S 9) {' '.join(fields)}")
    stat = read_stat(17, tmp_path)
    assert (stat.state, stat.cpu_ticks, stat.start_ticks, stat.wait_status) == ("S", 14 + 15, 22, 52)
    assert not stat.exiting


def test_what_is_not_there_is_none() -> None:
    assert read_stat(2**22 - 1) is None
    assert wait_channel(2**22 - 1) == ""
    assert not catches(2**22 - 1, signal.SIGTERM)


def test_a_handler_is_seen_only_where_there_is_one() -> None:
    program = "import signal, sys; signal.signal(41, lambda *_: None); print(flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    assert catches(child.pid, 41)
    assert not catches(child.pid, 42)
    child.communicate()


def recorded(directory: Path, rank: int = 0, job: str = "gpt") -> str:
    """A recorder file with three notes, whose owner is gone."""
    recorder = a_recorder(directory, time.monotonic_ns(), job=job, rank=rank, world_size=2)
    for number in range(3):
        recorder.note("note", {"text": str(number)}, 0, 0, time.monotonic_ns())
    path = recorder.path
    recorder.close()
    return path


def test_recorders_of_the_job_are_found_once_and_others_left_alone(tmp_path: Path) -> None:
    recorded(tmp_path, 0)
    other = recorded(tmp_path, 0, job="other")
    ranks = LocalRanks(tmp_path, "gpt")
    assert [(rank.rank, rank.attempt(2)) for rank in ranks.scan()] == [(0, "l.2")]
    assert ranks.scan() == []
    recorded(tmp_path, 1)
    assert [rank.rank for rank in ranks.scan()] == [1]
    for rank in list(ranks):
        ranks.remove(rank)
    assert os.listdir(tmp_path) == [os.path.basename(other)]
    ranks.close()


def test_the_next_worker_goes_on_behind_what_was_acknowledged(tmp_path: Path) -> None:
    path = recorded(tmp_path)
    first = LocalRanks(tmp_path, "gpt")
    (rank,) = first.scan()
    assert len(rank.poll().entries) == 3
    first.acknowledge_sent({path: 2, "gone": 7})
    first.acknowledge_sent({path: 1})
    first.close()
    second = LocalRanks(tmp_path, "gpt")
    (rank,) = second.scan()
    assert [entry.sequence for entry in rank.poll().entries] == [3]
    second.close()


def test_a_recorder_that_was_told_to_its_end_is_removed_by_the_next_worker(tmp_path: Path) -> None:
    path = recorded(tmp_path)
    Path(layout.stack_path(path)).write_text("stack")
    Path(layout.trace_path(path)).write_text("{}")
    Path(layout.trace_path(path) + layout.UNFINISHED_SUFFIX).write_text("{")
    first = LocalRanks(tmp_path, "gpt")
    first.scan()
    first.acknowledge_sent({path: FULLY_SENT})
    first.close()
    second = LocalRanks(tmp_path, "gpt")
    assert second.scan() == []
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_position_costs_repeated_records_and_nothing_else(tmp_path: Path) -> None:
    path = recorded(tmp_path)
    for content in (b"", b"short", b"\xff" * 12):
        Path(path + ".position").write_bytes(content)
        ranks = LocalRanks(tmp_path, "gpt")
        (rank,) = ranks.scan()
        assert len(rank.poll().entries) == 3
        ranks.close()


def test_a_file_that_is_still_being_made_is_looked_at_again(tmp_path: Path) -> None:
    path = Path(recorded(tmp_path))
    whole = path.read_bytes()
    path.write_bytes(b"\0" * len(whole))
    ranks = LocalRanks(tmp_path, "gpt")
    assert ranks.scan() == []
    path.write_bytes(whole)
    assert len(ranks.scan()) == 1
    ranks.close()


def test_a_daemon_sees_the_job_of_each_new_file(tmp_path: Path) -> None:
    one, two = recorded(tmp_path, job="a"), recorded(tmp_path, job="b")
    (tmp_path / "broken.ring").write_bytes(b"x")
    assert jobs_in(tmp_path, {os.path.basename(one)}) == {os.path.basename(two): "b"}
    assert LocalRanks(tmp_path / "gone", "gpt").scan() == [], "a directory that is gone is no error"


def test_an_agent_that_is_started_by_hand_finds_the_folder_of_its_user(tmp_path: Path) -> None:
    named, temporary = tmp_path / "named", tmp_path / f"rankwatch-{os.getuid()}"
    temporary.mkdir()
    environment = {"RANKWATCH_DIR": str(named), "TMPDIR": str(tmp_path)}
    assert recorders_of(environment) != named, "it is not there"
    named.mkdir()
    assert recorders_of(environment) == named
    elsewhere = recorders_of({"TMPDIR": str(tmp_path)})
    assert elsewhere.name == f"rankwatch-{os.getuid()}"


def test_the_spool_lies_beside_the_recorders_unless_those_lie_in_memory(tmp_path: Path) -> None:
    assert spool_folder(tmp_path, "gpt", {}).parent == tmp_path / "spool"
    memory = Path("/dev/shm/rankwatch-7")
    assert spool_folder(memory, "gpt", {}).parent == Path(f"/var/tmp/rankwatch-{os.getuid()}")
    assert spool_folder(memory, "gpt", {"RANKWATCH_SPOOL": str(tmp_path)}).parent == tmp_path
    others = [(memory, "gpt"), (memory, "other"), (Path("/dev/shm/rankwatch-8"), "gpt")]
    assert len({spool_folder(directory, job, {}) for directory, job in others}) == 3


def test_arguments_that_make_no_sense_are_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--folder=/tmp/x", "--job", "gpt"], {})
    assert caught.value.code == 2
    assert "--folder" in capsys.readouterr().err


def test_the_lock_is_seen_by_the_sdk_and_lasts_as_long_as_either_holder(tmp_path: Path) -> None:
    path = Path(layout.agent_lock_path(str(tmp_path), "gpt"))
    descriptor = take_lock(path)
    assert take_lock(path) is None
    assert lock_is_held(str(path))
    assert main(["--dir", str(tmp_path), "--job", "gpt"], {}) == 0, "a second agent ends at once"
    other = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, pass_fds=[descriptor]
    )
    os.close(descriptor)
    assert lock_is_held(str(path))
    assert take_lock(path) is None
    other.communicate()
    until(lambda: not lock_is_held(str(path)))


def test_a_rank_that_begins_while_the_agent_ends_gets_its_agent_all_the_same(tmp_path, monkeypatch):
    ranks: list[RecordingRank] = []

    def supervised(_worker: list[str], _lock: int, _report: object) -> int:
        """The worker ends in the very moment when a rank begins and finds the lock held."""
        if not ranks:
            ranks.append(RecordingRank(tmp_path))
            assert lock_is_held(layout.agent_lock_path(str(tmp_path), "gpt"))
        else:
            ranks[0].close()
            ranks.append(ranks[0])
        return 0

    standard_error = os.dup(2)
    monkeypatch.setattr(supervisor, "supervise", supervised)
    monkeypatch.setattr(command_line, "use_all_cores", lambda: None)
    try:
        assert main(["--dir", str(tmp_path), "--job", "gpt"], {}) == 0
    finally:
        os.dup2(standard_error, 2)
        os.close(standard_error)
    assert len(ranks) == 2
    assert not lock_is_held(layout.agent_lock_path(str(tmp_path), "gpt"))


SIGTERM, SIGKILL = ProcessExit(None, signal.SIGTERM, "pidfd"), ProcessExit(None, signal.SIGKILL, "pidfd")


def exit_of(rank: Rank, ended: ProcessExit) -> wire.Event:
    """The agent's report of the end of a process that has recorded this."""
    with local_rank(rank.recorder) as local:
        for entry in local.poll().entries:
            if isinstance(entry, Note):
                local.learn_end(entry)
        return exit_event(local, local.reader.progress(), ended, UNIX_NS + 10**12)


@pytest.fixture
def broken_off(tmp_path: Path) -> Rank:
    """A rank whose loop was left by `break` a second after its second step began."""
    rank = Rank(tmp_path)
    for step in rank.watch.steps(9):
        rank.clock.advance(1)
        if step == 1:
            break
    return rank


@pytest.mark.parametrize("ended", [SIGTERM, SIGKILL])
def test_of_a_process_that_a_signal_ends_after_its_loop_the_exit_says_where_and_when_that_was_left(broken_off, ended):
    left_ns = broken_off.clock.unix_ns()
    reported = exit_of(broken_off, ended)
    assert (reported.fields["broken_off_unix_ns"], reported.time_unix_ns) == (left_ns, UNIX_NS + 10**12)
    assert "test_ranks.py:" in reported.fields["where"]
    assert (reported.fields["left"], reported.fields["error"]) == (False, "")


def test_it_says_so_too_if_python_has_begun_to_shut_down(broken_off):
    left_ns = broken_off.clock.unix_ns()
    broken_off.clock.advance(5)
    broken_off.watch.at_exit()
    reported = exit_of(broken_off, SIGTERM)
    assert (reported.fields["broken_off_unix_ns"], reported.time_unix_ns) == (left_ns, UNIX_NS + 10**12)
    assert "broken_off_unix_ns" not in exit_of(broken_off, ProcessExit(3, None, "pidfd")).fields


def test_what_broke_off_an_earlier_loop_is_not_how_a_process_ended(broken_off):
    broken_off.clock.advance(1)
    for _ in broken_off.watch.steps(9):
        assert "broken_off_unix_ns" not in exit_of(broken_off, SIGTERM).fields
    assert "broken_off_unix_ns" not in exit_of(broken_off, SIGTERM).fields


def test_an_exit_that_python_had_not_finished_is_reported_with_its_status(tmp_path):
    rank = Rank(tmp_path)
    with pytest.raises(SystemExit), rank.watch.step():
        sys.exit(3)
    assert exit_of(rank, SIGTERM).fields["error"] == "SystemExit: 3"
