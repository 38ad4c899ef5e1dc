import pytest

from rankwatch_service.incidents.correlator import Correlator


@pytest.fixture
def correlator() -> Correlator:
    """Of a job whose first attempt has begun."""
    made = Correlator("gpt")
    made.begin("l.0")
    return made
