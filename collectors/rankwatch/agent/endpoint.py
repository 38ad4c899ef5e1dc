"""Address and token of the service: from arguments, the environment, or the user's configuration file."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

CONFIGURATION = "rankwatch/ingest.json"
"""Under the user's configuration folder; `rankwatch up` writes it."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The service's base URL and an ingest token."""

    url: str
    token: str = field(repr=False)
    """Left out of repr, so that it is never logged."""

    def __post_init__(self) -> None:
        """Validate both.

        Raises:
            ValueError: the URL is not http or https, or has no host; or the token is no valid header value.
        """
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not an http or https URL with a host: {self.url!r}")
        if not self.token.isascii() or any(character.isspace() for character in self.token):
            raise ValueError("the token must be ASCII without spaces")


def configuration_path(environment: Mapping[str, str]) -> Path:
    """The file to which `rankwatch up` writes URL and token: `RANKWATCH_INGEST_CONFIG`, else by the XDG rules."""
    named = environment.get("RANKWATCH_INGEST_CONFIG", "")
    if named:
        return Path(named)
    base = environment.get("XDG_CONFIG_HOME", "")
    folder = Path(base) if base else _home(environment) / ".config"
    return folder / CONFIGURATION


def _home(environment: Mapping[str, str]) -> Path:
    """The user's home folder; many init systems and schedulers do not set HOME."""
    named = environment.get("HOME", "")
    if named:
        return Path(named)
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return Path("/nonexistent")


def find_endpoint(url: str | None, token_file: Path | None, environment: Mapping[str, str]) -> Endpoint | None:
    """Find the service: arguments first, then `RANKWATCH_URL` with `RANKWATCH_TOKEN`, then the user's file.

    A token file goes with either URL, and the token in the user's file with the URL beside it. None when no place
    names a service.

    Raises:
        ValueError: a place names a service, but cannot be used; the text says which place and why.
        OSError: a file that should be read cannot be.
    """
    url = url or environment.get("RANKWATCH_URL") or None
    if url is not None:
        if token_file is not None:
            return Endpoint(url.rstrip("/"), token_file.read_text().strip())
        token = environment.get("RANKWATCH_TOKEN", "")
        if not token:
            local = _configured(configuration_path(environment))
            if local is None or local.url != url.rstrip("/"):
                raise ValueError(f"{url}: no token; set RANKWATCH_TOKEN or pass a token file")
            return local
        return Endpoint(url.rstrip("/"), token.strip())
    return _configured(configuration_path(environment))


def _configured(path: Path) -> Endpoint | None:
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    try:
        found = json.loads(text)
        return Endpoint(str(found["url"]).rstrip("/"), str(found["token"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
