from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ranks.ordered import Recorded


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    gc.collect()
    gc.freeze()  # as in tests/conftest.py: what frameworks import at first use
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rings").mkdir()
    made = Recorded(tmp_path / "rings")
    yield made
    made.close()
