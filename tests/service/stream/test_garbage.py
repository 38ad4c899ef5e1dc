import gc

import pytest

from rankwatch_service.stream.garbage import YOUNG_MAX, look_seldom


@pytest.fixture
def usual():
    before = gc.get_threshold()
    yield before
    gc.set_threshold(*before)


def test_young_objects_are_looked_at_seldom_and_older_ones_as_before(usual):
    look_seldom()
    assert gc.get_threshold() == (YOUNG_MAX, *usual[1:])
    assert gc.isenabled()
