"""Where checkpoints lie, which of their locations an agent passes on to its ranks, and which saves disappear."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwatch import wire
from rankwatch.agent import checkpoints
from rankwatch.agent.checkpoints import (
    ANSWER_WITHIN_S,
    CHECKS_MAX,
    HOLDS_S,
    LOOK_EVERY_S,
    WATCHED_MAX,
    CheckpointDisk,
    CheckpointRoots,
    SavedCheckpoints,
)
from rankwatch.agent.ranks import LocalRank
from rankwatch.locations import (
    LOCATION_CHARACTERS_MAX,
    ROOTS_MAX,
    checkpoint_root,
    folder_of,
    folders,
    is_below,
    roots_with,
)
from rankwatch.reader import Note
from tests.support.agent.service import until
from tests.support.clock import FakeClock
from tests.support.ranks.recorders import a_recorder, local_rank


@pytest.mark.parametrize(
    ("location", "roots"),
    [
        ("/ckpt/step-5.pt", ["/ckpt"]),
        ("/ckpt//./step-5.pt", ["/ckpt"]),
        ("/ckpt", ["/ckpt"]),
        ("runs/1/step-5", ["runs"]),
        ("step-5.pt", ["."]),
        ("s3://bucket/run/step-5", ["s3://bucket/run"]),
        ("S3://bucket/run/step-5", ["s3://bucket"]),
    ],
)
def test_what_is_below_a_root_may_be_loaded(location, roots):
    assert is_below(location, roots)
    assert not is_below(location, [])


@pytest.mark.parametrize(
    ("location", "roots"),
    [
        ("/evil/x.pt", ["/ckpt"]),
        ("/ckpt-other/x.pt", ["/ckpt"]),
        ("ckpt/x.pt", ["/ckpt"]),
        ("/ckpt/x.pt", ["."]),
        ("/ckpt/x.pt", ["ckpt"]),
        ("s3://bucket-2/run/x", ["s3://bucket/run"]),
        ("s3://bucket/runs/x", ["s3://bucket/run"]),
        ("gs://bucket/run/x", ["s3://bucket/run"]),
        ("http://ckpt/x", ["/ckpt", "ckpt", "."]),
    ],
)
def test_what_is_below_none_may_not(location, roots):
    assert not is_below(location, roots)
    assert is_below("", roots), "a capture in memory has no location"


@pytest.mark.parametrize(
    ("location", "why"),
    [
        ("/ckpt/../evil.pt", "a .. in it"),
        ("../evil.pt", "a .. in it"),
        ("s3://bucket/run/../../other", "a .. in it"),
        ("s3://bucket/run/%2e%2e/other", "a .. in it"),
        ("/ckpt/%2e%2e%2fevil.pt", "a .. in it"),
        ("/ckpt/x\n.pt", "cannot be printed"),
        ("/ckpt/x\0.pt", "cannot be printed"),
        ("/ckpt/\u202ext.pt", "cannot be printed"),
        ("/ckpt/" + "x" * LOCATION_CHARACTERS_MAX, "longer than"),
    ],
)
def test_what_climbs_or_hides_is_not_valid(location, why):
    with pytest.raises(ValueError, match=why):
        is_below(location, ["/ckpt", "s3://bucket/run", "."])


@pytest.mark.parametrize("text", ["", "/", "//", "/.", "file:///", "file://localhost/", "/a/../b"])
def test_a_root_that_holds_everything_is_none(text):
    with pytest.raises(ValueError, match=r"it (holds every file|is empty|has a \.\. in it)"):
        checkpoint_root(text)


@pytest.mark.parametrize(
    ("location", "folder"),
    [
        ("/ckpt/5.pt", "/ckpt"),
        ("/5.pt", "/5.pt"),
        ("5.pt", "."),
        ("s3://b/5", "s3://b"),
        ("file:///5.pt", "file:///5.pt"),
    ],
)
def test_the_folder_of_a_location_is_never_the_whole_file_system(location, folder):
    assert folder_of(location) == folder


@pytest.mark.parametrize(
    ("saved", "roots"),
    [
        (["/ckpt/5.pt", "/ckpt/10.pt"], ("/ckpt",)),
        (["/ckpt/step-5/0.pt", "/ckpt/step-10/0.pt"], ("/ckpt",)),
        (["/ckpt/e1/s5/x", "/ckpt/e1/s9/x", "/ckpt/e2/s12/x", "/ckpt/e2/s15/x"], ("/ckpt",)),
        (["/a/5.pt", "/b/10.pt"], ("/a", "/b")),
        (["/nvme/ckpt/5.pt", "s3://b/run/5"], ("/nvme/ckpt", "s3://b/run")),
        (["ckpt/5.pt", "/ckpt/5.pt"], ("ckpt", "/ckpt")),
        (["s3://a/5", "s3://b/5"], ("s3://a", "s3://b")),
    ],
)
def test_roots_follow_from_what_was_saved(saved, roots):
    found: tuple[str, ...] = ()
    for location in saved:
        found = roots_with(found, location)
        assert is_below(location, found)
    assert found == roots


locations = st.lists(st.sampled_from("abcd"), min_size=1, max_size=5).map(lambda names: "/" + "/".join(names))


@given(st.lists(locations, max_size=60))
def test_roots_stay_few_hold_the_newest_save_and_never_everything(saved):
    roots: tuple[str, ...] = ()
    for location in saved:
        roots = roots_with(roots, location)
        assert is_below(location, roots)
        assert len(roots) <= ROOTS_MAX
        assert "/" not in roots


@given(st.text(max_size=40))
def test_any_text_is_a_location_or_not_valid(text):
    try:
        found = folders(text)
    except ValueError:
        return
    assert folders(found[0]) == found, "the plain form is its own plain form"


class World:
    """The agent's knowledge of one job on this host, whose ranks are this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now_s = 100.0
        self._opened = ExitStack()
        self.close = self._opened.close
        self.again()

    def again(self) -> None:
        """The next agent on this host."""
        self.roots = CheckpointRoots(self.folder / "gpt.roots", lambda: self.now_s)

    def rank(self, *declared: str, launch: str = "l", number: int = 0) -> LocalRank:
        roots = {"checkpoint_roots": list(declared)} if declared else {}
        recorder = a_recorder(self.folder, time.monotonic_ns(), launch=launch, rank=number, world_size=2, **roots)
        self._opened.callback(recorder.close)
        rank = self._opened.enter_context(local_rank(recorder))
        self.roots.meet(rank)
        return rank

    def save(self, rank: LocalRank, location: object, **fields: object) -> None:
        self.roots.learn(rank, Note(1, 5, 0, 1, "checkpoint_saved", {"location": str(location), **fields}))

    def why_not(self, location: object) -> str:
        """What the agent says once the file system has answered."""
        until(lambda: self.roots.why_not(str(location)) is not None, 10.0)
        return self.roots.why_not(str(location)) or ""


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


def test_declared_roots_are_the_only_ones_and_a_save_elsewhere_is_reported(world: World, ckpt: Path) -> None:
    rank = world.rank(str(ckpt))
    world.save(rank, ckpt.parent / "evil" / "step-9.pt")
    assert world.roots.roots == (str(ckpt),)
    assert "not below a checkpoint root" in world.why_not(ckpt.parent / "evil" / "step-9.pt")
    assert "will not be loaded" in world.roots.trouble
    world.rank(str(ckpt), launch="m")
    assert world.roots.trouble == ""


@pytest.mark.parametrize(
    ("root", "location", "why"),
    [
        ("HERE/ckpt", "HERE/ckpt/../evil/step-9.pt", "a .. in it"),
        ("HERE/ckpt", "HERE/ckpt/x/../../evil/step-9.pt", "a .. in it"),
        ("HERE/ckpt", "HERE/ckpt/%2e%2e/evil/step-9.pt", "a .. in it"),
        ("HERE/ckpt", "HERE/ckpt/newest", ""),
        ("HERE/ckpt", "HERE/ckpt/planted.pt", "outside of the checkpoint roots"),
        ("HERE/ckpt", "HERE/ckpt/folder/step-9.pt", "outside of the checkpoint roots"),
        ("file://HERE/ckpt", "file://HERE/ckpt/step-5.pt", ""),
        ("file://HERE/ckpt", "file://HERE/ckpt/planted.pt", "outside of the checkpoint roots"),
        ("HERE/a_link", "HERE/a_link/step-5.pt", ""),
        ("ckpt", "ckpt/step-5.pt", ""),
        ("ckpt", "ckpt/planted.pt", "outside of the checkpoint roots"),
        ("s3://bucket/run", "s3://bucket/run/step-9", ""),
        ("s3://bucket/run", "s3://bucket/other/step-9", "not below a checkpoint root"),
    ],
)
def test_links_are_followed_and_a_url_is_compared_as_text_alone(world, ckpt, monkeypatch, root, location, why):
    """A relative location is below the working directory of the ranks."""
    (ckpt / "newest").symlink_to("step-5.pt")
    (ckpt / "planted.pt").symlink_to(ckpt.parent / "evil" / "step-9.pt")
    (ckpt / "folder").symlink_to(ckpt.parent / "evil")
    (ckpt.parent / "a_link").symlink_to(ckpt)
    monkeypatch.chdir(ckpt.parent)
    world.rank(root.replace("HERE", str(ckpt.parent)))
    monkeypatch.chdir("/")
    reported = world.why_not(location.replace("HERE", str(ckpt.parent)))
    assert why in reported
    assert bool(reported) == bool(why)


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


def test_a_file_system_that_does_not_answer_is_not_waited_for(world, ckpt, monkeypatch):
    answers, real = threading.Event(), os.path.realpath
    monkeypatch.setattr(checkpoints.os.path, "realpath", lambda path: answers.wait(30.0) and real(path))
    world.rank(str(ckpt))
    assert world.roots.why_not(f"{ckpt}/step-5.pt") is None
    world.now_s += ANSWER_WITHIN_S + 0.1
    assert "has not answered" in world.why_not(ckpt / "step-5.pt")
    for step in range(2 * CHECKS_MAX):
        world.roots.why_not(f"{ckpt}/{step}")
    assert threading.active_count() < 2 * CHECKS_MAX
    assert "do not answer" in world.why_not(ckpt / "other.pt")
    answers.set()
    until(lambda: world.roots.why_not(f"{ckpt}/step-5.pt") == "")


def test_what_was_found_is_looked_up_again_after_a_while(world: World, ckpt: Path) -> None:
    world.rank(str(ckpt))
    assert world.why_not(ckpt / "new.pt") == ""
    (ckpt / "new.pt").symlink_to(ckpt.parent / "evil" / "step-9.pt")
    assert world.why_not(ckpt / "new.pt") == ""
    world.now_s += HOLDS_S + 0.1
    assert "outside of the checkpoint roots" in world.why_not(ckpt / "new.pt")


class Host:
    """An agent's watch over the saves below a folder; looks take place at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = FakeClock()
        self.looks = 0
        self.saved = SavedCheckpoints(self._path_of, self.clock.monotonic_s, self._begin)

    def _path_of(self, location: str) -> str | None:
        return None if "://" in location or not location else str(self.folder / location)

    def _begin(self, look: Callable[[], None]) -> None:
        self.looks += 1
        look()

    def save(self, step: int, location: str, *, there: bool = True) -> str:
        if there:
            (self.folder / location).mkdir(parents=True, exist_ok=True)
        checkpoint = f"local:l.0:{step}"
        fields = {"checkpoint": checkpoint, "tier": "local", "location": location}
        self.saved.learn(Note(1, step, 0, 1, "checkpoint_saved", fields))
        return checkpoint

    def missing(self, looks: int = 1) -> list[str]:
        """What is reported while so many further looks begin."""
        found = []
        for _ in range(looks):
            self.clock.advance(LOOK_EVERY_S)
            found += [one.checkpoint for one in self.saved.missing()]
        return found


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_a_save_that_is_deleted_is_missing_after_two_looks_and_once(host: Host) -> None:
    first, _second = host.save(5, "out/5"), host.save(9, "out/9")
    assert host.missing(3) == []
    os.rmdir(host.folder / "out/5")
    assert host.missing(2) == []
    assert host.missing(5) == [first]
    assert host.saved.missing() == []


def test_a_save_that_is_replaced_in_between_is_not_missing(host: Host) -> None:
    host.save(5, "out/5")
    host.missing(2)
    os.rmdir(host.folder / "out/5")
    host.missing()
    (host.folder / "out/5").mkdir()
    assert host.missing(5) == []


def test_what_this_host_never_had_is_not_missing(host: Host) -> None:
    host.save(5, "another/host", there=False)
    host.saved.advise(wire.ResumeAdvice("gpt", "local:k.0:4", "elsewhere", 4))
    assert host.missing(5) == []


def test_a_file_system_that_is_unmounted_says_nothing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.save(5, "mounted/5")
    host.missing(2)
    os.rmdir(host.folder / "mounted/5")
    above = checkpoints._device_above
    monkeypatch.setattr(checkpoints, "_device_above", lambda _path: -1)
    assert host.missing(5) == []
    monkeypatch.setattr(checkpoints, "_device_above", above)
    assert host.missing(5) == ["local:l.0:5"]


def test_a_folder_that_is_deleted_with_all_saves_in_it_takes_them_along(host: Host) -> None:
    host.save(5, "out/run/5")
    host.missing(2)
    shutil.rmtree(host.folder / "out")
    assert host.missing(5) == ["local:l.0:5"]


def test_what_is_advised_for_a_relaunch_is_watched_whoever_saved_it(host: Host) -> None:
    (host.folder / "earlier").mkdir()
    for looks, reported in ((2, []), (5, ["local:k.0:4"]), (5, [])):
        host.saved.advise(wire.ResumeAdvice("gpt", "local:k.0:4", "earlier", 4))
        assert host.missing(looks) == reported
        if not reported and (host.folder / "earlier").exists():
            os.rmdir(host.folder / "earlier")


def test_a_look_that_is_not_over_is_waited_for(tmp_path: Path) -> None:
    host, begun = Host(tmp_path), []
    host.saved = SavedCheckpoints(host._path_of, host.clock.monotonic_s, begun.append)
    host.save(5, "out/5")
    assert (host.missing(4), len(begun)) == ([], 1)
    begun[0]()
    assert (host.missing(1), len(begun)) == ([], 2)


def test_only_the_newest_saves_are_watched(host: Host) -> None:
    names = [host.save(step, f"out/{step}") for step in range(WATCHED_MAX + 2)]
    host.missing(2)
    for step in range(WATCHED_MAX + 2):
        os.rmdir(host.folder / f"out/{step}")
    assert host.missing(5) == names[2:]


def disks(host: Host) -> list[CheckpointDisk]:
    host.missing(1)
    return host.saved.disks()


def test_the_file_system_of_the_newest_save_is_reported_with_the_size_of_the_save(host: Host) -> None:
    host.save(5, "out/5")
    (host.folder / "out/5/part-0").write_bytes(b"x" * 3000)
    (host.folder / "out/5/sub").mkdir()
    (host.folder / "out/5/sub/part-1").write_bytes(b"x" * 500)
    (disk,) = disks(host)
    assert (disk.path, disk.save_bytes) == (str(host.folder / "out/5"), 3500)
    assert 0 < disk.free_bytes < disk.total_bytes
    assert disks(host) == []


def test_it_is_reported_again_when_its_free_space_has_changed_or_another_save_does_not_fit_any_more(host, monkeypatch):
    blocks = {"f_bavail": 500, "f_frsize": 10, "f_blocks": 1000}
    monkeypatch.setattr(checkpoints.os, "statvfs", lambda _path: SimpleNamespace(**blocks))
    host.save(5, "out/5", there=False)
    (host.folder / "out").mkdir()
    (host.folder / "out/5").write_bytes(b"x" * 3996)
    assert [disk.free_bytes for disk in disks(host)] == [5000]
    assert host.saved.place == (str(host.folder / "out"), 5000)
    blocks["f_bavail"] = 495
    assert disks(host) == []
    assert host.saved.place == (str(host.folder / "out"), 4950)
    blocks["f_bavail"] = 400
    assert [disk.free_bytes for disk in disks(host)] == [4000]
    blocks["f_bavail"] = 399
    assert [disk.free_bytes for disk in disks(host)] == [3990]


def fail(host: Host, location: str) -> None:
    fields = {"what": "save", "location": location, "type": "OSError", "message": "no"}
    host.saved.learn(Note(1, 9, 0, 1, "checkpoint_failed", fields))


@pytest.mark.parametrize("location", ["", "s3://bucket/5"])
def test_what_has_no_local_path_is_never_looked_up_and_nothing_is_reported_of_a_disk(host, location):
    host.save(5, location, there=False)
    fail(host, location)
    assert (host.missing(5), host.saved.disks(), host.looks) == ([], [], 0)


def test_the_file_system_of_a_save_that_failed_is_reported_at_once_with_the_size_of_the_last_one(host: Host) -> None:
    host.save(5, "out/5")
    (host.folder / "out/5/part-0").write_bytes(b"x" * 3000)
    disks(host)
    fail(host, "out/9/not/made")
    assert host.saved.disks() == []  # what is known is from before the failure
    host.saved.missing()
    (disk,) = host.saved.disks()
    assert (disk.path, disk.save_bytes) == (str(host.folder / "out/9/not/made"), 3000)
    assert disk.free_bytes > 0
    host.save(9, "out/9")
    fail(host, "")
    assert [disk.path for disk in disks(host)] == [str(host.folder / "out/9")]


def test_the_file_system_of_the_first_save_is_reported_if_that_fails(host: Host) -> None:
    fail(host, "out/5")
    (disk,) = disks(host)
    assert (disk.path, disk.save_bytes) == (str(host.folder / "out/5"), 0)


def test_a_restore_that_failed_says_nothing_of_a_disk(host: Host) -> None:
    host.saved.learn(Note(1, 9, 0, 1, "checkpoint_failed", {"what": "restore", "location": "out/5"}))
    assert (disks(host), host.looks) == ([], 0)
