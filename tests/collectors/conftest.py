"""A rank under a clock that only the test moves, and torch on one thread."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ranks.recorders import Rank


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Where torch is loaded: of small tensors several threads on a busy machine take a hundred times as long."""
    torch = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch else 0
    if torch:
        torch.set_num_threads(1)
    yield
    if torch:
        torch.set_num_threads(threads)
