"""Which service a command uses, as exit statuses have it; and what the files that name it say besides."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rankwatch.client import connection
from rankwatch.client.connection import Places, ServiceEndpoint, user_places
from rankwatch.trust import trust_of
from rankwatch_service.cli.errors import CliError, Status


def find_endpoint(
    url: str | None, token: str | None, environment: Mapping[str, str], places: Places
) -> ServiceEndpoint:
    """Choose the service and the token: see `rankwatch.client.connection.find_endpoint`.

    Raises:
        CliError: a file cannot be read or is malformed, or the token ends with something that is no pin.
    """
    try:
        return connection.find_endpoint(url, token, environment, places)
    except ValueError as error:
        raise CliError(Status.USAGE, str(error)) from error


def service_endpoint(
    url: str, token: str, environment: Mapping[str, str], *, insecure: bool = False
) -> ServiceEndpoint:
    """A service and its token; see `rankwatch.trust.trust_of` for the rest.

    Raises:
        CliError: the token ends with something that is no pin.
    """
    try:
        trust = trust_of(token, environment, insecure=insecure)
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
        return connection.stored(config, writer)
    except ValueError as error:
        raise CliError(Status.USAGE, str(error)) from error
