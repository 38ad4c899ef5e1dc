from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import hypothesis
import pytest
import schemathesis
from fastapi.routing import APIRoute, iter_route_contexts
from hypothesis import HealthCheck, Phase
from schemathesis.generation import GenerationMode
from schemathesis.python import asgi
from schemathesis.specs.openapi.checks import ignored_auth, positive_data_acceptance

from rankwatch_service.api.description import CONFLICT
from tests.support.service.api import Api
from tests.support.trials.selection import trials


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


def numbers_in(content: Any, holder: Any = None, key: Any = None) -> Iterator[tuple[Any, Any]]:
    """Where the numbers of a JSON document are: what holds each, and its key or index there."""
    if isinstance(content, dict | list):
        for place, value in content.items() if isinstance(content, dict) else enumerate(content):
            yield from numbers_in(value, content, place)
    elif isinstance(content, int | float) and not isinstance(content, bool):
        yield holder, key


def test_the_example_of_each_body_and_answer_is_valid(api):
    """Those of bodies are accepted by the models of the routes, those of answers by what describes them."""
    routes = routes_of(api.app)
    bodies = answers = 0
    for path, methods in api.app.openapi()["paths"].items():
        for method, operation in methods.items():
            route = routes[method.upper(), path]
            content = operation.get("requestBody", {}).get("content", {}).get("application/json")
            if content and route.body_field:
                _, errors = route.body_field.validate(content["example"], loc=("body",))
                assert not errors, f"{method} {path}: {errors}"
                bodies += 1
            content = operation["responses"].get("200", {}).get("content", {}).get("application/json")
            if content and route.response_field:
                _, errors = route.response_field.validate(content["example"], loc=("answer",))
                assert not errors, f"{method} {path}: {errors}"
                answers += 1
    assert bodies > 15
    assert answers > 30


def test_neither_a_truth_value_nor_a_text_is_a_number_in_a_body(api):
    """Python takes `true` for 1: a policy with `"approval_ranks": false` would ask nobody for an approval."""
    routes = routes_of(api.app)
    numbers = 0
    for path, methods in api.app.openapi()["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            body = deepcopy(content.get("example"))
            for holder, key in numbers_in(body):
                for wrong in (True, str(holder[key])):
                    right, holder[key] = holder[key], wrong
                    _, errors = routes[method.upper(), path].body_field.validate(body, loc=("body",))
                    holder[key] = right
                    assert errors, f"{method} {path}: {key}={wrong!r}"
                numbers += 1
    assert numbers > 15


STREAMS = ("/api/v1/events", "/api/v1/agents/orders", "/api/v1/agents/view")
"""They answer for as long as the client listens, or wait for what another one does."""

REFUSALS = ["400", "403", "404", "409", "413", "415", "422", "429"]

LEFT_OUT = [
    positive_data_acceptance,  # a name that nothing has is not found, and rules go beyond what a schema can say
    ignored_auth,  # `test_access.py` has it: so many wrong tokens from one address are slowed down (429)
]


@pytest.fixture(scope="module")
def described(tmp_path_factory) -> Iterator[Any]:
    """The operations by their description, and the headers of an admin."""
    api = Api(tmp_path_factory.mktemp("described"))
    schema = schemathesis.openapi.from_dict(api.app.openapi())
    schema.app = api.app
    schema.config.checks.negative_data_rejection.expected_statuses = REFUSALS
    operations = [found.ok() for found in schema.get_all_operations()]
    yield [one for one in operations if one.path not in STREAMS], {"Authorization": f"Bearer {api.admin}"}
    asgi.shutdown_lifespans()
    api.engine.dispose()


def send(operations, headers, mode, examples):
    for operation in operations:

        @hypothesis.settings(
            max_examples=examples, phases=[Phase.generate], suppress_health_check=list(HealthCheck), deadline=None
        )
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def answered(case):
            case.call_and_validate(headers=headers, excluded_checks=LEFT_OUT)

        answered()


def test_requests_that_fit_the_description_get_the_answers_that_it_lists(described):
    operations, headers = described
    assert len(operations) > 80
    send(operations, headers, GenerationMode.POSITIVE, trials(1, 50))


def test_bodies_that_do_not_fit_the_description_are_refused(described):
    operations, headers = described
    send([one for one in operations if one.body], headers, GenerationMode.NEGATIVE, trials(3, 100))
