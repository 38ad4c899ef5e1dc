"""Address and token of the service: from arguments, the environment, or the user's configuration file."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rankwatch.trust import Trust, split_token, trust_of

CONFIGURATION = "rankwatch/ingest.json"
"""Under the user's configuration folder; `rankwatch up` writes it."""
LOGIN = "rankwatch/client.json"
"""In the same folder; `rankwatch login` writes it."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The service's base URL, an ingest token, and what the service has to prove before it gets the token."""

    url: str
    token: str = field(repr=False)
    """The token as it is sent, without the part after its dot. Left out of repr, so that it is never logged."""
    trust: Trust = field(default_factory=Trust)

    def __post_init__(self) -> None:
        """Validate all.

        Raises:
            ValueError: the URL is not http or https, has no host, or is not safe enough; or the token is no valid
                header value.
        """
        self.trust.check(self.url)
        if not self.token.isascii() or any(character.isspace() for character in self.token):
            raise ValueError("the token must be ASCII without spaces")


def configuration_path(environment: Mapping[str, str]) -> Path:
    """The file to which `rankwatch up` writes URL and token: `RANKWATCH_INGEST_CONFIG`, else by the XDG rules."""
    named = environment.get("RANKWATCH_INGEST_CONFIG", "")
    if named:
        return Path(named)
    return _configuration_folder(environment) / CONFIGURATION


def _configuration_folder(environment: Mapping[str, str]) -> Path:
    base = environment.get("XDG_CONFIG_HOME", "")
    return Path(base) if os.path.isabs(base) else _home(environment) / ".config"


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
            return endpoint_of(url, token_file.read_text(), environment)
        token = environment.get("RANKWATCH_TOKEN", "")
        if not token:
            local = _stored(configuration_path(environment), environment)
            if local is None or local.url != url.rstrip("/"):
                raise ValueError(f"{url}: no token; set RANKWATCH_TOKEN or pass a token file")
            return local
        return endpoint_of(url, token, environment)
    return _stored(configuration_path(environment), environment)


def login_endpoint(environment: Mapping[str, str]) -> Endpoint | None:
    """The service at which this user has logged in, with the token of the login; None without a login.

    Raises:
        ValueError: the login cannot be used.
        OSError: its file cannot be read.
    """
    return _stored(_configuration_folder(environment) / LOGIN, environment)


def _stored(path: Path, environment: Mapping[str, str]) -> Endpoint | None:
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    try:
        found = json.loads(text)
        url, token = str(found["url"]), str(found["token"])
        certificate, insecure = str(found.get("certificate", "")), found.get("insecure") is True
        return endpoint_of(url, token, environment, certificate, insecure=insecure)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def endpoint_of(
    url: str, text: str, environment: Mapping[str, str], certificate: str = "", *, insecure: bool = False
) -> Endpoint:
    """The service at a URL, with what its token demands of it; arguments as of `trust_of`.

    Raises:
        ValueError: the URL or the token cannot be used.
    """
    text = text.strip()
    trust = trust_of(text, environment, certificate, insecure=insecure)
    return Endpoint(url.rstrip("/"), split_token(text).token, trust)
