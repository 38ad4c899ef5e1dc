"""The api answers requests that are drawn from its own description as the description says."""

from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis.generation import GenerationMode
from schemathesis.python import asgi
from schemathesis.specs.openapi.checks import ignored_auth, positive_data_acceptance

from tests.support.service.api import Api
from tests.support.trials.selection import trials

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
