"""The OpenAPI description, at `GET /api/openapi.json` and from `python -m rankwatch_service.api`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Final

from fastapi import Depends, FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute, iter_route_contexts

from rankwatch_service.access.grants import Scope
from rankwatch_service.access.identities import Identity
from rankwatch_service.api.dependencies import Require
from rankwatch_service.api.description import PROBLEM, add_examples, add_refusals, shared_refusals
from rankwatch_service.api.http.gate import COOKIE

PATH: Final = "/api/openapi.json"
PUBLIC: Final = frozenset({("GET", "/livez"), ("GET", "/readyz"), ("POST", "/api/v1/session")})
"""Operations that require no token."""


def describe(app: FastAPI) -> None:
    """Add the route of the description, which is made when it is first asked for: that takes longer than all else at a
    start. Call it after all other routes are added.

    Raises:
        AssertionError: a route neither requires a scope nor is in `PUBLIC`.
    """

    @app.get(PATH, tags=["health"], include_in_schema=True)
    def openapi(_identity: Annotated[Identity, Depends(Require(Scope.READ))]) -> JSONResponse:
        """This description."""
        return JSONResponse(app.openapi())

    for method, path, needed in operations(app):
        assert (needed is None) == ((method, path) in PUBLIC), f"{method} {path} requires {needed}"
    app.openapi = cache(lambda: _description(app))  # type: ignore[method-assign]


def text(app: FastAPI) -> str:
    """The description as indented JSON with sorted keys."""
    return json.dumps(app.openapi(), indent=1, sort_keys=True) + "\n"


def _requirements(dependant: Dependant) -> Iterator[Require]:
    for inner in dependant.dependencies:
        if isinstance(inner.call, Require):
            yield inner.call
        yield from _requirements(inner)


def operations(app: FastAPI) -> Iterator[tuple[str, str, Require | None]]:
    """Method, path and requirement of every operation of the api."""
    for context in iter_route_contexts(app.routes):
        route = context.original_route
        if isinstance(route, APIRoute) and context.path is not None:
            for method in sorted(route.methods or ()):
                yield method, context.path, next(_requirements(route.dependant), None)


def _with_names_of_pages(content: dict[str, Any]) -> dict[str, Any]:
    """The description, in which the page of jobs is a JobPage: FastAPI calls it Page_Job_."""
    renamed: dict[str, Any] = json.loads(re.sub(r'Page_(\w+)_(?=")', r"\1Page", json.dumps(content)))
    return renamed


def _description(app: FastAPI) -> dict[str, Any]:
    content = _with_names_of_pages(get_openapi(title=app.title, version=app.version, routes=app.routes))
    components = content.setdefault("components", {})
    components["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer"},
        "session": {"type": "apiKey", "in": "cookie", "name": COOKIE},
    }
    schemas = components.setdefault("schemas", {})
    schemas["Problem"] = PROBLEM
    components["responses"] = shared_refusals()
    for unused in ("HTTPValidationError", "ValidationError"):  # FastAPI's own, whose place Problem takes
        schemas.pop(unused, None)
    for method, path, needed in operations(app):
        operation = content["paths"][path][method.lower()]
        answers = operation.setdefault("responses", {})
        answers.pop("422", None)
        add_refusals(answers, method, path, operation, needs_token=needed is not None)
        add_examples(operation, schemas)
        if needed is not None:
            operation["security"] = [{"token": []}, {"session": []}]
            operation["x-scope"] = str(needed.scope)
            operation["x-every-job"] = needed.every_job
    return content
