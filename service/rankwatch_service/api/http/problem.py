"""All errors have one form: RFC 9457 problem+json with the id of the request, never a stack trace."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.routing import Match

from rankwatch_service.api.description import MEDIA_TYPE
from rankwatch_service.store.errors import StoreError

RETRY_AFTER_S: Final = 1
"""`Retry-After` of replies to requests that may succeed soon."""

METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
"""Those that routes may have. OPTIONS is answered for every path that has one of them."""


class ProblemError(Exception):
    """A request that is refused. `detail` is for the person who sent it."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        headers: Mapping[str, str] | None = None,
        errors: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = dict(headers or {})
        self.errors = errors


def not_found(what: str, name: str) -> ProblemError:
    """The error for things that do not exist, and for those that the token must not reveal."""
    return ProblemError(404, f"there is no {what} {name!r}")


def problem(
    request_id: str,
    status: int,
    detail: str,
    headers: Mapping[str, str] | None = None,
    errors: Sequence[Mapping[str, Any]] = (),
) -> Response:
    """The response to a refused request."""
    body: dict[str, Any] = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "request_id": request_id,
    }
    if errors:
        body["errors"] = list(errors)
    return JSONResponse(body, status, dict(headers or {}), MEDIA_TYPE)


def _in_words(error: Mapping[str, Any]) -> str:
    """What is wrong with a value, without words of the library that found it.

    >>> _in_words({"msg": "Input should be 'open' or 'resolved'", "input": "opne", "ctx": {"expected": "'open' or …"}})
    "did you mean 'open'? It must be 'open' or 'resolved'"
    """
    message = re.sub(r"^Value error, |, unable to parse .*", "", error["msg"]).replace("Input should be", "must be", 1)
    known = re.findall(r"'([^']+)'", str(error.get("ctx", {}).get("expected", "")))
    meant = get_close_matches(str(error.get("input")), known, 1)
    return f"did you mean {meant[0]!r}? It {message}" if meant else message


def _place(loc: Sequence[int | str]) -> str:
    """The path of a value, without the forms that it may have: `str-enum[Kind]`, `constrained-str`."""
    return ".".join(str(part) for part in loc if not re.search(r"\[|^constrained-", str(part)))


def unavailable(request_id: str) -> Response:
    """The response when the database is busy or unreachable; the same request may succeed later."""
    detail = "the database does not answer; try again"
    return problem(request_id, 503, detail, {"Retry-After": str(RETRY_AFTER_S)})


def _allowed(app: FastAPI, request: Request) -> list[str]:
    """The methods that the path of a request answers."""
    asked = [{**request.scope, "method": method} for method in METHODS]
    return [
        *(one["method"] for one in asked if any(route.matches(one)[0] is Match.FULL for route in app.routes)),
        "OPTIONS",
    ]


def install(app: FastAPI) -> None:
    """Register handlers, so that every error of the application has this form."""

    def id_of(request: Request) -> str:
        return str(request.scope.get("request_id", ""))

    def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, ProblemError)
        return problem(id_of(request), error.status, error.detail, error.headers, error.errors)

    def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        headers = error.headers
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            # The router itself names only the methods of the first route at the path, and refuses OPTIONS.
            headers = {"Allow": ", ".join(_allowed(app, request))}
            if request.method == "OPTIONS":
                return Response(status_code=204, headers=headers)
        return problem(id_of(request), error.status_code, str(error.detail), headers)

    def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        # Never include the input: it may be a secret, and NaN in it is not valid JSON.
        first: dict[str, str] = {}
        for one in error.errors():
            first.setdefault(_place(one["loc"]), _in_words(one))
        errors = [{"loc": loc, "msg": msg} for loc, msg in first.items()]
        return problem(id_of(request), 422, "the request is not valid", errors=errors)

    def busy(request: Request, _error: Exception) -> Response:
        return unavailable(id_of(request))

    def failed(request: Request, _error: Exception) -> Response:
        # The text log of the service has the details, under this id.
        return problem(
            id_of(request), 500, "internal error; the log of the service has the details, under this request_id"
        )

    app.add_exception_handler(ProblemError, refused)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(StoreError, busy)
    app.add_exception_handler(Exception, failed)
