"""A rank under a clock that only the test moves."""

from pathlib import Path

import pytest

from tests.support.ranks.recorders import Rank


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path)
