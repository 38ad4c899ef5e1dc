"""Which locations an agent passes on to the ranks of its host: real files, links and recorders."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rankwatch.agent import checkpoints
from rankwatch.agent.checkpoints import ANSWER_WITHIN_S, CHECKS_MAX, HOLDS_S, CheckpointRoots
from rankwatch.agent.ranks import LocalRank
from rankwatch.reader import Note, RingReader
from rankwatch.recorder import Recorder
from tests.support.agent.service import until


class World:
    """The agent's knowledge of one job on this host, whose ranks are this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now_s = 100.0
        self._opened: list[Recorder | RingReader] = []
        self.again()

    def again(self) -> None:
        """The next agent on this host."""
        self.roots = CheckpointRoots(self.folder / "gpt.roots", lambda: self.now_s)

    def rank(self, *declared: str, launch: str = "l", number: int = 0) -> LocalRank:
        identity = {"job": "gpt", "launch": launch, "rank": number, "world_size": 2}
        identity |= {"checkpoint_roots": list(declared)} if declared else {}
        recorder = Recorder.create(identity, [str(self.folder)], monotonic_ns=time.monotonic_ns(), unix_ns=1)
        assert recorder.path is not None
        reader = RingReader(recorder.path, writable=True)
        self._opened += [reader, recorder]
        rank = LocalRank(recorder.path, reader, reader.header, None, 0, 0)
        self.roots.meet(rank)
        return rank

    def save(self, rank: LocalRank, location: object, **fields: object) -> None:
        self.roots.learn(rank, Note(1, 5, 0, 1, "checkpoint_saved", {"location": str(location), **fields}))

    def why_not(self, location: object) -> str:
        """What the agent says once the file system has answered."""
        until(lambda: self.roots.why_not(str(location)) is not None, 10.0)
        return self.roots.why_not(str(location)) or ""

    def close(self) -> None:
        for each in self._opened:
            each.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    (tmp_path / "rings").mkdir(mode=0o700)
    world = World(tmp_path / "rings")
    yield world
    world.close()


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "evil").mkdir()
    (tmp_path / "ckpt" / "step-5.pt").touch()
    (tmp_path / "evil" / "step-9.pt").touch()
    return tmp_path / "ckpt"


def test_nothing_is_loaded_before_a_rank_has_said_where_its_checkpoints_lie(world: World, ckpt: Path) -> None:
    world.rank()
    assert "none is known" in world.why_not(ckpt / "step-5.pt")
    assert world.why_not("") == "", "a capture in memory has no location"


def test_where_a_rank_has_saved_is_a_root(world: World, ckpt: Path) -> None:
    world.save(world.rank(), ckpt / "step-5.pt")
    assert world.why_not(ckpt / "step-9.pt") == ""
    assert "not below a checkpoint root" in world.why_not(ckpt.parent / "evil" / "step-9.pt")


def test_declared_roots_are_the_only_ones_and_a_save_elsewhere_is_told(world: World, ckpt: Path) -> None:
    rank = world.rank(str(ckpt))
    world.save(rank, ckpt.parent / "evil" / "step-9.pt")
    assert world.roots.roots == (str(ckpt),)
    assert "not below a checkpoint root" in world.why_not(ckpt.parent / "evil" / "step-9.pt")
    assert "will not be loaded" in world.roots.trouble
    world.rank(str(ckpt), launch="m")
    assert world.roots.trouble == ""


@pytest.mark.parametrize("tail", ["../evil/step-9.pt", "x/../../evil/step-9.pt", "%2e%2e/evil/step-9.pt"])
def test_a_location_that_climbs_out_of_the_root_is_refused(world: World, ckpt: Path, tail: str) -> None:
    world.rank(str(ckpt))
    assert ".. in it" in world.why_not(f"{ckpt}/{tail}")


def test_a_link_that_leads_out_of_the_root_is_refused_and_one_within_it_is_not(world: World, ckpt: Path) -> None:
    world.rank(str(ckpt))
    (ckpt / "newest").symlink_to("step-5.pt")
    (ckpt / "planted.pt").symlink_to(ckpt.parent / "evil" / "step-9.pt")
    (ckpt / "folder").symlink_to(ckpt.parent / "evil")
    assert world.why_not(ckpt / "newest") == ""
    assert "outside of the checkpoint roots" in world.why_not(ckpt / "planted.pt")
    assert "outside of the checkpoint roots" in world.why_not(ckpt / "folder" / "step-9.pt")


def test_a_file_url_is_a_path(world: World, ckpt: Path) -> None:
    world.rank(f"file://{ckpt}")
    (ckpt / "planted.pt").symlink_to(ckpt.parent / "evil" / "step-9.pt")
    assert world.why_not(f"file://{ckpt}/step-5.pt") == ""
    assert "outside of the checkpoint roots" in world.why_not(f"file://{ckpt}/planted.pt")


def test_a_root_that_is_a_link_itself_may_be_one(world: World, ckpt: Path) -> None:
    (ckpt.parent / "scratch").symlink_to(ckpt)
    world.rank(str(ckpt.parent / "scratch"))
    assert world.why_not(ckpt.parent / "scratch" / "step-5.pt") == ""


def test_a_relative_location_is_below_the_working_directory_of_the_ranks(
    world: World, ckpt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ckpt.parent)
    world.save(world.rank(), "ckpt/step-5.pt")
    (ckpt / "planted.pt").symlink_to(ckpt.parent / "evil" / "step-9.pt")
    monkeypatch.chdir("/")
    assert world.why_not("ckpt/step-5.pt") == ""
    assert "outside of the checkpoint roots" in world.why_not("ckpt/planted.pt")


def test_a_url_is_compared_as_text_alone(world: World) -> None:
    world.save(world.rank(), "s3://bucket/run/step-5")
    assert world.why_not("s3://bucket/run/step-9") == ""
    assert "not below a checkpoint root" in world.why_not("s3://bucket/other/step-9")


def test_the_next_agent_knows_them_before_the_next_launch_has_saved_anything(world: World, ckpt: Path) -> None:
    world.save(world.rank(), ckpt / "step-5.pt")
    world.again()
    world.rank(launch="m")
    assert world.why_not(ckpt / "step-5.pt") == ""
    world.rank("s3://bucket", launch="n")
    assert "not below a checkpoint root" in world.why_not(ckpt / "step-5.pt")
    assert oct((world.folder / "gpt.roots").stat().st_mode & 0o777) == "0o600"


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"roots": 5}'])
def test_a_file_that_cannot_be_read_says_nothing(world: World, content: str) -> None:
    (world.folder / "gpt.roots").write_text(content)
    world.again()
    assert world.roots.roots == ()


def test_how_many_ranks_save_a_part_is_learned_from_the_ranks_own_notes(world: World) -> None:
    rank = world.rank()
    assert rank.shards == 0
    world.save(rank, "/ckpt/5", shards=1)
    world.save(rank, "", shards=0)
    assert rank.shards == 1


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """A file system that does not answer until this is called."""
    answers = threading.Event()
    real = os.path.realpath

    def slow(path: str) -> str:
        answers.wait(30.0)
        return real(path)

    monkeypatch.setattr(checkpoints.os.path, "realpath", slow)
    yield answers.set
    answers.set()


def test_a_file_system_that_does_not_answer_is_not_waited_for(
    world: World, ckpt: Path, silent: Callable[[], None]
) -> None:
    world.rank(str(ckpt))
    assert world.roots.why_not(f"{ckpt}/step-5.pt") is None
    world.now_s += ANSWER_WITHIN_S + 0.1
    assert "has not answered" in world.why_not(ckpt / "step-5.pt")
    for step in range(2 * CHECKS_MAX):
        world.roots.why_not(f"{ckpt}/{step}")
    assert threading.active_count() < 2 * CHECKS_MAX
    assert "do not answer" in world.why_not(ckpt / "other.pt")
    silent()
    until(lambda: world.roots.why_not(f"{ckpt}/step-5.pt") == "")


def test_what_was_found_is_looked_up_again_after_a_while(world: World, ckpt: Path) -> None:
    world.rank(str(ckpt))
    assert world.why_not(ckpt / "new.pt") == ""
    (ckpt / "new.pt").symlink_to(ckpt.parent / "evil" / "step-9.pt")
    assert world.why_not(ckpt / "new.pt") == ""
    world.now_s += HOLDS_S + 0.1
    assert "outside of the checkpoint roots" in world.why_not(ckpt / "new.pt")
