"""The wheel of this installation, packed from its files, so that what others install from it matches this service.

It does not matter how the service was installed: from a wheel, an index, or as an editable checkout. Files are stored
in order, with one fixed time and without compression, so equal installations give equal bytes, and the hash that one
api process publishes fits the wheel of another.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.metadata import Distribution, distribution
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Final
from zipfile import ZIP_STORED, ZipFile, ZipInfo

from rankwatch_service.store.migrate import migrations_folder

DISTRIBUTION: Final = "rankwatch"
PACKAGES: Final = ("rankwatch", "rankwatch_detectors", "rankwatch_service")
WHEEL_BYTES_MAX: Final = 16 * 1024 * 1024
"""Six times the wheel of today. More is not the code of rankwatch, but something that was left in its folders."""

_TAG: Final = "py3-none-any"
_WHEEL: Final = f"Wheel-Version: 1.0\nGenerator: rankwatch\nRoot-Is-Purelib: true\nTag: {_TAG}\n"
_KEPT: Final = ("METADATA", "entry_points.txt", "licenses")
_OLDEST: Final = (1980, 1, 1, 0, 0, 0)
"""The first moment that a zip file can name."""


class WheelError(Exception):
    """This installation cannot be packed; the message says why."""


@dataclass(frozen=True, slots=True)
class OwnWheel:
    """A wheel in memory."""

    name: str
    """Of its file."""
    content: bytes
    requires_python: str
    sha256: str
    """In hexadecimal digits."""


@cache
def own_wheel() -> OwnWheel:
    """Pack this installation; later calls return the same wheel.

    Raises:
        WheelError: it is too large, or its files cannot be found or read.
    """
    installed = distribution(DISTRIBUTION)
    info = f"{DISTRIBUTION}-{installed.version}.dist-info"
    try:
        files = dict([*_code(), *_metadata(installed, info)])
    except OSError as error:
        raise WheelError(f"the files of this installation cannot be read: {error}") from error
    content = _packed(sorted(files.items()), f"{info}/RECORD")
    name = f"{DISTRIBUTION}-{installed.version}-{_TAG}.whl"
    return OwnWheel(name, content, installed.metadata["Requires-Python"], sha256(content).hexdigest())


def _code() -> Iterator[tuple[str, bytes]]:
    """Path in the wheel and content of every file of the packages."""
    folders = {name: _package_folder(name) for name in PACKAGES}
    folders["rankwatch_service/migrations"] = migrations_folder()  # in a checkout they lie elsewhere
    for prefix, folder in folders.items():
        for path in folder.rglob("*"):
            inner = path.relative_to(folder)
            if path.is_file() and "__pycache__" not in inner.parts and not path.name.startswith("."):
                yield f"{prefix}/{inner.as_posix()}", path.read_bytes()


def _package_folder(name: str) -> Path:
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise WheelError(f"the package {name} is not installed as a folder")
    return Path(spec.submodule_search_locations[0])


def _metadata(installed: Distribution, info: str) -> Iterator[tuple[str, bytes]]:
    """The files about the packages. What says how they came here stays here."""
    for file in installed.files or ():
        folder, *inner = file.parts
        if folder.endswith(".dist-info") and inner[0] in _KEPT:
            yield "/".join((info, *inner)), Path(file.locate()).read_bytes()
    yield f"{info}/WHEEL", _WHEEL.encode()


def _packed(files: list[tuple[str, bytes]], record: str) -> bytes:
    """A wheel of these files and their record.

    Raises:
        WheelError: there is too much of them, or no metadata.
    """
    if not any(name.endswith("/METADATA") for name, _ in files):
        raise WheelError("this installation has no metadata: install rankwatch with pip")
    size_bytes = sum(len(content) for _, content in files)
    if size_bytes > WHEEL_BYTES_MAX:
        raise WheelError(f"the files of this installation have {size_bytes} bytes, more than {WHEEL_BYTES_MAX}")
    lines = [f"{name},sha256={_digest(content)},{len(content)}\n" for name, content in files]
    packed = BytesIO()
    with ZipFile(packed, "w", ZIP_STORED) as archive:
        for name, content in [*files, (record, "".join([*lines, f"{record},,\n"]).encode())]:
            entry = ZipInfo(name, _OLDEST)
            entry.create_system, entry.external_attr = 3, 0o644 << 16  # as on Unix, whatever this is
            archive.writestr(entry, content)
    return packed.getvalue()


def _digest(content: bytes) -> str:
    return urlsafe_b64encode(sha256(content).digest()).decode().rstrip("=")
