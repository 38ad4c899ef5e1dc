"""Refuses unknown and repeated query parameters: a misspelled filter must not be ignored, nor one of two values."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, get_args, get_origin

from fastapi import Request
from fastapi.dependencies.utils import get_flat_params
from fastapi.params import Query
from fastapi.routing import APIRoute

from rankwatch_service.api.http.problem import ProblemError


def reject_unknown_parameters(request: Request) -> None:
    """Dependency of every API route.

    Raises:
        ProblemError: a parameter is unknown, or is repeated though the route takes one value.
    """
    route = request.scope.get("route")
    if not request.query_params or not isinstance(route, APIRoute):
        return
    fields = [field for field in get_flat_params(route.dependant) if isinstance(field.field_info, Query)]
    known = {field.alias for field in fields}
    unknown = sorted(set(request.query_params) - known)
    if unknown:
        errors = []
        for name in unknown:
            close = get_close_matches(name, known, 1)
            msg = f"unknown parameter; did you mean {close[0]!r}?" if close else "unknown parameter"
            errors.append({"loc": f"query.{name}", "msg": msg})
        raise ProblemError(422, f"unknown query parameters: {', '.join(unknown)}", errors=errors)
    singles = [field.alias for field in fields if not _takes_several(field.field_info.annotation)]
    twice = [name for name in singles if len(request.query_params.getlist(name)) > 1]
    if twice:
        raise ProblemError(422, f"query parameters given more than once: {', '.join(twice)}")


def _takes_several(annotation: Any) -> bool:
    return any(get_origin(one) is list for one in (annotation, *get_args(annotation)))
