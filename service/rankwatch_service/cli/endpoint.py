"""Which service to use, and with which token.

Options come before the environment, before the file of `rankwatch login`, before the file of `rankwatch up`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from rankwatch.trust import Trust, trust_of
from rankwatch_service.cli.errors import CliError, Status

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
    from platformdirs import user_config_path

    from rankwatch_service.settings import local_config

    folder = user_config_path("rankwatch")
    ingest = Path(environment.get("RANKWATCH_INGEST_CONFIG") or folder / "ingest.json")
    return Places(folder / CONFIG_NAME, local_config(ingest))


def find_endpoint(
    url: str | None, token: str | None, environment: Mapping[str, str], places: Places
) -> ServiceEndpoint:
    """Choose the service and the token.

    A token is used only with the URL from the same source, or if that source has no URL: the token of one service is
    never sent to another.

    Args:
        url: from `--url`.
        token: from `--token`.
        environment: for `RANKWATCH_URL` and `RANKWATCH_TOKEN`.
        places: the files that may name a service.

    Raises:
        CliError: a file cannot be read or is malformed, or the token ends with something that is no pin.
    """
    sources: tuple[Mapping[str, Any], ...] = (
        {"url": url or "", "token": token or ""},
        {"url": environment.get("RANKWATCH_URL", ""), "token": environment.get("RANKWATCH_TOKEN", "")},
        _content(places.login, "login"),
        _content(places.local, "up"),
    )
    chosen_url = next((one["url"] for one in sources if one.get("url")), URL_DEFAULT).rstrip("/")
    theirs = (one for one in sources if one.get("token") and one["url"].rstrip("/") in ("", chosen_url))
    chosen = next(theirs, {"token": ""})
    return service_endpoint(
        chosen_url,
        chosen["token"],
        environment,
        certificate=str(chosen.get("certificate", "")),
        insecure=chosen.get("insecure") is True,
    )


def service_endpoint(
    url: str, token: str, environment: Mapping[str, str], *, certificate: str = "", insecure: bool = False
) -> ServiceEndpoint:
    """A service and its token; see `rankwatch.trust.trust_of` for the rest.

    Raises:
        CliError: the token ends with something that is no pin.
    """
    try:
        trust = trust_of(token, environment, certificate, insecure=insecure)
    except ValueError as error:
        raise CliError(Status.USAGE, str(error)) from error
    return ServiceEndpoint(url, token, trust)


def local_database_url(environment: Mapping[str, str]) -> str:
    """The database of the service that `rankwatch up` last started for this user; empty if there is none."""
    content = _content(user_places(environment).local, "up")
    return str(content.get("database_url", ""))


def local_url(environment: Mapping[str, str]) -> str:
    """The URL of that service; empty if there is none."""
    return str(_content(user_places(environment).local, "up").get("url", ""))


def local_certificate(environment: Mapping[str, str]) -> Path | None:
    """The certificate file of the service that `rankwatch up` last started for this user; None without TLS."""
    content = _content(user_places(environment).local, "up")
    return Path(content["certificate"]) if "certificate" in content else None


def local_data_dir(environment: Mapping[str, str]) -> str:
    """The data folder of that service; empty if it is not known."""
    return str(_content(user_places(environment).local, "up").get("data_dir", ""))


def store_endpoint(endpoint: ServiceEndpoint, config: Path) -> None:
    """Store a service and its token in a file that only the user can read."""
    config.parent.mkdir(parents=True, exist_ok=True)
    fresh = config.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        insecure = {"insecure": True} if endpoint.trust.insecure else {}
        json.dump({"url": endpoint.url, "token": endpoint.token, **insecure}, file)
    fresh.replace(config)


def job_path(job: str) -> str:
    """The REST path of a job, with its name escaped."""
    return f"/api/v1/jobs/{quote(job, safe='')}"


def _content(config: Path, writer: str) -> dict[str, Any]:
    """The content of a file; empty if it does not exist."""
    try:
        content = json.loads(config.read_text())
        return {**content, "url": str(content["url"]), "token": str(content["token"])}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CliError(
            Status.USAGE, f"{config} cannot be read ({error}); run `rankwatch {writer}` to write it again"
        ) from error
