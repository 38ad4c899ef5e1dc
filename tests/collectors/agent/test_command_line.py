import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankwatch import layout
from rankwatch.agent import __main__ as command_line
from rankwatch.agent import supervisor
from rankwatch.agent.__main__ import main, spool_folder
from rankwatch.agent.processes import take_lock
from rankwatch.spawn import lock_is_held
from tests.support.agent.service import until
from tests.support.ranks.recording_rank import RecordingRank


def test_the_spool_lies_beside_the_recorders_unless_those_lie_in_memory(tmp_path: Path) -> None:
    assert spool_folder(tmp_path, "gpt", {}).parent == tmp_path / "spool"
    memory = Path("/dev/shm/rankwatch-7")
    assert spool_folder(memory, "gpt", {}).parent == Path(f"/var/tmp/rankwatch-{os.getuid()}")
    assert spool_folder(memory, "gpt", {"RANKWATCH_SPOOL": str(tmp_path)}).parent == tmp_path


def test_no_two_jobs_and_no_two_directories_share_a_spool(tmp_path: Path) -> None:
    places = [(Path("/dev/shm/a"), "x"), (Path("/dev/shm/a"), "y"), (Path("/dev/shm/b"), "x")]
    assert len({spool_folder(directory, job, {}) for directory, job in places}) == 3


def test_arguments_that_make_no_sense_are_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--job", "gpt"], {})
    assert caught.value.code == 2
    assert "--dir" in capsys.readouterr().err


def test_the_lock_is_seen_by_the_sdk_and_lasts_as_long_as_either_holder(tmp_path: Path) -> None:
    path = Path(layout.agent_lock_path(str(tmp_path), "gpt"))
    descriptor = take_lock(path)
    assert descriptor is not None
    assert take_lock(path) is None
    assert lock_is_held(str(path))
    other = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, pass_fds=[descriptor]
    )
    os.close(descriptor)
    assert lock_is_held(str(path))
    assert take_lock(path) is None
    other.communicate()
    until(lambda: not lock_is_held(str(path)))


def test_while_another_agent_has_the_lock_a_second_one_ends_at_once(tmp_path: Path) -> None:
    descriptor = take_lock(Path(layout.agent_lock_path(str(tmp_path), "gpt")))
    assert descriptor is not None
    assert main(["--dir", str(tmp_path), "--job", "gpt"], {}) == 0
    os.close(descriptor)


def test_a_rank_that_begins_while_the_agent_ends_gets_its_agent_all_the_same(tmp_path, monkeypatch):
    ranks: list[RecordingRank] = []

    def supervised(_worker: list[str], _lock: int, _tell: object) -> int:
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
