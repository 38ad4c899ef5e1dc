"""Which service to use, and with which token.

Arguments come before the environment, before the file of `rankwatch login`, before the file of `rankwatch up`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rankwatch.agent.endpoint import configuration_path
from rankwatch.trust import Trust, trust_of

URL_DEFAULT: Final = "http://127.0.0.1:8770"

CONFIG_NAME: Final = "client.json"
"""In the user's configuration folder: {"url": …, "token": …}, mode 0600, written by `rankwatch login`."""


@dataclass(frozen=True, slots=True)
class ServiceEndpoint:
    """A service, its token, and what it has to prove before it gets the token; an empty text means none."""

    url: str
    token: str
    """As it was issued: it may end with a pin."""
    trust: Trust = field(default_factory=Trust)


@dataclass(frozen=True, slots=True)
class Places:
    """The files that may name a service; they need not exist."""

    login: Path
    """Written by `rankwatch login`."""
    local: Path
    """Written by `rankwatch up`, with its database."""


def user_places(environment: Mapping[str, str]) -> Places:
    """The files of this user."""
    anywhere = {name: value for name, value in environment.items() if name != "RANKWATCH_INGEST_CONFIG"}
    login = configuration_path(anywhere).with_name(CONFIG_NAME)
    return Places(login, configuration_path(environment).with_name("local.json"))


def find_endpoint(
    url: str | None, token: str | None, environment: Mapping[str, str], places: Places
) -> ServiceEndpoint:
    """Choose the service and the token.

    A token is used only with the URL from the same source, or if that source has no URL: the token of one service is
    never sent to another.

    Args:
        url: as an argument.
        token: as an argument.
        environment: for `RANKWATCH_URL` and `RANKWATCH_TOKEN`.
        places: the files that may name a service.

    Raises:
        ValueError: a file cannot be read or is malformed, or the token ends with something that is no pin.
    """
    sources: tuple[Mapping[str, Any], ...] = (
        {"url": url or "", "token": token or ""},
        {"url": environment.get("RANKWATCH_URL", ""), "token": environment.get("RANKWATCH_TOKEN", "")},
        stored(places.login, "login"),
        stored(places.local, "up"),
    )
    chosen_url = next((one["url"] for one in sources if one.get("url")), URL_DEFAULT).rstrip("/")
    theirs = (one for one in sources if one.get("token") and one["url"].rstrip("/") in ("", chosen_url))
    chosen = next(theirs, {"token": ""})
    certificate, insecure = str(chosen.get("certificate", "")), chosen.get("insecure") is True
    trust = trust_of(chosen["token"], environment, certificate, insecure=insecure)
    return ServiceEndpoint(chosen_url, chosen["token"], trust)


def stored(config: Path, writer: str) -> dict[str, Any]:
    """The content of a file that names a service; empty if it does not exist.

    Args:
        config: the file.
        writer: the command that writes it.

    Raises:
        ValueError: it cannot be read or is malformed.
    """
    try:
        content = json.loads(config.read_text())
        return {**content, "url": str(content["url"]), "token": str(content["token"])}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{config} cannot be read ({error}); run `rankwatch {writer}` to write it again") from error
