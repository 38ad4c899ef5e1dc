"""A client of the REST API, which converts its refusals to exit statuses."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

import httpx2

from rankwatch.trust import doubt, split_token
from rankwatch_service.cli.endpoint import ServiceEndpoint
from rankwatch_service.cli.errors import CliError, Status
from rankwatch_service.cli.output import note

TIMEOUT_S: Final = 15.0
LONG_S: Final = 330.0
"""For an export or a preview: the service gives up on these before."""

SILENT_S: Final = 45.0
"""After so long without an event or a comment, which comes every 15 s, a stream of events is taken for broken."""

PAGE_ITEMS: Final = 200


class Client:
    """A client of one service with one token. Raises `CliError` for every refusal.

    A command sends one or two requests, so connections are not reused, and there is nothing to close.
    """

    def __init__(self, endpoint: ServiceEndpoint) -> None:
        """Connect with the first request.

        Raises:
            CliError: the URL or the file of trusted authorities cannot be used, or the URL is not safe enough.
        """
        self.url = endpoint.url
        try:
            endpoint.trust.check(endpoint.url)
            token = split_token(endpoint.token).token
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            self._http = httpx2.Client(
                base_url=endpoint.url,
                headers=headers,
                verify=endpoint.trust.context() if endpoint.url.startswith("https:") else True,
                timeout=TIMEOUT_S,
                trust_env=False,
                limits=httpx2.Limits(max_keepalive_connections=0),
            )
        except httpx2.InvalidURL as error:
            raise CliError(Status.USAGE, f"{endpoint.url!r} is not a URL: {error}") from error
        except ValueError as error:
            raise CliError(Status.USAGE, str(error)) from error

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        """Read one resource. Query values that are None are omitted."""
        return self._request("GET", path, params={name: value for name, value in query.items() if value is not None})

    def items(self, path: str, limit: int, **query: Any) -> Iterator[dict[str, Any]]:
        """Read a list, page by page, up to `limit` items; prints a note if there are more."""
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
        note(
            f"showing {limit} of {total}; use --limit for more"
            if total
            else f"showing the first {limit}; use --limit for more"
        )

    def download(self, path: str, file: IO[bytes], **query: Any) -> int:
        """Write the content of a resource to an open file, as it comes; returns its bytes."""
        written = 0
        # The content is compressed already, and the service writes it before it sends any of it.
        headers, wanted = {"Accept-Encoding": "identity"}, {name: one for name, one in query.items() if one is not None}
        try:
            with self._http.stream("GET", path, params=wanted, headers=headers, timeout=LONG_S) as answer:
                if not answer.is_success:
                    answer.read()
                    raise self._refused(answer)
                for part in answer.iter_bytes():
                    written += file.write(part)
        except httpx2.TransportError as error:
            raise self._unreachable(error) from error
        return written

    def save(self, path: str, target: Path, **query: Any) -> int:
        """Write the content of a resource to a file, in place of an older one; returns its bytes.

        Raises:
            CliError: the service refuses it, or the file cannot be written.
        """
        fresh = target.with_name(f".{target.name}.new")
        try:
            with fresh.open("wb") as file:
                written = self.download(path, file, **query)
            fresh.replace(target)
        except OSError as error:
            raise CliError(Status.USAGE, f"{target}: {error.strerror or error}") from error
        finally:
            fresh.unlink(missing_ok=True)
        return written

    def events(self, after: int | None) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Changes as they happen, from now on or since an id: topic, id and data of each.

        Raises:
            CliError: the connection could not be opened, or broke. Call again with the newest id.
        """
        query = {} if after is None else {"after": after}
        timeout = httpx2.Timeout(TIMEOUT_S, read=SILENT_S)
        try:
            with self._http.sse("/api/v1/events", params=query, timeout=timeout) as source:
                if not source.response.is_success:
                    source.response.read()
                    raise self._refused(source.response)
                for event in source:
                    yield event.event, int(event.id), json.loads(event.data)
        except httpx2.TransportError as error:
            raise self._unreachable(error) from error

    def head_date(self, path: str) -> str:
        """The `Date` header of the service's response."""
        return self._answer("GET", path).headers.get("date", "")

    def post(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """Create or change one resource."""
        content: dict[str, Any] = {"timeout": timeout_s} | ({} if body is None else {"json": dict(body)})
        return self._request("POST", path, headers={"Idempotency-Key": uuid.uuid4().hex}, **content)

    def put(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Replace one resource."""
        return self._request("PUT", path, json=dict(body))

    def patch(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Change parts of one resource."""
        return self._request("PATCH", path, json=dict(body))

    def delete(self, path: str) -> dict[str, Any]:
        """Delete one resource; returns the reply's content, which is empty for most."""
        return self._request("DELETE", path)

    def _request(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        answer = self._answer(method, path, **request)
        if answer.is_success:
            content: dict[str, Any] = answer.json() if answer.content else {}
            return content
        raise self._refused(answer)

    def _answer(self, method: str, path: str, **request: Any) -> httpx2.Response:
        try:
            return self._http.request(method, path, **request)
        except httpx2.TransportError as error:
            raise self._unreachable(error) from error

    @staticmethod
    def _refused(answer: httpx2.Response) -> CliError:
        return CliError(_status(answer.status_code), f"{_detail(answer)} ({answer.status_code})")

    def _unreachable(self, error: httpx2.TransportError) -> CliError:
        """What to do next. A refused connection mostly means that no service runs there."""
        why = doubt(self.url, error)
        if not why:
            why = f"{self.url} does not answer: {error}"
            if isinstance(error, httpx2.ConnectError):
                why += "; start a service with `rankwatch up`, or name another one with --url or `rankwatch login`"
        return CliError(Status.UNREACHABLE, why)


def _status(code: int) -> Status:
    if code in (401, 403):
        return Status.DENIED
    return Status.UNREACHABLE if code >= 500 else Status.USAGE


def _detail(answer: httpx2.Response) -> str:
    """Why the service refused: the details of its problem+json."""
    try:
        problem = answer.json()
        detail = str(problem.get("detail") or problem.get("title"))
        errors = [
            f"{error.get('loc', error.get('field', ''))}: {error.get('msg', error)}"
            for error in problem.get("errors", [])
        ]
    except (ValueError, AttributeError):
        return answer.reason_phrase or "refused"
    return "; ".join([detail, *errors])
