"""Which service the command line talks to, and a client of its REST API that turns refusals into exit statuses."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote

from rankwatch.client import connection
from rankwatch.client.connection import TIMEOUT_S, Places, RestConnection, RestError, ServiceEndpoint, user_places
from rankwatch.trust import trust_of
from rankwatch_service.cli.errors import CliError, Status, file_exists
from rankwatch_service.cli.output import note


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


PAGE_ITEMS: Final = 200
LISTED: Final[Mapping[str, Mapping[str, Any]]] = {
    **{name: {"limit": PAGE_ITEMS} for name in ("jobs", "incidents", "commands", "silences", "receivers")},
    "rules": {},
}
"""Collections whose lists have names or ids, and how a list is asked for. Commands have the same names."""


class CliClient:
    """A client of one service with one token. Raises `CliError` for every refusal."""

    def __init__(self, endpoint: ServiceEndpoint, timeout_s: float = TIMEOUT_S) -> None:
        """Connect with the first request.

        Args:
            endpoint: the service and the token.
            timeout_s: longest wait for a connection, and for the next part of a reply.

        Raises:
            CliError: the URL, the token or the file of trusted authorities cannot be used, or the URL is not safe
                enough.
        """
        try:
            self._connection = RestConnection(endpoint, timeout_s)
        except ValueError as error:
            raise CliError(Status.USAGE, str(error)) from error
        self.url = self._connection.url

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        """Read one resource. Query values that are None are omitted."""
        return self._request("GET", path, query=query)

    def items(self, path: str, limit: int, before: int = 0, /, **query: Any) -> Iterator[dict[str, Any]]:
        """Read a list, page by page, up to `limit` items; prints a note if there are more.

        Args:
            path: of the list.
            limit: most items.
            before: items that are listed before these.
            query: parameters.

        Raises:
            CliError: the service refuses it, or a job of the query does not exist.
        """
        self.require_jobs(query.get("job"))
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
            f"showing {before + limit} of {before + total}; use --limit for more"
            if total
            else f"showing the first {before + limit}; use --limit for more"
        )

    def require_jobs(self, jobs: Iterable[str] | None) -> None:
        """Look for jobs that only filter, so that a name with a mistake is not an empty list.

        Raises:
            CliError: one of them does not exist.
        """
        for job in jobs or ():
            self.get(job_path(job))

    def save(self, path: str, target: Path, on_bytes: Callable[[int], None], **query: Any) -> int:
        """Write the content of a resource to a new file, and tell how many bytes it has; returns how many in all.

        Raises:
            CliError: the service refuses it, the file exists, or it cannot be written.
        """
        if target.exists():
            raise file_exists(target)
        fresh = target.with_name(f".{target.name}.new")
        try:
            with _exit_statuses(), fresh.open("wb") as file:
                for chunk in self._connection.chunks(path, query):
                    file.write(chunk)
                    on_bytes(file.tell())
                written = file.tell()
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
        with _exit_statuses():
            yield from self._connection.events(after)

    def head_date(self, path: str) -> str:
        """The `Date` header of the service's response."""
        with _exit_statuses():
            return self._connection.answer("GET", path).headers.get("date", "")

    def post(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None) -> dict[str, Any]:
        """Create or change one resource."""
        return self._request("POST", path, body=body, timeout_s=timeout_s)

    def put(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Replace one resource."""
        return self._request("PUT", path, body=body)

    def patch(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Change parts of one resource."""
        return self._request("PATCH", path, body=body)

    def delete(self, path: str) -> dict[str, Any]:
        """Delete one resource; returns the reply's content, which is empty for most."""
        return self._request("DELETE", path)

    def _request(self, method: str, path: str, **how: Any) -> dict[str, Any]:
        with _exit_statuses():
            try:
                reply = self._connection.request(method, path, **how)
            except RestError as error:
                raise self._with_remedy(error, path) from error
            return reply.json(self.url)

    def _with_remedy(self, error: RestError, path: str) -> RestError:
        """The error with what to do next: where nothing has such a name, the one that was probably meant."""
        if error.status == 401:
            remedy = f"log in again: `rankwatch login {self.url}`, or set RANKWATCH_TOKEN"
            return RestError(error.status, error.title, error.detail, remedy)
        collection, _, rest = path.removeprefix("/api/v1/").partition("/")
        if error.status != 404 or collection not in LISTED or error.remedy:
            return error
        try:
            listed = self._connection.request("GET", f"/api/v1/{collection}", query=LISTED[collection]).json(self.url)
        except RestError:
            return error
        known = [one.get("name") or one["short_id"] for one in listed["items"]]
        meant = get_close_matches(unquote(rest.partition("/")[0]), known, 1)
        remedy = f"did you mean {meant[0]!r}?" if meant else f"`rankwatch {collection}` lists all"
        return RestError(error.status, error.title, error.detail, remedy)


@contextmanager
def _exit_statuses() -> Iterator[None]:
    try:
        yield
    except RestError as error:
        if error.status in (401, 403):
            status = Status.DENIED
        else:
            status = Status.USAGE if 0 < error.status < 500 else Status.UNREACHABLE
        raise CliError(status, str(error)) from error
