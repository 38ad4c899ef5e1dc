"""Backups of SQLite, and what a restore refuses. `integration/test_backup.py` has the whole way, with a service."""

import io
import os
import sqlite3
import stat
import tarfile
import threading
from pathlib import Path

import pytest
from sqlalchemy import select, text

from rankwatch_service import backup
from rankwatch_service.access.secret_key import load_secret_key
from rankwatch_service.backup import BackupError, back_up, copy_database, restore
from rankwatch_service.clock import SystemClock
from rankwatch_service.settings import Settings
from rankwatch_service.store import audit_trail
from rankwatch_service.store.engine import open_engine, read, write
from rankwatch_service.store.migrate import upgrade
from rankwatch_service.store.models import Audit
from rankwatch_service.up import data_folder

CLOCK = SystemClock()


@pytest.fixture(autouse=True)
def clean(tmp_path, monkeypatch):
    """A machine without settings."""
    for name in [name for name in os.environ if name.startswith("RANKWATCH_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


def service_in(folder: Path) -> Settings:
    """A data folder as `up` leaves it."""
    folder.mkdir(mode=0o700)
    settings = Settings(data_dir=folder)
    engine = open_engine(settings.database_url)
    upgrade(engine)
    with write(engine) as connection:
        audit_trail.append(connection, 1, "ann", "job.archive", "gpt", "ok")
    engine.dispose()
    for name in ("ingest-token", "local-token", "secret.key"):
        (folder / name).write_text(f"the {name}\n")
    return settings


def backed_up(settings: Settings, file: Path) -> Path:
    engine = open_engine(settings.database_url)
    try:
        back_up(settings, engine, file, CLOCK)
    finally:
        engine.dispose()
    return file


@pytest.fixture
def file(tmp_path) -> Path:
    """A backup of a service on SQLite."""
    return backed_up(service_in(tmp_path / "data"), tmp_path / "backup.tar.gz")


@pytest.fixture
def target(tmp_path) -> Settings:
    return Settings(data_dir=tmp_path / "new")


def changed(file: Path, change) -> Path:
    """The backup with other members: `change` gets (member, content) and gives them, or None to leave it out."""
    other = file.with_name("changed.tar.gz")
    with tarfile.open(file) as old, tarfile.open(other, "w:gz") as new:
        for member in old:
            if (made := change(member, old.extractfile(member).read())) is not None:
                made[0].size = len(made[1])
                new.addfile(made[0], io.BytesIO(made[1]))
    return other


def audit(settings: Settings) -> list[str]:
    engine = open_engine(settings.database_url)
    with read(engine) as connection:
        actions = connection.scalars(select(Audit.action).order_by(Audit.id)).all()
    engine.dispose()
    return list(actions)


def test_a_restored_folder_has_everything_and_nobody_else_can_read_it(file, target):
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    restore(target, file, CLOCK)
    found = {path.name: path for path in target.data_dir.iterdir()}
    assert found.keys() == {"up.lock", "rankwatch.db", "ingest-token", "local-token", "secret.key"} | {
        name for name in found if name.startswith("rankwatch.db-")
    }
    for name in ("ingest-token", "local-token", "secret.key"):
        assert found[name].read_text() == f"the {name}\n"
    assert {stat.S_IMODE(path.stat().st_mode) for path in found.values()} == {0o600}
    assert stat.S_IMODE(target.data_dir.stat().st_mode) == 0o700
    assert audit(target) == ["job.archive", "backup.create", "backup.restore"]


def test_a_backup_without_the_key_of_the_database_is_refused(tmp_path):
    settings = service_in(tmp_path / "data")
    settings.secret_key_file.unlink()
    engine = open_engine(settings.database_url)
    load_secret_key(settings, engine, CLOCK)
    engine.dispose()
    assert backed_up(settings, tmp_path / "whole.tar").is_file()
    settings.secret_key_file.unlink()
    with pytest.raises(BackupError, match=r"of little use: the secret key .* is missing"):
        backed_up(settings, tmp_path / "other.tar")
    assert not (tmp_path / "other.tar").exists()


def test_the_settings_file_is_kept_and_not_put_in_force(tmp_path, target):
    Path("rankwatch.toml").write_text("log_level = 'DEBUG'\n")
    file = backed_up(service_in(tmp_path / "data"), tmp_path / "backup.tar.gz")
    Path("rankwatch.toml").unlink()
    restore(target, file, CLOCK)
    assert (target.data_dir / "rankwatch.toml").read_text() == "log_level = 'DEBUG'\n"
    assert Settings().log_level == "INFO"


def test_a_copy_is_of_one_moment_and_is_made_although_writers_never_pause(tmp_path):
    database = tmp_path / "live.db"
    engine = open_engine(f"sqlite:///{database}")
    with write(engine) as connection:
        connection.execute(text("CREATE TABLE a (n INTEGER, filling BLOB)"))
        connection.execute(text("CREATE TABLE b (n INTEGER)"))
    stop, wrote = threading.Event(), threading.Event()

    def writer() -> None:
        while not stop.is_set():
            with write(engine) as connection:
                connection.execute(text("INSERT INTO a VALUES (1, randomblob(20000))"))
                connection.execute(text("INSERT INTO b VALUES (1)"))
            wrote.set()

    thread = threading.Thread(target=writer)
    thread.start()
    try:
        for number in range(5):
            wrote.clear()
            assert wrote.wait(30.0)
            copy_database(database, tmp_path / f"{number}.db")
    finally:
        stop.set()
        thread.join()
        engine.dispose()
    counts = []
    for number in range(5):
        with sqlite3.connect(tmp_path / f"{number}.db") as copied:
            (a,), (b,) = (copied.execute(f"SELECT count(*) FROM {table}").fetchone() for table in "ab")
        copied.close()
        assert a == b
        counts.append(a)
    assert counts == sorted(set(counts)), "no write came between two copies"


def test_a_file_that_exists_is_not_overwritten(file, tmp_path):
    before = file.read_bytes()
    with pytest.raises(BackupError, match="exists already"):
        backed_up(Settings(data_dir=tmp_path / "data"), file)
    assert file.read_bytes() == before


def test_a_backup_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    settings = service_in(tmp_path / "data")
    (tmp_path / "backups").mkdir()
    monkeypatch.setattr(
        backup, "copy_database", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(BackupError, match="No space left on device"):
        backed_up(settings, tmp_path / "backups" / "b.tar")
    assert list((tmp_path / "backups").iterdir()) == []


def refused(target: Settings, file: Path, why: str) -> None:
    """The restore is refused, and nothing was put into the data folder."""
    before = sorted(target.data_dir.iterdir()) if target.data_dir.exists() else []
    with pytest.raises(BackupError, match=why):
        restore(target, file, CLOCK)
    after = sorted(target.data_dir.iterdir()) if target.data_dir.exists() else []
    assert [path for path in after if path.name != "up.lock"] == [path for path in before if path.name != "up.lock"]


def test_a_folder_that_is_not_empty_is_refused(file, target):
    target.data_dir.mkdir(mode=0o700)
    (target.data_dir / "notes").write_text("mine")
    refused(target, file, r"not empty \(notes\)")


def test_a_database_elsewhere_that_exists_is_refused(file, tmp_path):
    elsewhere = tmp_path / "elsewhere.db"
    elsewhere.write_text("mine")
    refused(Settings(data_dir=tmp_path / "new", database_url=f"sqlite:///{elsewhere}"), file, "exists")
    assert elsewhere.read_text() == "mine"


def test_postgresql_is_left_to_its_own_programs(file, tmp_path):
    other = Settings(data_dir=tmp_path / "new", database_url="postgresql://nowhere.invalid/none")
    refused(other, file, "use pg_dump and pg_restore")


def test_a_folder_on_which_the_service_runs_is_refused(file, target):
    with data_folder(target.data_dir):
        refused(target, file, "already running")


def test_a_damaged_backup_is_refused(file, target):
    content = file.read_bytes()
    file.write_bytes(content[:-8] + bytes([content[-8] ^ 1]) + content[-7:])  # the checksum of all of it
    refused(target, file, "damaged")
    for kept in (0, 5, len(content) // 2, len(content) - 9, len(content) - 1):
        file.write_bytes(content[:kept])
        refused(target, file, "damaged|not a backup")


@pytest.mark.parametrize("content", [b"", b"no tar at all", b"SQLite format 3\0" * 100])
def test_another_file_is_refused(target, tmp_path, content):
    (tmp_path / "other").write_bytes(content)
    refused(target, tmp_path / "other", "is not a backup of rankwatch")


def test_a_backup_of_a_newer_version_is_refused(tmp_path, target):
    settings = service_in(tmp_path / "data")
    engine = open_engine(settings.database_url)
    with write(engine) as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    refused(target, backed_up(settings, tmp_path / "newer.tar.gz"), "newer version")


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "up.lock/../../evil", "up.lock"])
def test_a_backup_cannot_write_another_file_than_its_own(file, target, tmp_path, name):
    def renamed(member, content):
        member.name = name if member.name == "secret.key" else member.name
        return member, content

    refused(target, changed(file, renamed), "not a backup of rankwatch: it has")
    assert not (tmp_path / "evil").exists()


def test_a_link_in_the_place_of_a_file_is_refused(file, target):
    def linked(member, content):
        if member.name != "secret.key":
            return member, content
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        return member, b""

    refused(target, changed(file, linked), "it has 'secret.key'")


def test_a_backup_without_the_database_is_refused(file, target):
    without = changed(file, lambda member, content: None if member.name == "rankwatch.db" else (member, content))
    refused(target, without, "it has no rankwatch.db")
