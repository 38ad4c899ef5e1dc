from collections.abc import Iterator
from typing import Any

from fastapi.routing import APIRoute, iter_route_contexts

from rankwatch_service.api.description import CONFLICT


def test_every_operation_has_a_text_and_says_by_which_statuses_it_is_refused(api):
    described = api.app.openapi()
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            assert operation["description"], f"{method} {path}"
            assert "application/problem+json" in operation["responses"]["default"]["content"]
            refusals = {status for status in operation["responses"] if status[0] in "45"}
            assert {"400", "421", "500", "503"} <= refusals, f"{method} {path}"
            assert "security" not in operation or {"401", "403"} <= refusals, f"{method} {path}"
            assert "{" not in path or "404" in refusals, f"{method} {path}"
    for method, path in CONFLICT:
        assert "409" in described["paths"][path][method.lower()]["responses"]


def routes_of(app) -> dict[tuple[str, str], APIRoute]:
    """By method and path."""
    return {
        (method, context.path): context.original_route
        for context in iter_route_contexts(app.routes)
        if isinstance(context.original_route, APIRoute)
        for method in context.original_route.methods
    }


def made_of(schema: dict, schemas: dict) -> Any:
    """The simplest value of a schema, with all its fields."""
    if "$ref" in schema:
        return made_of(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    if "anyOf" in schema:
        return made_of(schema["anyOf"][0], schemas)
    match schema.get("type"):
        case "object":
            return {name: made_of(field, schemas) for name, field in schema.get("properties", {}).items()}
        case "array":
            return [made_of(schema.get("items", {}), schemas)]
        case "integer" | "number":
            return max(1, schema.get("minimum", 1))
    return schema.get("enum", ["text"])[0]


def numbers_in(content: Any, holder: Any = None, key: Any = None) -> Iterator[tuple[Any, Any]]:
    """Where the numbers of a JSON document are: what holds each, and its key or index there."""
    if isinstance(content, dict | list):
        for place, value in content.items() if isinstance(content, dict) else enumerate(content):
            yield from numbers_in(value, content, place)
    elif isinstance(content, int | float) and not isinstance(content, bool):
        yield holder, key


def test_neither_a_truth_value_nor_a_text_is_a_number_in_a_body(api):
    """Python takes `true` for 1: a policy with `"approval_ranks": false` would ask nobody for an approval."""
    routes, described = routes_of(api.app), api.app.openapi()
    numbers = 0
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            body = made_of(content.get("schema", {}), described["components"]["schemas"])
            for holder, key in numbers_in(body):
                for wrong in (True, str(holder[key])):
                    right, holder[key] = holder[key], wrong
                    _, errors = routes[method.upper(), path].body_field.validate(body, loc=("body",))
                    holder[key] = right
                    assert any(key in error["loc"] for error in errors), f"{method} {path}: {key}={wrong!r}"
                numbers += 1
    assert numbers > 15
