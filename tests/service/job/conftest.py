import pytest

from tests.support.detection.scripted_job import World


@pytest.fixture
def world() -> World:
    """A job of two hosts with two ranks each, with scripted observations."""
    return World()
