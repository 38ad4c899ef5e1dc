"""What tests of the command line share."""

import pytest

from tests.support.service.terminal import Terminal


@pytest.fixture
def terminal(capsys, monkeypatch, tmp_path) -> Terminal:
    return Terminal(capsys, monkeypatch, tmp_path)
