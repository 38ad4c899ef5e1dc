"""Saves that disappear from disk are reported; what this host never had, or cannot reach, is not."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from rankwatch import wire
from rankwatch.agent import checkpoints
from rankwatch.agent.checkpoints import LOOK_EVERY_S, WATCHED_MAX, CheckpointDisk, SavedCheckpoints
from rankwatch.reader import Note
from tests.support.clock import FakeClock


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


@pytest.mark.parametrize("location", ["s3://bucket/5", ""])
def test_what_has_no_local_path_is_never_looked_up(host: Host, location: str) -> None:
    host.saved.learn(Note(1, 5, 0, 1, "checkpoint_saved", {"checkpoint": "remote:l.0:5", "location": location}))
    assert (host.missing(5), host.looks) == ([], 0)


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
    for folder in ("out/run/5", "out/run", "out"):
        os.rmdir(host.folder / folder)
    assert host.missing(5) == ["local:l.0:5"]


def test_what_is_advised_for_a_relaunch_is_watched_whoever_saved_it(host: Host) -> None:
    (host.folder / "earlier").mkdir()
    advice = wire.ResumeAdvice("gpt", "local:k.0:4", "earlier", 4)
    host.saved.advise(advice)
    host.missing(2)
    os.rmdir(host.folder / "earlier")
    host.saved.advise(advice)
    assert host.missing(5) == ["local:k.0:4"]
    host.saved.advise(advice)
    assert host.missing(5) == []


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


def test_it_is_reported_again_when_its_free_space_has_changed_or_another_save_does_not_fit_any_more(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize("location", ["", "s3://bucket/5"])
def test_of_a_save_that_is_on_no_file_system_nothing_is_reported(host: Host, location: str) -> None:
    host.save(5, location, there=False)
    assert disks(host) == []


def fail(host: Host, location: str) -> None:
    fields = {"what": "save", "location": location, "type": "OSError", "message": "no"}
    host.saved.learn(Note(1, 9, 0, 1, "checkpoint_failed", fields))


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


@pytest.mark.parametrize("location", ["", "s3://bucket/5"])
def test_of_a_first_save_that_failed_on_no_file_system_nothing_is_reported(host: Host, location: str) -> None:
    fail(host, location)
    assert disks(host) == []


def test_a_restore_that_failed_says_nothing_of_a_disk(host: Host) -> None:
    host.saved.learn(Note(1, 9, 0, 1, "checkpoint_failed", {"what": "restore", "location": "out/5"}))
    assert (disks(host), host.looks) == ([], 0)
