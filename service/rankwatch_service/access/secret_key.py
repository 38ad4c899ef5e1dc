"""The secret key of a service: all its roles have the same one, and none of it is in the database."""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from base64 import urlsafe_b64encode
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Final

from cryptography.fernet import Fernet, InvalidToken
from sqlalchemy import Engine, insert, select

from rankwatch_service.clock import Clock
from rankwatch_service.settings import SECRET_KEY_CHARS_MIN, Settings
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import Setting

CHECK: Final = "access.secret_key"
"""Name of the row that holds what the key of this database is recognized by."""

_REMEDY: Final = (
    "all roles need the key that the service began with: copy secret.key from the data folder where it was created, "
    "or set RANKWATCH_SECRET_KEY; if it is lost, run `rankwatch db forget-key`, which removes all receivers"
)


class SecretKeyError(Exception):
    """The service has no secret key, or the wrong one; the message says what to do."""


class SecretKey:
    """Encrypts what the database keeps, and derives the keys of all other purposes."""

    def __init__(self, key: bytes) -> None:
        """Do no I/O.

        Args:
            key: at least 256 random bits, in any form.
        """
        self._key = key
        self._cipher = Fernet(urlsafe_b64encode(self.derive("encryption")))

    def derive(self, purpose: str) -> bytes:
        """The key of one purpose, 32 bytes; from it neither this key nor that of another purpose can be found."""
        return hmac.digest(self._key, purpose.encode(), sha256)

    def encrypt(self, text: str) -> str:
        """Encrypt and authenticate a text; the result is ASCII, and differs each time."""
        return self._cipher.encrypt(text.encode()).decode()

    def decrypt(self, text: str) -> str:
        """Decrypt what `encrypt` returned.

        Raises:
            ValueError: it was encrypted with another key, or changed.
        """
        try:
            return self._cipher.decrypt(text).decode()
        except InvalidToken as error:
            raise ValueError("it cannot be decrypted with the secret key of this service") from error


def has_secret_key(engine: Engine) -> bool:
    """Whether a database has a key, by which it recognizes its roles."""
    with read(engine) as connection:
        return connection.scalar(select(Setting.name).where(Setting.name == CHECK)) is not None


def load_secret_key(settings: Settings, engine: Engine, clock: Clock) -> SecretKey:
    """The key from the setting, else from the file; a database that has not had one yet gets a new one in this file.

    Args:
        settings: where the key is.
        engine: of a database with this version's tables, which recognizes its key.
        clock: for the time at which a database got its key.

    Raises:
        SecretKeyError: the key is missing, readable for others, too short, or not the one of this database.
    """
    query = select(Setting.value).where(Setting.name == CHECK)
    # Before the file: whoever gave the database its key had created the file by then.
    with read(engine) as connection:
        stored = connection.scalar(query)
    if not settings.secret_key and stored is None:
        _create(settings.secret_key_file)
    key = SecretKey((settings.secret_key or _read(settings.secret_key_file)).encode())
    check = {"check": key.derive("check").hex()}
    if stored is None:
        with write(engine) as connection:
            stored = connection.scalar(query)
            if stored is None:
                stored = check
                connection.execute(insert(Setting).values(name=CHECK, value=check, updated_unix_ns=clock.unix_ns()))
    if not hmac.compare_digest(stored["check"], check["check"]):
        place = "RANKWATCH_SECRET_KEY" if settings.secret_key else str(settings.secret_key_file)
        raise SecretKeyError(f"the secret key in {place} is not the one of this database; {_REMEDY}")
    return key


def _create(path: Path) -> None:
    """Create the file with a new key, unless it exists; no other process sees a part of it."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.") as fresh:
            fresh.write(secrets.token_hex(32) + "\n")
            fresh.flush()
            os.fsync(fresh.fileno())
            with suppress(FileExistsError):
                os.link(fresh.name, path)
    except OSError as error:
        raise SecretKeyError(f"the secret key {path} cannot be created: {error.strerror}") from error


def _read(path: Path) -> str:
    try:
        with path.open() as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read().strip()
    except FileNotFoundError as error:
        raise SecretKeyError(f"the secret key {path} of this database is missing; {_REMEDY}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise SecretKeyError(f"the secret key {path} cannot be read: {error}") from error
    if mode & 0o077:
        raise SecretKeyError(
            f"other users of this machine can read the secret key {path} (mode {mode:04o}): run `chmod 600 {path}`"
        )
    if len(text) < SECRET_KEY_CHARS_MIN:
        raise SecretKeyError(f"the secret key {path} has less than {SECRET_KEY_CHARS_MIN} characters")
    return text
