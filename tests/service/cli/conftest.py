"""What tests of the command line share."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.service.api import served_api
from tests.support.service.terminal import Terminal


@pytest.fixture
def terminal(capsys, monkeypatch, tmp_path) -> Terminal:
    return Terminal(capsys, monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def api(tmp_path_factory) -> Iterator[Any]:
    """A real api on a real port, for the tests of one file."""
    with served_api(tmp_path_factory.mktemp("api")) as (api, url):
        api.url = url
        yield api


@pytest.fixture
def to(api) -> tuple[str, ...]:
    """Options that name this api and its admin."""
    return ("--url", api.url, "--token", api.admin)


@pytest.fixture
def rankwatch(terminal, to) -> Callable[..., tuple[int, str, str]]:
    """Runs a command on this api."""
    return lambda *arguments: terminal.run(*arguments, *to)
