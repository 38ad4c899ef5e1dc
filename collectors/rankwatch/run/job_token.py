"""The token with which the agents of a job report, made by the login of whoever starts the job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from rankwatch.agent.endpoint import login_endpoint
from rankwatch.agent.service_connection import ServiceConnection, Unreachable

EXPIRES_S: Final = 86_400.0
"""Lifetime of the token. While agents report with it, the service renews it."""


class NoTokenError(Exception):
    """No token could be made; the message says why, and what to do."""


def job_access(job: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables by which the agents of a job find their service: RANKWATCH_URL and RANKWATCH_TOKEN.

    Empty if there is nothing to add: a token is set already, or the user has not logged in, so that agents find the
    service of `rankwatch up` by themselves.

    Raises:
        NoTokenError: there is a login, and it yields no token.
    """
    if environment.get("RANKWATCH_TOKEN"):
        return {}
    try:
        login = login_endpoint(environment)
    except (OSError, ValueError) as error:
        raise NoTokenError(f"the login cannot be used: {error}") from error
    wanted = environment.get("RANKWATCH_URL", "").rstrip("/")
    if login is None or wanted not in ("", login.url):
        return {}
    asked = {"name": f"agents of {job}", "scopes": ["ingest"], "job": job, "expires_s": EXPIRES_S}
    try:
        connection = ServiceConnection(lambda: login)
        try:
            reply = connection.post("/api/v1/tokens", json.dumps(asked).encode(), "application/json")
        finally:
            connection.close()
        answer = json.loads(reply.body)
        if reply.status == 201:
            return {"RANKWATCH_URL": login.url, "RANKWATCH_TOKEN": str(answer["token"])}
        raise NoTokenError(
            f"{login.url} makes no token for this login ({reply.status}: {answer.get('title', '')}); "
            f"set RANKWATCH_TOKEN to what `rankwatch token job {job}` prints there"
        )
    except (Unreachable, ValueError, KeyError, TypeError) as error:
        raise NoTokenError(f"{login.url} did not make a token for the job: {error}") from error
