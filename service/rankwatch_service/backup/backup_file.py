"""The backup file: a tar of mode 0600. Its first member, the manifest, names the others with their checksums."""

from __future__ import annotations

import io
import os
import tarfile
from hashlib import file_digest
from pathlib import Path
from typing import Final

import msgspec

FORMAT: Final = 1
"""Version of the manifest. Raised when older versions of rankwatch could not restore the file."""

MANIFEST: Final = "manifest.json"
MANIFEST_BYTES_MAX: Final = 64 * 1024
"""Longest manifest that is read; a real one has 1 KB."""


class BackupError(Exception):
    """A backup cannot be made or restored; the message says why and what to do."""


class Manifest(msgspec.Struct, frozen=True):
    """What a backup file contains."""

    format: int
    created_unix_ns: int
    rankwatch: str
    """Version that made it."""
    database: str
    """sqlite or postgresql."""
    revision: str
    """Of the database's tables."""
    checksums: dict[str, str]
    """SHA-256 of each file, by name."""


def checksum(path: Path) -> str:
    """SHA-256 of a file, as it stands in the manifest."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def write_backup(file: Path, manifest: Manifest, folder: Path) -> None:
    """Write the manifest and its files from `folder` as a new tar, which is on disk when this returns."""
    content = msgspec.json.format(msgspec.json.encode(manifest))
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        with tarfile.open(fileobj=out, mode="w") as tar:
            tar.addfile(_member(MANIFEST, len(content), manifest), io.BytesIO(content))
            for name in manifest.checksums:
                with (folder / name).open("rb") as source:
                    tar.addfile(_member(name, (folder / name).stat().st_size, manifest), source)
        out.flush()
        os.fsync(out.fileno())


def read_manifest(file: Path) -> Manifest:
    """The manifest of a backup file.

    Raises:
        BackupError: it cannot be read, is no backup file, or one of a newer version.
    """
    try:
        with tarfile.open(file, "r:") as tar:
            return _manifest(file, tar)
    except (tarfile.TarError, msgspec.DecodeError) as error:
        raise BackupError(f"{file} is not a backup of rankwatch, or damaged: {error}") from error
    except OSError as error:
        raise BackupError(f"{file} cannot be read: {error.strerror}") from error


def extract(file: Path, folder: Path) -> None:
    """Extract the files that the manifest names, and nothing else, with mode 0600.

    Raises:
        BackupError: a file is missing or differs from its checksum.
    """
    with tarfile.open(file, "r:") as tar:
        checksums = _manifest(file, tar).checksums
        found = {name: _extracted(tar, name, folder / name) for name in checksums}
    if found != checksums:
        damaged = ", ".join(name for name, digest in found.items() if digest != checksums[name])
        raise BackupError(f"{file} is damaged: {damaged}")


def _member(name: str, size: int, manifest: Manifest) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = size, 0o600, manifest.created_unix_ns // 10**9
    return member


def _manifest(file: Path, tar: tarfile.TarFile) -> Manifest:
    first = tar.next()
    content = None if first is None or first.name != MANIFEST else tar.extractfile(first)
    if content is None:
        raise BackupError(f"{file} is not a backup of rankwatch: it has no manifest")
    manifest = msgspec.json.decode(content.read(MANIFEST_BYTES_MAX), type=Manifest)
    if manifest.format > FORMAT:
        raise BackupError(f"{file} was made by a newer version, rankwatch {manifest.rankwatch}: restore it with that")
    if any(Path(name).name != name for name in manifest.checksums):
        raise BackupError(f"{file} is not a backup of rankwatch: it names files outside of its folder")
    return manifest


def _extracted(tar: tarfile.TarFile, name: str, path: Path) -> str:
    """The checksum of the file after its extraction; empty if the tar does not have the whole of it."""
    try:
        source = tar.extractfile(name)
    except (KeyError, tarfile.TarError):
        return ""
    if source is None:
        return ""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        try:
            while part := source.read(1024 * 1024):
                out.write(part)
        except tarfile.TarError:
            return ""
    return checksum(path)
