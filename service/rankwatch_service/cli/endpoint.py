"""Which service to talk to, and with which token: option before environment before the user's file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

from rankwatch_service.cli.errors import CliError, Status

URL_DEFAULT: Final = "http://127.0.0.1:8770"

CONFIG_NAME: Final = "client.json"
"""In the user's configuration folder: {"url": …, "token": …}, mode 0600, written by `rankwatch login`."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A service and the token to use there; "" = none."""

    url: str
    token: str


def find_endpoint(url: str | None, token: str | None, environment: Mapping[str, str], config: Path) -> Endpoint:
    """Choose the service and the token.

    A token is only used with the URL that stands beside it in the same place, or where no other URL was given: one
    service's token is never sent to another.

    Args:
        url: from `--url`.
        token: from `--token`.
        environment: `RANKWATCH_URL` and `RANKWATCH_TOKEN` count.
        config: the user's file; it need not exist.

    Raises:
        CliError: the file is not readable as what it should be.
    """
    stored = _stored(config)
    places = (
        Endpoint(url or "", token or ""),
        Endpoint(environment.get("RANKWATCH_URL", ""), environment.get("RANKWATCH_TOKEN", "")),
        stored,
    )
    chosen_url = next((place.url for place in places if place.url), URL_DEFAULT).rstrip("/")
    chosen_token = next(
        (place.token for place in places if place.token and place.url.rstrip("/") in ("", chosen_url)), ""
    )
    return Endpoint(chosen_url, chosen_token)


def store_endpoint(endpoint: Endpoint, config: Path) -> None:
    """Keep a service and its token in the user's file, readable by the user alone."""
    config.parent.mkdir(parents=True, exist_ok=True)
    fresh = config.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump({"url": endpoint.url, "token": endpoint.token}, file)
    fresh.replace(config)


def job_path(job: str) -> str:
    """Where a job is; its name may hold anything but a slash."""
    return f"/api/v1/jobs/{quote(job, safe='')}"


def _stored(config: Path) -> Endpoint:
    try:
        content = json.loads(config.read_text())
        return Endpoint(str(content["url"]), str(content["token"]))
    except FileNotFoundError:
        return Endpoint("", "")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CliError(Status.USAGE, f"{config} cannot be read ({error}); `rankwatch login` writes it anew") from error
