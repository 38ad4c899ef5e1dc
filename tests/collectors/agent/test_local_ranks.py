"""Recorder files of a directory: found, remembered, removed."""

import os
import time
from pathlib import Path

from rankwatch import layout
from rankwatch.agent.ranks import ALL_TOLD, LocalRanks, jobs_in
from rankwatch.recorder import Recorder


def recorded(directory: Path, rank: int = 0, job: str = "gpt") -> str:
    """A recorder file with three notes, whose owner is gone."""
    identity = {"job": job, "launch": "l", "rank": rank, "world_size": 2}
    recorder = Recorder.create(identity, [str(directory)], monotonic_ns=time.monotonic_ns(), unix_ns=1)
    for number in range(3):
        recorder.note("note", {"text": str(number)}, 0, 0, time.monotonic_ns())
    path = recorder.path
    recorder.close()
    assert path is not None
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


def test_the_next_worker_goes_on_behind_what_was_settled(tmp_path: Path) -> None:
    path = recorded(tmp_path)
    first = LocalRanks(tmp_path, "gpt")
    (rank,) = first.scan()
    assert len(rank.poll().entries) == 3
    first.settle({path: 2, "gone": 7})
    first.settle({path: 1})
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
    first.settle({path: ALL_TOLD})
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


def test_a_directory_that_is_gone_is_no_error(tmp_path: Path) -> None:
    assert LocalRanks(tmp_path / "gone", "gpt").scan() == []
