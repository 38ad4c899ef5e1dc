"""Asks the REST API, and turns its refusals into exit statuses."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from typing import Any, Final

import httpx2

from rankwatch_service.cli.endpoint import Endpoint
from rankwatch_service.cli.errors import CliError, Status
from rankwatch_service.cli.output import note

TIMEOUT_S: Final = 15.0
PAGE_ITEMS: Final = 200


class Client:
    """One service, spoken to with one token. Every refusal is raised as `CliError`.

    A command asks once or twice, so no connection is kept, and there is nothing to close.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.url = endpoint.url
        headers = {"Authorization": f"Bearer {endpoint.token}"} if endpoint.token else {}
        try:
            self._http = httpx2.Client(
                base_url=endpoint.url,
                headers=headers,
                timeout=TIMEOUT_S,
                trust_env=False,
                limits=httpx2.Limits(max_keepalive_connections=0),
            )
        except (httpx2.InvalidURL, ValueError) as error:
            raise CliError(Status.USAGE, f"{endpoint.url!r} is not a URL: {error}") from error

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        """Read one thing. Query values that are None are left out."""
        return self._ask("GET", path, params={name: value for name, value in query.items() if value is not None})

    def items(self, path: str, limit: int, **query: Any) -> Iterator[dict[str, Any]]:
        """Read a list, page by page, up to `limit` items; says if there are more."""
        cursor: str | None = None
        left, total = limit, None
        while left > 0:
            page = self.get(path, **query, limit=min(left, PAGE_ITEMS), cursor=cursor)
            total = page.get("total") or total
            yield from page["items"][:left]
            left -= len(page["items"])
            cursor = page.get("next_cursor")
            if not cursor:
                return
        note(f"only {limit} of {total} are shown" if total else f"only the first {limit} are shown, there are more")

    def head_date(self, path: str) -> str:
        """The service's own time, as its `Date` header says it."""
        return self._answer("GET", path).headers.get("date", "")

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Write one thing."""
        return self._ask("POST", path, json=dict(body), headers={"Idempotency-Key": uuid.uuid4().hex})

    def delete(self, path: str) -> None:
        """Remove one thing."""
        self._ask("DELETE", path)

    def _ask(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        answer = self._answer(method, path, **request)
        if answer.is_success:
            content: dict[str, Any] = answer.json() if answer.content else {}
            return content
        raise CliError(_status(answer.status_code), f"{_told(answer)} ({answer.status_code})")

    def _answer(self, method: str, path: str, **request: Any) -> httpx2.Response:
        try:
            return self._http.request(method, path, **request)
        except httpx2.UnsupportedProtocol as error:
            raise CliError(
                Status.USAGE, f"{self.url!r} is not a URL: it must begin with http:// or https://"
            ) from error
        except httpx2.TransportError as error:
            raise CliError(Status.UNREACHABLE, f"{self.url} does not answer: {error}") from error


def _status(code: int) -> Status:
    if code in (401, 403):
        return Status.DENIED
    return Status.UNREACHABLE if code >= 500 else Status.USAGE


def _told(answer: httpx2.Response) -> str:
    """What the service says about its refusal: problem+json where it is one."""
    try:
        problem = answer.json()
        told = str(problem.get("detail") or problem.get("title"))
        errors = [
            f"{error.get('loc', error.get('field', ''))}: {error.get('msg', error)}"
            for error in problem.get("errors", [])
        ]
    except (ValueError, AttributeError):
        return answer.reason_phrase or "refused"
    return "; ".join([told, *errors])
